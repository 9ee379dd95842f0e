"""Turns a traced fx graph into the nodes of a `Block`.

Aliases and no-op views disappear, spellings are unified (`view`, `permute`, `sum`), sizes become
expressions in `BATCH`, dead nodes are dropped, and nodes are ordered forward then backward.
"""

from __future__ import annotations

import operator
import re
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ir.errors import CaptureError
from ir.graph import Block, Node, Ref, TensorType, needed
from ir.names import Namer
from ir.trace.adapters import FxNode, expression
from ir.trace.dropouts import DRAWS
from ir.trace.normal import COPIES, FILLS, IDENTITY, NEUTRAL, VIEW, WHOLE, aten
from ir.trace.source import source_of

DROPPED = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}


def size_in_batch(size: Any, sizes: dict[Any, Any]) -> Any:
    """A size as an int or an expression in `BATCH`."""
    value = expression(size)
    return _in_batch(value, tuple(sizes.items())) if isinstance(value, sympy.Basic) else value


@lru_cache(maxsize=16384)
def _in_batch(value: sympy.Basic, sizes: tuple[tuple[Any, Any], ...]) -> Any:
    """Simplifying takes milliseconds, and a program has few different sizes."""
    value = sympy.simplify(value.subs(dict(sizes))) if value.free_symbols else value
    value = _plain_division(value)
    return int(value) if value.is_Integer else value


def _plain_division(value: sympy.Basic) -> sympy.Basic:
    """Torch's FloorDiv of exact multiples as a plain quotient."""
    for part in list(value.atoms(sympy.Function)):
        if type(part).__name__ in ("FloorDiv", "CleanDiv", "IntTrueDiv"):
            quotient = sympy.cancel(part.args[0] / part.args[1])
            exact = sympy.denom(sympy.together(quotient)) == 1 or type(part).__name__ != "FloorDiv"
            value = value.subs(part, quotient if exact else sympy.floor(quotient))
    return value


def tensor_type(tensor: Tensor, sizes: dict[Any, Any]) -> TensorType:
    shape = tuple(size_in_batch(size, sizes) for size in tensor.shape)
    return TensorType(shape, str(tensor.dtype).removeprefix("torch."))


def renamed(node: Node, swap: dict[str, str]) -> Node:
    """The node with other names for its values."""

    def argument(item: Any) -> Any:
        if isinstance(item, Ref):
            return Ref(swap.get(item.name, item.name))
        return tuple(map(argument, item)) if isinstance(item, tuple) else item

    return Node(
        node.op, argument(node.args), argument(node.kwargs),
        tuple(swap.get(name, name) for name in node.outputs), node.source,
    )  # fmt: skip


def _refuse_undefined(node: FxNode) -> None:
    """An operation that is traced with no tensor where its schema demands one can't run."""
    for slot, value in zip(node.target._schema.arguments, node.args, strict=False):
        if value is None and str(slot.type) == "Tensor":
            raise CaptureError(
                f"{node.target} is traced with no tensor for `{slot.name}`, which it needs (fused "
                "recurrent layers are). Write that layer with plain operations."
            )


def _writes(node: FxNode) -> bool:
    """Whether an operation writes into its first operand, as some derivative formulas of torch do
    with what they just made: in a `Block` the result is a new value, read from then on."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and schema.name.endswith("_")


def _refuse_random(node: FxNode) -> None:
    """Random numbers from a generator would differ between ranks, and when recomputed."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise CaptureError(f"{source_of(node)}: {node.target} {DRAWS}")


