"""The module that is exported: the user's model with its loss, on flat tensor arguments.

Input: model, example `(args, kwargs)`, optional `loss(output)`. Output: `Step`, a module from
the tensor leaves of the arguments to `[loss, *metrics]`, and `Leaf` facts about each leaf.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ir.errors import CaptureError
from ir.trace.adapters import as_in_eager, flatten, flatten_with_paths, unflatten
from ir.trace.carried import PLAIN, Place, attributes, changed

SMALLEST_TRACED_BATCH = 4


@dataclass(frozen=True)
class Leaf:
    """A tensor leaf of the arguments: `path` as torch's pytree writes it, `rows` of its dim 0."""

    name: str
    path: str
    tensor: Tensor
    rows: int | None

    def example(self, factor: int) -> Tensor:
        """An uninitialised tensor like the leaf with `factor` times the rows."""
        shape = list(self.tensor.shape)
        if self.rows is not None:
            shape[0] *= factor
        return torch.empty(shape, dtype=self.tensor.dtype, device=self.tensor.device)


class Report:
    """What traced forwards found out; torch.export resets plain attributes of a module. `changed`:
    attributes of the model that any of them changed."""

    def __init__(self) -> None:
        self.metrics: list[str] = []
        self.changed: dict[Place, None] = {}


class Step(nn.Module):
    """Runs `model(*args, **kwargs)` on tensor leaves and returns the loss and the metrics."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                 loss: Callable[[Any], Tensor] | None):  # fmt: skip
        super().__init__()
        self.model = model
        self.leaves, self.spec = flatten((args, kwargs))
        self.loss = loss
        self.report = Report()
        self.hidden: tuple[str, ...] = ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All but what is inside of the model's `hidden` parts, and so no parameter of that."""
        inside = tuple(f"{prefix and prefix + '.'}model.{path}." for path in self.hidden)
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if not name.startswith(inside):
                yield name, module

    @contextmanager
    def hiding(self, paths: tuple[str, ...]) -> Iterator[None]:
        """Inside, what these parts of the model consist of is not found through this module."""
        self.hidden = paths
        try:
            yield
        finally:
            self.hidden = ()

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        before = attributes(self.model)
        with as_in_eager(), _no_next_call(self.model):
            output = self.model(*args, **kwargs)
        self.report.changed |= dict.fromkeys(changed(before, attributes(self.model)))
        with as_in_eager():
            loss = self.loss(output) if self.loss is not None else find_loss(output)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"the loss must be a tensor with no dims, got {kind}.")
        if not loss.is_floating_point():
            raise CaptureError(
                f"the loss is {loss.dtype}, which has no gradient: it has to be a real "
                "floating-point number, and not the result of a comparison or of argmax, say."
            )
        metrics = {k: v for k, v in scalars(output).items() if v is not loss}
        self.report.metrics = list(metrics)
        return [loss, *metrics.values()]


@contextmanager
def _no_next_call(model: nn.Module) -> Iterator[None]:
    """Models of transformers keep keys and values for their next call where `config.use_cache` says
    so; a training step has none, so that is off inside."""
    configs: dict[int, Any] = {id(c): c for c in map(_config, model.modules())}
    caching = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    for config in caching:
        with suppress(AttributeError):  # a frozen one stays as it is
            config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            with suppress(AttributeError):
                config.use_cache = True


def _config(part: nn.Module) -> Any:
    return getattr(part, "config", None)


def find_loss(output: Any) -> Tensor:
    """The loss that a model returns: a scalar, or the field or key `loss`."""
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    raise CaptureError(
        f"the model returns {_kind(output)} and no loss was found in it. Return a scalar "
        "loss (alone, or as `loss`), or give loss(output) beside the model."
    )


def _kind(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of {output.dim()} dim{'s' * (output.dim() != 1)}"
    return type(output).__name__


def scalars(output: Any) -> dict[str, Tensor]:
    """Named scalar tensors of an output: reported as metrics."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (Mapping, type)):
        output = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    if not isinstance(output, Mapping):
        return {}
    return {
        str(key): value for key, value in output.items()
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
    }  # fmt: skip


def named_tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, str, Tensor]]:
    """(name, path, tensor) of each tensor leaf in flattening order.

    A leaf is named after its last key, or after the parameter of `module.forward` it is given to.
    """
    names = [*inspect.signature(module.forward).parameters]
    found = []
    for path, keys, leaf in flatten_with_paths((args, kwargs)):
        if isinstance(leaf, Tensor):
            place = keys[1] if len(keys) > 1 and keys[0] == 0 else len(names)
            default = names[place] if isinstance(place, int) and place < len(names) else "input"
            words = [key for key in keys if isinstance(key, str)]
            found.append((words[-1] if words else default, path, leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            raise CaptureError(
                f"argument {path} is a {type(leaf).__name__}, whose tensors torch.export can't "
                "see. Register it with torch.export.register_dataclass, or pass its tensors."
            )
    return found


def plain_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """(path, text) of the leaves that a program has as they are."""
    leaves = flatten_with_paths((args, kwargs))
    return tuple((path, repr(leaf)) for path, _, leaf in leaves if isinstance(leaf, PLAIN))


def leaves_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Leaf], int]:
    """Tensor leaves with their presumed batch dim 0, and the batch size of the example."""
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"the arguments of a model come as a tuple, not as {type(args).__name__}: "
            "trace(model, (x,)), or trace(model, kwargs={...})."
        )
    tensors = named_tensors(module, args, kwargs)
    with_dims = [t for _, _, t in tensors if t.dim()]
    if not with_dims:
        raise CaptureError("the example arguments hold no tensor with a batch dim.")
    batch = with_dims[0].shape[0]
    return [
        Leaf(name, path, tensor, batch if tensor.dim() and tensor.shape[0] == batch else None)
        for name, path, tensor in tensors
    ], batch
