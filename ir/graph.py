"""The traced program: global shapes, a symbolic batch size, no sharding inside.

A `Graph` is a list of `Call`s to distinct `Block`s; a block that occurs many times (a
transformer layer) is stored once. Each block holds its forward nodes and the backward nodes
that follow from them. Everything is frozen and prints stably.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

BATCH = sympy.Symbol("batch", integer=True, positive=True)
"""The number of rows of the global batch: the only symbol that sizes contain."""

Size: TypeAlias = "int | sympy.Expr"


def evaluate(size: Any, batch: int) -> Any:
    """The value of a size (or any literal) when the global batch has `batch` rows."""
    return _value(size, batch) if isinstance(size, sympy.Basic) else size


@lru_cache(maxsize=4096)
def _value(size: sympy.Basic, batch: int) -> int | float:
    value = size.subs(BATCH, batch)
    return int(value) if value.is_integer else float(value)


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64",
    "int32": "i32", "complex64": "c64", "complex128": "c128",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (sizes may contain `BATCH`) and dtype name of a tensor."""

    shape: tuple[Size, ...]
    dtype: str

    def elements(self, batch: int) -> int:
        total = 1
        for size in self.shape:
            total *= size if type(size) is int else int(evaluate(size, batch))
        return total

    def bytes(self, batch: int) -> int:
        return self.elements(batch) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a tensor value of the same block."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Source:
    """Where a node comes from in the user's model: a module, a line, and the function called there,
    such as batch_norm."""

    module: str = ""
    line: str = ""
    function: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.line})" if self.line else self.module


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation: `op` is a row of the op table; `outputs` are the values it defines.

    `operands` names the value of every `Ref` in the arguments, in order; `inputs` does without
    repeats. Nodes and blocks compare by identity; compare their text to compare what they do.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]
    source: Source = Source()
    operands: tuple[str, ...] = field(init=False, repr=False)
    inputs: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        operands = tuple(ref.name for ref in references((self.args, self.kwargs)))
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "inputs", tuple(dict.fromkeys(operands)))

    def __str__(self) -> str:
        words = [render(arg) for arg in self.args]
        words += [f"{key}={render(value)}" for key, value in self.kwargs]
        return f"{', '.join(self.outputs)} = {self.op}({', '.join(words)})"


def references(argument: Any) -> Iterator[Ref]:
    """Every `Ref` inside a nested argument, in order."""
    found: list[Ref] = []
    _collect(argument, found)
    return iter(found)


def _collect(argument: Any, found: list[Ref]) -> None:
    if isinstance(argument, Ref):
        found.append(argument)
    elif isinstance(argument, tuple):
        for item in argument:
            _collect(item, found)


def needed(nodes: Sequence[Node], roots: Iterable[str]) -> tuple[Node, ...]:
    """The nodes that the values `roots` depend on, in order."""
    wanted, kept = set(roots), []
    for node in reversed(nodes):
        if wanted & set(node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return tuple(kept[::-1])


def render(argument: Any) -> str:
    """An argument as stable text."""
    if isinstance(argument, tuple):
        return "[" + ", ".join(render(item) for item in argument) + "]"
    return str(argument) if isinstance(argument, (Ref, sympy.Basic)) else repr(argument)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A distinct piece of the model, differentiated once.

    `types` covers every value. `tangents` pairs an output with the name of its incoming
    gradient; `gradients` pairs an input with the name of its outgoing gradient. The first
    `n_forward` nodes compute the outputs; the rest belong to backward.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    n_forward: int
    tangents: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    types: dict[str, TensorType]

    @property
    def forward(self) -> tuple[Node, ...]:
        return self.nodes[: self.n_forward]

    @property
    def backward(self) -> tuple[Node, ...]:
        return self.nodes[self.n_forward :]

    @property
    def saved(self) -> tuple[str, ...]:
        """Values that backward reads and that forward or the caller made, inputs included."""
        made = {name for node in self.backward for name in node.outputs}
        made |= {tangent for _, tangent in self.tangents}
        read = dict.fromkeys(name for node in self.backward for name in node.inputs)
        read.update(dict.fromkeys(gradient for _, gradient in self.gradients))
        return tuple(name for name in read if name not in made)

    def __str__(self) -> str:
        head = f"block {self.name}({', '.join(f'{n}: {self.types[n]}' for n in self.inputs)})"
        lines = [head]
        for i, node in enumerate(self.nodes):
            if i == self.n_forward:
                lines.append(f"  return {', '.join(self.outputs)}")
                lines.append(f"  backward({', '.join(t for _, t in self.tangents)})")
            kinds = ", ".join(str(self.types[n]) for n in node.outputs if n in self.types)
            lines.append(f"    {node}  # {kinds}")
        pairs = ", ".join(f"d({name}) = {gradient}" for name, gradient in self.gradients)
        return "\n".join([*lines, f"  gradients {pairs}"])


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a block: graph-level values for its inputs and names for its outputs."""

    block: int
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor leaf of the model's arguments.

    `index` is its place among all tensor leaves of (args, kwargs), `path` where it stands there.
    """

    name: str
    index: int
    path: str
    type: TensorType
    batch_dim: int | None


@dataclass(frozen=True, slots=True)
class State:
    """A parameter, buffer or constant; several `names` when it is tied.

    `update` is the graph value that replaces a buffer after a step; `data` is a constant's value.
    """

    name: str
    names: tuple[str, ...]
    kind: str
    type: TensorType
    trainable: bool
    update: str | None = None
    data: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole traced training step: `loss` and `metrics` are graph values.

    `guards` are conditions on `BATCH` under which the capture is valid. `fixed_batch`: where no
    input has a batch dim, what fails for another number of rows. `plain`: (path, text) of numbers,
    words and other plain values among the model's arguments, which are part of the program.
    `marks`: what the program depends on of the model beside its code, a line each.
    """

    model: str
    inputs: tuple[Input, ...]
    state: tuple[State, ...]
    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    loss: str
    metrics: tuple[tuple[str, str], ...]
    guards: tuple[sympy.Basic, ...] = ()
    fixed_batch: str = ""
    plain: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    marks: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        lines = [str(block) for block in self.blocks]
        for call in self.calls:
            name = self.blocks[call.block].name
            lines.append(
                f"{', '.join(call.results)} = {name}({', '.join(call.arguments)})  # {call.path}"
            )
        return "\n".join([*lines, f"loss {self.loss}"])
