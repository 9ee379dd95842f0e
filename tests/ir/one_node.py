"""Runs one operation cut over simulated ranks and puts the results together again.

Input: an `Example` (a node with whole operands), a strategy, a number of ranks. The operands are
cut as the strategy wants, the line that codegen writes is evaluated on every rank, and the
results are joined by plain tensor code, independent of the runtime's collectives.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from codegen.node_text import NodeText
from ir.batch import spread
from ir.factors import Factors, infer
from ir.graph import Block, Node, TensorType
from ir.layout import REPLICATE, Partial, Placement, Shard
from ir.lower import Degrees, Sharding, lower
from ir.names import identifier
from ir.strategies import Strategy, strategies
from planner.ports import divides
from runtime import ops
from runtime.mesh import Axis, Mesh, MeshShape, build_mesh
from runtime.program import Context
from runtime.random import dropout
from runtime.threads import ThreadTransport, World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Example:
    """A node with its operands and its right results; `cuts` and `partials` are the numbers of
    strategies that the op's rule must offer besides the whole one."""

    name: str
    node: Node
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    cuts: int
    partials: int

    @property
    def block(self) -> Block:
        types = {
            name: TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))
            for name, x in (self.inputs | self.results).items()
        }
        return Block("one", tuple(self.inputs), tuple(self.results), (self.node,), 1, (), (), types)


def offered(example: Example, degree: int) -> tuple[Factors, list[Strategy]]:
    """The strategies that divide evenly over `degree` ranks."""
    factors = infer(example.block)
    leaves = [leaf for leaf in factors.size if divides(factors, leaf, degree)]
    return factors, strategies(example.node, factors, leaves)


def run_cut(example: Example, strategy: Strategy, degree: int) -> dict[str, Tensor]:
    """The results of the node, run in pieces on `degree` ranks and joined."""
    block = example.block
    placed = _placed(example, strategy)
    sharding = Sharding(
        {example.node: strategy}, tuple(placed[name] for name in block.inputs),
        strategy.results, (), (),
    )  # fmt: skip
    degrees = Degrees(1, 1, degree, 1)
    batch = spread(block, (REPLICATE,) * len(block.inputs))
    lowered = lower(block, batch, sharding, degrees)
    assert [node.op for node in lowered.forward] == [example.node.op]
    words = {name: identifier(name) for name in lowered.types}
    writer = NodeText(
        SimpleNamespace(degrees=degrees), lowered, 1, words, lowered.types  # type: ignore[arg-type]
    )  # fmt: skip
    line = writer(lowered.forward[0])
    cut = {name: pieces(x, placed[name], degree) for name, x in example.inputs.items()}

    def run(mesh: Mesh) -> tuple[Tensor, ...]:
        here = {words[name]: parts[mesh.rank] for name, parts in cut.items()}
        names = {"torch": torch, "ops": ops, "dropout": dropout, "mesh": mesh, "call": 0}
        value = eval(line, names | here | {"ctx": Context(mesh, CPU, 3, 0, 0, 1)})
        values = value if isinstance(value, tuple) else (value,)
        return tuple(x for x in values if x is not None)

    by_rank = on_ranks(degree, run) if strategy.communicates else on_lone_ranks(degree, run)
    for rank in by_rank:
        for part, name in zip(rank, example.results, strict=True):
            assert tuple(part.shape) == lowered.types[name].shape, (line, name)
    return {
        name: joined([rank[i] for rank in by_rank], place)
        for i, (name, place) in enumerate(zip(example.results, strategy.results, strict=True))
    }


def _placed(example: Example, strategy: Strategy) -> dict[str, Placement]:
    placed = dict.fromkeys(example.inputs, REPLICATE)
    names = list(example.node.inputs)
    return placed | dict(zip(names, strategy.operands, strict=True))


def on_lone_ranks(degree: int, run: Callable[[Mesh], Any]) -> list[Any]:
    """`run` on each rank after the other, without connections between them."""
    one, two = Axis("pipeline", 1, 0, None), Axis("data", 1, 0, None)
    return [
        run(Mesh(MeshShape(1, 1, degree), i, one, two, Axis("tensor", degree, i, None)))
        for i in range(degree)
    ]


def on_ranks(degree: int, run: Callable[[Mesh], Any]) -> list[Any]:
    """`run` on all ranks at once, connected as threads."""
    world = World(degree, 20.0)
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        transport = ThreadTransport(world, rank, CPU)
        try:
            found[rank] = run(build_mesh(MeshShape(1, 1, degree), transport))
        except BaseException as error:
            world.fail(rank, error)
        finally:
            world.finish(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure[1]
    return [found[rank] for rank in range(degree)]


def pieces(x: Tensor, place: Placement, degree: int) -> list[Tensor]:
    """Each rank's tensor; a partial sum is split into random parts."""
    match place:
        case Shard():
            rows = _rows(x.shape[place.dim], int(place.outer), degree)
            return [x.index_select(place.dim, rows[:, i].reshape(-1)) for i in range(degree)]
        case Partial():
            parts = [torch.randn(x.shape, dtype=x.dtype) for _ in range(degree - 1)]
            return [*parts, x - sum(parts, torch.zeros_like(x))]
        case _:
            return [x.clone() for _ in range(degree)]


def joined(parts: list[Tensor], place: Placement) -> Tensor:
    """The whole tensor; replicas must be equal."""
    match place:
        case Shard():
            size = parts[0].shape[place.dim] * len(parts)
            rows = _rows(size, int(place.outer), len(parts))
            order = torch.cat([rows[:, i].reshape(-1) for i in range(len(parts))])
            return torch.cat(parts, place.dim).index_select(place.dim, order.argsort())
        case Partial():
            return sum(parts[1:], parts[0])
        case _:
            assert all(torch.equal(part, parts[0]) for part in parts)
            return parts[0]


def _rows(size: int, outer: int, degree: int) -> Tensor:
    """Global indices of a dim as (outer, rank, rest)."""
    return torch.arange(size).reshape(outer, degree, -1)
