"""The recompute menu: its program equals brute force, its points mean what they say."""

from itertools import combinations

import pytest
from small_models import chain

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.lower import Degrees, lower
from ir.ops import op_def
from ir.recompute import backward_nodes, kept_values, state_inputs
from ir.variants import variants
from planner.cost import Roofline
from planner.pieces import whole
from planner.price import node_times
from planner.recompute import _Block, everything, finer, menu, named_point
from planner.recompute_program import KeptProgram
from planner.storage import storage_of

COST = Roofline(Cluster.parse("1xH100-SXM"), Mesh())


@pytest.fixture(scope="module")
def block() -> _Block:
    """One layer of a chain, large enough that its times differ."""
    graph = chain(depth=2, width=1024, hidden=4096, seq=512)
    kinds = variants(graph, flow(graph))
    number = next(n for n, kind in enumerate(kinds) if len(kind.calls) == 2)
    kind, sharding = kinds[number], whole(graph, kinds).shardings[number]
    lowered = lower(kind.block, kind.spread, sharding, Degrees(8, 1, 1, 1))
    storage = storage_of(lowered)
    names = {item.name for item in graph.state}
    always = state_inputs(lowered, graph.calls[kind.calls[0]].arguments, names)
    return _Block(lowered, storage, node_times(lowered, storage, COST), always)


def test_the_recompute_program_equals_brute_force(block: _Block) -> None:
    own = [name for node in block.lowered.forward for name in node.outputs
           if name in block.storage.owner]  # fmt: skip
    assert 5 < len(own) < 14
    every = [frozenset(c) for n in range(len(own) + 1) for c in combinations(own, n)]
    priced = [(block.point("", kept).held_bytes, block.point("", kept)) for kept in every]
    none = block.point("none", everything(block.lowered, block.storage, block.always))
    full = block.point("full", frozenset())
    program = KeptProgram(block.lowered, block.storage, block.times, block.always)
    for part in (0.9, 0.7, 0.5, 0.3, 0.1):
        budget = full.held_bytes + part * (none.held_bytes - full.held_bytes)
        least_s = min(p.backward.total_s for size, p in priced if size <= budget)
        kept, _ = program.cheapest(budget, none.held_bytes - full.held_bytes)
        found = block.point("", kept)
        assert found.held_bytes <= budget
        assert found.backward.total_s == pytest.approx(least_s, rel=2e-3)


def test_points_trade_time_for_bytes(block: _Block) -> None:
    points = menu(block.lowered, block.storage, block.times, block.always)
    assert points[0].label == "none" and points[-1].label == "full"
    assert len(points) >= 3
    assert len({p.label for p in points}) == len(points)
    sizes = [p.held_bytes for p in points]
    times = [p.backward.total_s for p in points]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)


def test_pins_limit_the_menu(block: _Block) -> None:
    def labels(allowed: str) -> list[str]:
        parts = block.lowered, block.storage, block.times, block.always
        return [p.label for p in menu(*parts, allowed)]

    assert labels("none") == ["none"]
    assert labels("full") == ["full"]
    assert labels("selective") and not {"none", "full"} & set(labels("selective"))


def test_none_recomputes_only_what_is_free(block: _Block) -> None:
    kept = everything(block.lowered, block.storage, block.always)
    again = [n for n in backward_nodes(block.lowered, kept, block.always)
             if n in block.lowered.forward]  # fmt: skip
    assert all(op_def(node.op).kind == "view" for node in again)


def test_full_keeps_nothing_but_inputs(block: _Block) -> None:
    held = kept_values(block.lowered, frozenset(), block.always)
    assert set(held) <= set(block.lowered.block.inputs) - block.always


def test_state_is_never_kept(block: _Block) -> None:
    for point in menu(block.lowered, block.storage, block.times, block.always):
        assert not point.kept & block.always
        assert not set(point.inputs) & block.always


def test_a_finer_menu_has_points_between_those_of_a_menu(block: _Block) -> None:
    parts = block.lowered, block.storage, block.times, block.always
    points = menu(*parts)
    more = finer(*parts, points)
    assert more[: len(points)] == points and len(more) > len(points)
    assert len({p.label for p in more}) == len(more)
    for point in more[len(points) :]:
        assert not any(other.beats(point) for other in points)
        again = named_point(*parts, "", point.kept)
        assert (again.held_bytes, again.total_s) == (point.held_bytes, point.total_s)
    for ends in (points[:1], points[-1:]):  # a pinned "none" or "full" stays what it is
        assert finer(*parts, ends) == ends
