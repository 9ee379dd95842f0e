"""What runs, operation by operation.

Input: calls on fake tensors while a mode is active. Output: their text, which two runs share
exactly if they do the same, with what they read that they do not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ir.trace.adapters import (
    TorchDispatchMode,
    constant_text,
    flatten,
    is_fake,
    is_small,
)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, but not while it is paused, writes down every operation: what it reads, its
    literals, what it gives.

    `known` names tensors of whoever runs them; others are numbered, constants are spelled out.
    `foreign` are those that were made before, or during a pause, and are neither; `read`: all
    tensors that were read or written.
    """

    def __init__(self, known: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.words = {id(tensor): name for name, tensor in known.items()}
        self.alive = list(known.values())
        self.foreign: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        read = flatten((args, kwargs))[0]
        self.read |= {id(x): x for x in tensors_of(read)}
        self.foreign |= {
            id(x): x for x in tensors_of(read) if is_fake(x) and id(x) not in self.words
        }
        words = [self._word(x) for x in read]
        made = [self._word(x) for x in flatten(result)[0]]
        self.lines.append(f"{', '.join(made)} = {func}({', '.join(words)})")
        return result

    def _word(self, item: Any) -> str:
        if not isinstance(item, Tensor):
            return repr(item)
        if id(item) not in self.words:
            self.know(f"t{len(self.words)}" if is_fake(item) else self._constant(item), item)
        return self.words[id(item)]

    def know(self, name: str, tensor: Tensor) -> None:
        """A name of a tensor that was made while this did not look."""
        self.alive.append(tensor)
        self.words[id(tensor)] = name

    def _constant(self, tensor: Tensor) -> str:
        return constant_text(tensor)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class Outside(Operations):  # type: ignore[no-untyped-call]
    """The same of what runs outside of the members of families, in one of several runs: a large
    constant may have been made anew, so it is told by its type."""

    def _constant(self, tensor: Tensor) -> str:
        if is_small(tensor):
            return constant_text(tensor)
        return f"a constant, {tensor.dtype} {tuple(tensor.shape)}"


def tensors_of(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