class Converter:
    """One conversion; see the module's docstring."""

    def __init__(self, graph: fx.Graph, sizes: dict[Any, Any], input_names: list[str],
                 needs: list[bool], carries: list[bool]):  # fmt: skip
        self.sizes = sizes
        self.names: dict[fx.Node, str] = {}
        self.memory: dict[fx.Node, fx.Node] = {}
        self.tuples: dict[fx.Node, tuple[str, ...]] = {}
        self.types: dict[str, TensorType] = {}
        self.nodes: list[Node] = []
        self.namer = Namer()
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        self.inputs = tuple(self.namer(name) for name in input_names)
        count = len(self.inputs)
        for node, name in zip(holders[:count], self.inputs, strict=True):
            self._define(node, name)
        output = next(node for node in graph.nodes if node.op == "output")
        results = list(output.args[0])
        outputs, grads = results[: len(carries)], results[len(carries) :]
        self._visit_all(graph)
        self.outputs = self._own_names(outputs)
        carried = [name for name, carry in zip(self.outputs, carries, strict=True) if carry]
        self.tangents = [
            (out, self.names[node]) for out, node in zip(carried, holders[count:], strict=True)
        ]
        wanted = [name for name, need in zip(self.inputs, needs, strict=True) if need]
        self.gradients = [
            (name, self.names[node])
            for name, node in zip(wanted, grads, strict=False) if node is not None
        ]  # fmt: skip

    def _own_names(self, outputs: list[FxNode]) -> tuple[str, ...]:
        """A value that is several outputs, such as one with a gradient and detached, has a name for
        each: they are different values to who reads them."""
        names = list[str]()
        for node in outputs:
            name = self.names[node]
            if name in names:
                name, value = self.namer(self._word(node)), Ref(name)
                self.types[name] = self.types[value.name]
                self.nodes.append(Node("view", (value,), (), (name,), source_of(node)))
            names.append(name)
        return tuple(names)

    def block(self, name: str) -> Block:
        self._name_gradients()
        forward = needed(self.nodes, self.outputs)
        backward = [
            node for node in needed(self.nodes, [grad for _, grad in self.gradients])
            if node not in set(forward)
        ]  # fmt: skip
        kept = {n for node in (*forward, *backward) for n in node.outputs}
        kept |= {*self.inputs, *(tangent for _, tangent in self.tangents)}
        return Block(
            name, self.inputs, self.outputs, (*forward, *backward), len(forward),
            tuple(self.tangents), tuple(self.gradients),
            {n: t for n, t in self.types.items() if n in kept},
        )  # fmt: skip

    def _name_gradients(self) -> None:
        """Renames tangents and gradients after what they are the gradient of: `d_weight`."""
        swap: dict[str, str] = {}
        fixed = {*self.inputs, *self.outputs}
        for of, name in (*self.tangents, *self.gradients):
            if name not in swap and name not in fixed:
                swap[name] = self.namer(f"d_{of}")
        self.tangents = [(of, swap.get(name, name)) for of, name in self.tangents]
        self.gradients = [(of, swap.get(name, name)) for of, name in self.gradients]
        self.types = {swap.get(name, name): kind for name, kind in self.types.items()}
        self.nodes = [renamed(node, swap) for node in self.nodes]

    def _visit_all(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "placeholder" and node not in self.names:
                self._define(node, self.namer("d_out"))
            elif node.op == "get_attr":
                raise RuntimeError("constants are inputs of a segment")
            elif node.op == "call_function":
                self._visit(node)

    def _define(self, node: fx.Node, name: str) -> None:
        self.names[node] = name
        self.types[name] = tensor_type(node.meta["val"], self.sizes)

    def _visit(self, node: FxNode) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            if node.args[0] in self.tuples:
                self.names[node] = self.tuples[node.args[0]][node.args[1]]
            return
        if not isinstance(value, (Tensor, list, tuple)):
            return
        if node.target in IDENTITY or self._is_noop(node, value):
            self.names[node] = self.names[node.args[0]]
            if node.target not in COPIES:
                self.memory[node] = self._owner(node.args[0])
            return
        self._emit(node, value)

    def _owner(self, node: fx.Node) -> fx.Node:
        """The node whose memory this one is, as far as both have one name."""
        return self.memory.get(node, node)

    def _is_noop(self, node: FxNode, value: Any) -> bool:
        neutral = NEUTRAL.get(node.target)
        if neutral is not None and len(node.args) == 2 and not node.kwargs:
            x, other = node.args
            if not isinstance(x, fx.Node) or type(other) not in (int, float) or other != neutral:
                return False
            return tensor_type(value, self.sizes) == self.types[self.names[x]]
        shape_only = node.target in VIEW or node.target in (
            aten.expand.default, aten._to_copy.default, aten.slice.Tensor)  # fmt: skip
        if not shape_only or not isinstance(node.args[0], fx.Node):
            return False
        return tensor_type(value, self.sizes) == self.types[self.names[node.args[0]]]

    def _emit(self, node: FxNode, value: Any) -> None:
        results = [value] if isinstance(value, Tensor) else list(value)
        word = self._word(node)
        outputs = tuple(
            self.namer(word if len(results) == 1 else f"{word}_{i}") for i in range(len(results))
        )
        for name, result in zip(outputs, results, strict=True):
            if isinstance(result, Tensor):
                self.types[name] = tensor_type(result, self.sizes)
        _refuse_undefined(node)
        _refuse_random(node)
        op, args, kwargs = self._normal(node)
        pairs = tuple(sorted((k, self._arg(v)) for k, v in kwargs.items() if k not in DROPPED))
        self.nodes.append(Node(op, tuple(map(self._arg, args)), pairs, outputs, source_of(node)))
        if isinstance(value, Tensor):
            self.names[node] = outputs[0]
        else:
            self.tuples[node] = outputs
        if _writes(node):
            self.memory[node] = held = self._owner(node.args[0])
            self.names.update({n: outputs[0] for n in self.names if self._owner(n) is held})

    def _word(self, node: fx.Node) -> str:
        """A product or sum made by a module is named after the module, else after the operation."""
        base = re.sub(r"_\d+$", "", node.name)
        if str(node.target).split(".")[1] not in ("einsum", "add", "embedding", "convolution"):
            return base
        owner = source_of(node).module.rsplit(".", 1)[-1]
        return owner if owner and not owner.isdigit() and node.meta.get("nn_module_stack") else base

    def _normal(self, node: FxNode) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        target, args = node.target, node.args
        if target in VIEW:
            return "view", args[:1], {}
        if target in (aten.expand.default, aten.expand_copy.default):
            return "expand", args[:1], {}
        if target in (aten.t.default, aten.transpose.int, aten.permute.default):
            return "permute", (args[0], self._order(node)), {}
        if target in FILLS:
            value = FILLS[target] if FILLS[target] is not None else self._fill_value(node)
            return "full", (value,), {}
        if target in (aten.sum.default, aten.sum.dim_IntList):
            rank = args[0].meta["val"].dim()
            dims = args[1] if target is aten.sum.dim_IntList and len(args) > 1 else None
            dims = sorted(d % rank for d in dims) if dims else list(range(rank))
            return "sum", (args[0], dims, bool(len(args) > 2 and args[2])), dict(node.kwargs)
        if target in (aten.slice.Tensor, aten.slice_backward.default):
            args = self._bounded(node)
        schema = target._schema
        if schema.name.startswith("shardwright::"):
            return schema.name.removeprefix("shardwright::"), args, dict(node.kwargs)
        overload = schema.overload_name or "default"
        name = schema.name.removeprefix("aten::")
        name = name.removesuffix("_") if _writes(node) else name
        return f"{name}.{overload}", args, dict(node.kwargs)

    def _bounded(self, node: FxNode) -> tuple[Any, ...]:
        """Slice arguments with `to the end` spelled as the dim's size."""
        args = list(node.args)
        place = 3 if node.target is aten.slice.Tensor else 4
        if len(args) > place and isinstance(args[place], int) and args[place] == WHOLE:
            whole = args[0] if place == 3 else node
            args[place] = size_in_batch(whole.meta["val"].shape[args[place - 2]], self.sizes)
        return tuple(args)

    @staticmethod
    def _fill_value(node: FxNode) -> Any:
        return node.args[0] if node.target is aten.scalar_tensor.default else node.args[-1]

    @staticmethod
    def _order(node: FxNode) -> list[int]:
        rank = node.args[0].meta["val"].dim()
        if node.target is aten.permute.default:
            return [d % rank for d in node.args[1]]
        order = list(range(rank))
        a, b = (0, 1) if node.target is aten.t.default else (d % rank for d in node.args[1:3])
        if rank > 1:
            order[a], order[b] = order[b], order[a]
        return order

    def _arg(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in self.names:
                return Ref(self.names[argument])
            return size_in_batch(argument.meta["val"], self.sizes)
        if isinstance(argument, (list, tuple)):
            return tuple(self._arg(item) for item in argument)
        if isinstance(argument, torch.dtype):
            return str(argument)
        if isinstance(argument, (torch.SymInt, torch.SymFloat)):
            return size_in_batch(argument, self.sizes)
        return argument


