"""What a forward keeps in attributes of modules, beside parameters and buffers that it changes in
place: none of that goes from one step of an emitted program to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

Place: TypeAlias = tuple[str, str]
"""A module's path and an attribute of it."""

OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
DEPTH, MOST_ITEMS = 3, 1000
"""How deep collections are looked into, and up to which size."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Registered(NamedTuple):
    """A parameter or a buffer."""

    tensor: Tensor | None
    requires_grad: bool


def attributes(model: nn.Module) -> dict[Place, Any]:
    """Values of all attributes; of collections what is in them now."""
    found: dict[Place, Any] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[path, name] = Registered(tensor, tensor is not None and tensor.requires_grad)
        for name, value in vars(module).items():
            if name not in OWN:
                found[path, name] = _content(value, DEPTH)
    return found


def changed(before: dict[Place, Any], after: dict[Place, Any]) -> list[Place]:
    """Attributes that are new, are gone or have another value; a tensor is another one unless it is
    the same object."""
    places = dict.fromkeys((*before, *after))
    missing = object()
    return [p for p in places if not _same(before.get(p, missing), after.get(p, missing))]


def tensors_in(content: Any) -> Iterator[Tensor]:
    """Of a value of `attributes`."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, tuple):
        for item in content:
            yield from tensors_in(item)


def attribute(place: Place) -> str:
    """As in the model's code, from the model on."""
    return ".".join(filter(None, place))


def _content(value: Any, depth: int) -> Any:
    """A collection as a tuple of its kind and its items; anything else as it is."""
    items: Callable[[], Any] | None = None
    match value:
        case dict():
            items = value.items
        case list() | tuple() | set() | frozenset() | deque():
            items = value.__iter__
    if items is None or not depth or len(value) > MOST_ITEMS:
        return value
    return type(value), *(_content(item, depth - 1) for item in items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, PLAIN):
        return type(one) is type(other) and bool(one == other)
    return one is other
