"""Copies of a model, to be trained or changed without the user's.

Input: a model. Output: its copy. Tensors that the model has computed and holds as an attribute,
such as its last activations, have none of torch's own: they are copied as plain values.
"""

import copy

from torch import Tensor, nn

from runtime.errors import Refused


def copied(model: nn.Module) -> nn.Module:
    """Raises `Refused` for a model that holds what can't be copied."""
    computed = [
        value for module in model.modules() for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]  # fmt: skip
    try:
        return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})
    except Exception as error:  # whatever a part of the model raises
        said = (str(error).strip().splitlines() or [""])[0]
        raise Refused(
            f"this model can't be copied, so it can't be compared: {type(error).__name__}: "
            f"{said[:200]}"
        ) from error
