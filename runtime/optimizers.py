"""Optimizers over this rank's local tensors: torch.optim's own, chosen by name.

SGD and AdamW work element by element, so a shard is updated exactly as that part of the whole
parameter would be, and so is a flat piece of one, where ZeRO divides. State of an entry that is
`hosted` lies in host memory and comes to the device for its parameter's update alone. Options are
torch's, with torch's defaults; an unknown one is a UsageError. Of torch's implementations the one
is taken that the plan counts (`implementation`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from runtime.errors import UsageError
from runtime.host import Hosted, fetch, store
from runtime.state import State

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, ("lr", "betas", "eps", "weight_decay")),
    "sgd": (torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """An optimizer of some parameters; of one, where their state is `hosted`."""

    optimizer: torch.optim.Optimizer
    hosted: bool

    def step(self) -> None:
        """Updates the parameters and forgets their gradients."""
        if self.hosted:
            self._replace(Hosted, lambda held: fetch(held)[0])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.hosted:
            self._replace(torch.Tensor, store)

    def _replace(self, kind: type, change: Callable[[Any], Any]) -> None:
        """Changes all state of that kind but the count of steps, which torch has on the host."""
        for slots in self.optimizer.state.values():
            for name, held in slots.items():
                if isinstance(held, kind) and name != "step":
                    slots[name] = change(held)


def implementation(parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """One fused kernel on GPUs, which needs no memory of its own; else one parameter after the
    other. torch's own choice on GPUs makes temporaries of all parameters at once."""
    is_fused = all(p.is_cuda and p.is_floating_point() for p in parameters)
    return {"fused": True} if is_fused else {"foreach": False}


def _groups(state: State) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """The parameters that are updated together, and each that has its state in host memory."""
    pairs = list(zip(state.entries, state.updated, strict=True))
    yield [p for entry, p in pairs if p is not None and not entry.hosted], False
    for entry, parameter in pairs:
        if parameter is not None and entry.hosted:
            yield [parameter], True


class LocalOptimizer:
    """One optimizer over the trainable entries that this rank holds."""

    def __init__(self, name: str, state: State, options: Mapping[str, Any]) -> None:
        if name not in OPTIMIZERS:
            raise UsageError(f'unknown optimizer "{name}"; there are {sorted(OPTIMIZERS)}.')
        kind, allowed = OPTIMIZERS[name]
        if unknown := sorted(set(options) - set(allowed)):
            raise UsageError(f"{name} has no option {unknown}; it has {list(allowed)}.")
        self._state = state
        infinite = [k for k, v in options.items() if isinstance(v, float) and not isfinite(v)]
        if infinite:
            raise UsageError(f"{name}: {infinite[0]} is {options[infinite[0]]}; give a finite one.")
        self._name, self._has_momentum = name, bool(options.get("momentum"))
        self._parameters = state.updated
        try:
            self._parts = [
                _Part(kind(group, **implementation(group), **options), hosted=hosted)
                for group, hosted in _groups(state) if group
            ]  # fmt: skip
        except ValueError as error:
            raise UsageError(f"{name} refused its options {dict(options)}: {error}.") from error

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates the parameters in place; one without a gradient stays as it is."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter is not None:
                parameter.grad = gradient
        for part in self._parts:
            part.step()

    def set_learning_rate(self, lr: float) -> None:
        """The learning rate of the following steps: finite, and not below zero."""
        if not (isfinite(lr) and lr >= 0):
            raise UsageError(f"the learning rate is {lr}; give a number from 0.")
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors of a parameter's size that it holds from the first step on."""
        if self._name == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._has_momentum else ()

    def local_state(self) -> dict[str, dict[str, torch.Tensor | Hosted]]:
        """Per parameter (its first name) the optimizer's tensors, in the layout of what it updates:
        the parameter's, or a flat piece."""
        held = {p: slots for part in self._parts for p, slots in part.optimizer.state.items()}
        slots: dict[str, dict[str, torch.Tensor | Hosted]] = {}
        for entry, parameter in zip(self._state.entries, self._parameters, strict=True):
            found = {} if parameter is None else held.get(parameter, {})
            if found:
                slots[entry.names[0]] = {k: v for k, v in found.items() if v is not None}
        return slots
