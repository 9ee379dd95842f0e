"""Runs a model with nothing dropped out, for comparing what else it does.

`NothingDropped` is active while the model is called, in plain torch or traced: every dropout is
called with the probability 0, whether that is a module's own or written out in the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BUILT_IN = (
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_, torch.native_dropout,
)  # fmt: skip
"""Called with (input, p, train)."""
WRITTEN = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout,
    functional.multi_head_attention_forward,
)  # fmt: skip
"""Functions in Python, which name their probability `p` or `dropout_p`."""


class NothingDropped(TorchFunctionMode):
    """While active, every probability of dropping out is 0."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return RULES.get(func, func)(*args, **(kwargs or {}))


def _built_in(func: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, p: float, train: bool) -> Any:
        return func(input, 0.0, train)

    return call


def _written(func: Callable[..., Any]) -> Callable[..., Any]:
    taken = inspect.signature(func)
    name = "p" if "p" in taken.parameters else "dropout_p"

    def call(*args: Any, **kwargs: Any) -> Any:
        given = taken.bind(*args, **kwargs)
        given.arguments[name] = 0.0
        return func(*given.args, **given.kwargs)

    return call


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    attention = functional.scaled_dot_product_attention
    return attention(query, key, value, attn_mask, 0.0, *rest, **kwargs)


RULES: Mapping[Any, Callable[..., Any]] = {
    **{func: _built_in(func) for func in BUILT_IN},
    **{func: _written(func) for func in WRITTEN},
    functional.scaled_dot_product_attention: _attention,
}
"""By function, the same one with nothing dropped."""
