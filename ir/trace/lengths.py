"""The length of a tensor as a symbol.

Python makes a plain number of what `len` gives, so `torch.arange(len(x))` would fix the number of
rows to that of the example, as `torch.arange(x.shape[0])` does not. Input: a module. While it is
captured, `len` is another function in the files that define the classes of its parts, and its loss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def length(value: Any) -> Any:
    """As `len`; of a tensor, the size that it has."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


@contextmanager
def symbolic_lengths(module: nn.Module) -> Iterator[None]:
    """In the files of users and libraries other than torch; one that has a `len` keeps it."""
    spaces = [space for space in _spaces(module) if "len" not in space]
    for space in spaces:
        space["len"] = length
    try:
        yield
    finally:
        for space in spaces:
            del space["len"]


def _spaces(module: nn.Module) -> list[dict[str, Any]]:
    """The global names of these files, each once."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    homes = {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] != "torch"}
    found = [vars(sys.modules[home]) for home in homes - {"builtins"} if home in sys.modules]
    found.append(getattr(getattr(module, "loss", None), "__globals__", {}))
    return list({id(space): space for space in found}.values())
