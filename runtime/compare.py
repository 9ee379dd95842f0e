"""Compares an emitted program, all ranks as threads, with the plain model, step by step.

Input: an imported program with its layout, a model with its batch, and the number of steps.
Output: a `Comparison`: relative differences of the losses, the gradients of the first step and
the tensors after the last (the optimizer's too), and whether all replicas are bit-equal.
`widened` makes the float64 copy of a model on which the comparison is meaningful to 1e-9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runtime.copies import copied
from runtime.errors import Refused, RuntimeFailure
from runtime.numberless import check_losses, difference, largest, numberless, relative
from runtime.rounding import moved_by_rounding, scale_of, untrained
from runtime.trainer import Trainer, run_threads

TOLERANCE = 1e-9
"""Relative difference, in float64, up to which numbers count as equal."""
NEGLIGIBLE = 1e-6
"""A tensor is compared relative to its own size, but at least to this part of the largest."""
ERRORS = ("loss_rel_err", "grad_rel_err", "param_rel_err")
"""What a check reports of the losses, the first gradients and the last parameters."""

WIDE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


class PromoteCasts(TorchFunctionMode):
    """While active, casts to a narrower floating type go to float64, and so do constants: what is
    made of no tensor, as by torch.eye, and narrower tensors that a call reads."""

    CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.CASTS:
            return args[0].double()
        if not func.__name__.endswith("_"):  # the others write into what they are given, or get it
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        is_made = isinstance(result, Tensor) and not any(isinstance(a, Tensor) for a in args)
        return result.to(WIDE.get(result.dtype, result.dtype)) if is_made else result


def _wide(argument: Any) -> Any:
    match argument:
        case torch.dtype():
            return WIDE.get(argument, argument)
        case Tensor() if argument.dtype in WIDE and not argument.requires_grad:
            return argument.to(WIDE[argument.dtype])
        case list() | tuple() if any(isinstance(item, Tensor) for item in argument):
            return type(argument)(map(_wide, argument))
        case _:
            return argument


def widened(model: nn.Module) -> nn.Module:
    """A copy of the model with every floating parameter and buffer in float64."""
    wide = copied(model)
    for module in wide.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:  # torch takes it from the dtype
            module.eps = torch.finfo(next(iter(module.parameters()), torch.zeros(())).dtype).eps
    for tensor in (*wide.parameters(), *wide.buffers()):
        tensor.data = tensor.data.to(WIDE.get(tensor.dtype, tensor.dtype))
    return wide


def widened_batch(tree: Any) -> Any:
    """The arguments with every floating tensor in float64."""
    match tree:
        case Tensor():
            return tree.to(WIDE.get(tree.dtype, tree.dtype))
        case _ if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            fields = [field.name for field in dataclasses.fields(tree) if field.init]
            wide = {name: widened_batch(getattr(tree, name)) for name in fields}
            return dataclasses.replace(tree, **wide)
        case dict():
            return {key: widened_batch(value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):  # a named tuple
            return type(tree)(*map(widened_batch, tree))
        case list() | tuple():
            return type(tree)(widened_batch(item) for item in tree)
        case _:
            return tree


@dataclass(frozen=True)
class Run:
    """What a few training steps gave: losses, first gradients, tensors and optimizer state at the
    end, by name."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]
    unequal_replicas: tuple[str, ...] = ()
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Relative differences; `worst` names the tensor with the largest."""

    loss_rel_err: float
    grad_rel_err: float
    param_rel_err: float
    worst: str
    unequal_replicas: tuple[str, ...]
    tolerance: float = TOLERANCE
    numberless: str = ""
    """What the plain model itself gives no numbers for."""

    @property
    def status(self) -> str:
        errors = (self.loss_rel_err, self.grad_rel_err, self.param_rel_err)
        good = all(error <= self.tolerance for error in errors) and not self.unequal_replicas
        return "ok" if good else "mismatch"

    def to_json(self) -> dict[str, Any]:
        reason = self.numberless or None
        if self.unequal_replicas:
            reason = f"replicas differ: {', '.join(self.unequal_replicas[:5])}"
        return {
            "loss_rel_err": self.loss_rel_err, "grad_rel_err": self.grad_rel_err,
            "param_rel_err": self.param_rel_err, "worst": self.worst, "reason": reason,
        }  # fmt: skip


@dataclass(frozen=True)
class Training:
    """How both sides are trained."""

    steps: int = 2
    lr: float = 1e-2
    clip_norm: float | None = 1.0
    optimizer: str = "adamw"
    momentum: float = 0.0  # of SGD

    @property
    def options(self) -> dict[str, float]:
        """The optimizer's options, by torch's names."""
        return {"lr": self.lr, **({"momentum": self.momentum} if self.momentum else {})}


def run_plain(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor], training: Training, *, promote: bool = True,
) -> Run:  # fmt: skip
    """Trains a copy of the plain model in this thread, with its casts promoted.

    Raises `Refused` with torch's words if the model itself can't be copied or trained, and if its
    loss is no finite number; in a later step only if its first gradients are.
    """
    try:
        found = _train_plain(model, args, kwargs, loss_of, training, promote)
    except Exception as error:
        said = str(error).strip().splitlines()
        kind = " in float64, which numbers are compared in" if promote else ""
        raise Refused(
            f"plain torch can't train this model{kind}: {type(error).__name__}: "
            f"{said[0].rstrip('.') if said else ''}. There is nothing to compare with."
        ) from error
    check_losses(found.losses, found.gradients)
    return found


def _train_plain(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor], training: Training, promote: bool,
) -> Run:  # fmt: skip
    own = copied(model)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    trained = [p for p in own.parameters() if p.requires_grad]
    optimizer = kinds[training.optimizer](trained, **training.options) if trained else None
    losses, gradients = [], {}
    for step in range(training.steps):
        loss = _forward(own, args, kwargs, loss_of, promote)
        own.zero_grad(set_to_none=True)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = _gradients(own)
        if training.clip_norm is not None and trained:
            torch.nn.utils.clip_grad_norm_(trained, training.clip_norm)
        if optimizer is not None:
            optimizer.step()
    return Run(tuple(losses), gradients, _tensors(own), (), _optimizer_state(own, optimizer))


def _forward(model: nn.Module, args: Any, kwargs: Any, loss_of: Any, promote: bool) -> Tensor:
    if not promote:
        return loss_of(model(*args, **kwargs))
    with PromoteCasts():
        return loss_of(model(*args, **kwargs))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False),
             *model.named_buffers(remove_duplicate=False)]  # fmt: skip
    return {name: tensor.detach().clone() for name, tensor in named}


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """The optimizer's tensors of a parameter's size, as "exp_avg of NAME"."""
    if optimizer is None:
        return {}
    return {
        f"{slot} of {name}": value.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and slot != "step"
    }


def run_program(
    program: ModuleType, layout: Mapping[str, Any], model: nn.Module, args: tuple[Any, ...],
    kwargs: Mapping[str, Any], training: Training,
) -> Run:  # fmt: skip
    """Trains the emitted program on all its ranks, as threads."""
    mesh = layout["mesh"]
    ranks = mesh["pipeline"] * mesh["data"] * mesh["tensor"]

    def train(trainer: Trainer) -> Run:
        losses, gradients = [], {}
        for step in range(training.steps):
            losses.append(trainer.step(*args, **kwargs).item())
            if step == 0:
                gradients = {name: g.clone() for name, g in trainer.gradients().items()}
        unequal = tuple(trainer.replica_differences())
        return Run(tuple(losses), gradients, trainer.gather(), unequal, trainer.optimizer_state())

    try:
        runs = run_threads(
            layout, program, model, ranks, train, optimizer=training.optimizer,
            optimizer_options=training.options, clip_norm=training.clip_norm,
            keep_gradients=True,
        )  # fmt: skip
    except RuntimeFailure:
        raise
    except Exception as error:
        raise ProgramFailed(
            f"the emitted program failed: {type(error).__name__}: {error}. This is a defect of "
            "Shardwright; please report the model."
        ) from error
    return runs[0]


class ProgramFailed(RuntimeFailure):
    """An accepted plan whose program does not run: as bad as numbers that differ."""

    exit_code = 4


def compare(
    found: Run, wanted: Run, *, update: float = 0.0, tolerance: float = TOLERANCE,
    nudged: Sequence[Run] = (),
) -> Comparison:  # fmt: skip
    """Relative differences of two runs; a gradient that only one has counts as infinite. Where the
    plain run gives NaN or infinity itself, the same counts as equal.

    `update` is the size of one optimizer step (the learning rate): trained tensors are compared
    relative to their own size or to a step, whichever is larger. `nudged`: runs as `wanted` of
    models that differ in their last bit. Where rounding moves a tensor by a part of its size that
    counts, differences are relative to that move (`runtime.rounding`).
    """
    loss = max(map(relative, found.losses, wanted.losses), default=0.0)
    by_gradient = moved_by_rounding([run.gradients for run in nudged], wanted.gradients)
    by_tensor = moved_by_rounding([run.tensors for run in nudged], wanted.tensors)
    states = [run.optimizer_state for run in nudged]
    by_state = moved_by_rounding(states, wanted.optimizer_state)
    free = untrained(wanted.gradients, wanted.tensors, wanted.losses[0])
    grad, worst_grad = _worst(found.gradients, wanted.gradients, by_gradient, free)
    param, worst_param = max(
        _worst(found.tensors, wanted.tensors, by_tensor, free, update),
        _worst(found.optimizer_state, wanted.optimizer_state, by_state, free),
    )
    name = worst_grad if grad >= param else worst_param
    said = numberless(wanted.gradients)
    return Comparison(loss, grad, param, name, found.unequal_replicas, tolerance, said)


def _worst(
    found: dict[str, Tensor], wanted: dict[str, Tensor], moved: Mapping[str, float],
    free: Collection[str] = (), least: float = 0.0,
) -> tuple[float, str]:  # fmt: skip
    """(largest relative difference, its tensor). The scale of a tensor is its largest entry,
    or what rounding moves it by, given by name in `moved`, without a limit for those in `free`."""
    scale = max((largest(t) for t in wanted.values()), default=0.0) * NEGLIGIBLE
    scale = max(scale, least)
    errors = {}
    for name in {**found, **wanted}:
        if name not in found or name not in wanted:
            given = found.get(name, wanted.get(name))
            errors[name] = float("inf") if given is not None and given.any() else 0.0
            continue
        a, b = found[name], wanted[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            errors[name] = float("inf")
        elif a.is_floating_point() or a.is_complex():
            far = difference(a, b)
            size = max(largest(b), scale, 1e-300)
            is_free = name.rpartition(" of ")[2] in free
            counted = scale_of(size, moved.get(name, 0.0), TOLERANCE, is_untrained=is_free)
            errors[name] = far / counted if far else 0.0
        else:
            errors[name] = 0.0 if torch.equal(a, b) else float("inf")
    worst = max(errors, key=lambda n: errors[n], default="")
    return (errors[worst], worst) if errors else (0.0, "")


def badness(result: Mapping[str, Any]) -> tuple[int, float]:
    """A mismatch is worse than a match, a match says more than a refusal; then by size."""
    errors = [result[key] or 0.0 for key in ERRORS]
    return ["refused", "ok", "mismatch"].index(result["status"]), max(errors)
