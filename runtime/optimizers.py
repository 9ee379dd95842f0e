"""Optimizers over this rank's local tensors: torch.optim's own, chosen by name.

SGD and AdamW work element by element, so a shard is updated exactly as that part of the whole
parameter would be, and so is a flat piece of one, where ZeRO divides. Options are torch's, with
torch's defaults; an unknown one is a UsageError.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtime.errors import UsageError
from runtime.state import State

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, ("lr", "betas", "eps", "weight_decay")),
    "sgd": (torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
}


class LocalOptimizer:
    """One optimizer over the trainable entries that this rank holds."""

    def __init__(self, name: str, state: State, options: Mapping[str, Any]) -> None:
        if name not in OPTIMIZERS:
            raise UsageError(f'unknown optimizer "{name}"; there are {sorted(OPTIMIZERS)}.')
        kind, allowed = OPTIMIZERS[name]
        if unknown := sorted(set(options) - set(allowed)):
            raise UsageError(f"{name} has no option {unknown}; it has {list(allowed)}.")
        self._state = state
        self._name, self._has_momentum = name, bool(options.get("momentum"))
        self._parameters = state.updated
        present = [parameter for parameter in self._parameters if parameter is not None]
        try:
            self._optimizer = kind([{"params": present}], **options) if present else None
        except ValueError as error:
            raise UsageError(f"{name} refused its options {dict(options)}: {error}.") from error

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates the parameters in place; one without a gradient stays as it is."""
        if self._optimizer is None:
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter is not None:
                parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def set_learning_rate(self, lr: float) -> None:
        """The learning rate of the following steps."""
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors of a parameter's size that it holds from the first step on."""
        if self._name == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._has_momentum else ()

    def local_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Per parameter (its first name) the optimizer's tensors, in the layout of what it updates:
        the parameter's, or a flat piece."""
        if self._optimizer is None:
            return {}
        slots: dict[str, dict[str, torch.Tensor]] = {}
        for entry, parameter in zip(self._state.entries, self._parameters, strict=True):
            found = {} if parameter is None else self._optimizer.state.get(parameter, {})
            if found:
                slots[entry.names[0]] = {k: v for k, v in found.items() if v is not None}
        return slots
