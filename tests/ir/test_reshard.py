"""Every step from one placement to another, run on ranks, keeps the tensor."""

from types import SimpleNamespace

import pytest
import torch

from codegen.node_text import NodeText
from ir.batch import spread
from ir.graph import Block, Node, Ref, TensorType
from ir.layout import DATA, PARTIAL, REPLICATE, Layout, Placement, Shard
from ir.lower import Degrees, Sharding, local_outer, lower
from ir.reshard import FREE, possible, step
from ir.strategies import Strategy
from runtime.collectives import all_gather, all_reduce, all_to_all, first, reduce_scatter, shard
from tests.ir.one_node import joined, on_ranks, pieces

SHAPE = (12, 24, 3)
PLACES = (REPLICATE, PARTIAL, Shard(0), Shard(1), Shard(1, 2), Shard(2))
STEPS = [(a, b) for a in PLACES for b in PLACES if possible(a, b)]
COLLECTIVES = {
    f.__name__: f for f in (all_gather, all_reduce, all_to_all, first, reduce_scatter, shard)
}  # fmt: skip


def test_a_cut_turns_into_no_partial_sum_and_no_other_cut_of_its_dim() -> None:
    assert not possible(Shard(0), PARTIAL)
    assert not possible(Shard(1), Shard(1, 2))
    assert possible(Shard(0), Shard(1, 2))


def test_equal_placements_need_no_step() -> None:
    assert {step(place, place) for place in PLACES} == {None}


def test_what_is_whole_becomes_anything_for_free() -> None:
    assert {step(REPLICATE, place) for place in PLACES} - {None} == FREE


@pytest.mark.parametrize("have, want", STEPS, ids=lambda place: str(place))
def test_lowering_emits_the_step_and_it_keeps_the_tensor(have: Placement, want: Placement) -> None:
    """A block of one node that asks for its operand in another placement than it is given."""
    degree, x = 3, torch.randn(SHAPE, dtype=torch.float64)
    node = Node("neg.default", (Ref("x"),), (), ("y",))
    kind = TensorType(SHAPE, "float64")
    block = Block("one", ("x",), ("y",), (node,), 1, (), (), {"x": kind, "y": kind})
    degrees = Degrees(1, 1, degree, 1)
    sharding = Sharding({node: Strategy(None, (want,), (want,))}, (have,), (want,), (), ())
    lowered = lower(block, spread(block, (REPLICATE,)), sharding, degrees)
    assert [n.op for n in lowered.forward[:-1]] == [k for k in [step(have, want)] if k]
    words = {name: name for name in lowered.types}
    spmd = SimpleNamespace(degrees=degrees)
    writer = NodeText(spmd, lowered, 1, words, lowered.types)  # type: ignore[arg-type]
    given = pieces(x, have, degree)

    def run(mesh):
        here = {"x": given[mesh.rank], "mesh": mesh, "torch": torch, **COLLECTIVES}
        for line in lowered.forward:
            here[line.outputs[0]] = eval(writer(line), here)
            assert tuple(here[line.outputs[0]].shape) == lowered.types[line.outputs[0]].shape
        return here["y"]

    torch.testing.assert_close(joined(on_ranks(degree, run), want), -x)


def test_outer_shrinks_when_the_other_axis_cuts_before_it() -> None:
    """A flattened [batch 8, seq 6] dim, cut by rows over 4 and by positions over 3."""
    layout = Layout(Shard(0), Shard(0, 8))
    degrees = Degrees(8, 4, 3, 1)
    assert local_outer(layout, "tensor", degrees, rows=4) == 2
    assert local_outer(layout, DATA, degrees, rows=4) == 1


def test_outer_is_unchanged_when_the_other_axis_cuts_behind_it() -> None:
    layout = Layout(Shard(0, 6), Shard(0))
    degrees = Degrees(8, 4, 3, 1)
    assert local_outer(layout, DATA, degrees, rows=4) == 2
    assert local_outer(layout, "tensor", degrees, rows=4) == 1
