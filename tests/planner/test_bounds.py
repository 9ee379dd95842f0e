"""No plan beats its candidate's lower bounds, and what they say can't fit does not."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
import torch
from small_models import chain, products
from test_measured_cost import MACHINE
from torch import nn

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.errors import Refused
from ir.graph import Graph
from ir.machines import Host
from ir.ops import op_def
from ir.schedules import Held
from ir.trace import trace
from ir.variants import variants
from planner import plan
from planner.calibrated import cost_model
from planner.candidate import Workload, evaluate
from planner.frontier import frontier
from planner.least_problem import Exchange, LeastProblem
from planner.pieces import best_menu, pieces, whole
from planner.pins import Candidate, read_pins
from planner.places import PlacedBounds
from planner.rank_bound import least_slowest_s
from planner.recompute_program import KeptProgram
from planner.schedule import moments
from planner.search import LEVELS, Search
from planner.stage_cuts import relaxed_seconds
from planner.stage_problem import Point, Run, StageProblem
from planner.stages import plan_stages
from planner.workload import touched_bytes

MODELS = {
    "chain": lambda: chain(depth=5, width=64, hidden=256, seq=64),
    "wide chain": lambda: chain(depth=3, width=512, hidden=2048, words=4096, seq=512),
    "products": lambda: products(4, width=1024, folded=True),
    "bare products": lambda: products(3, width=256),
}
CLUSTERS = {
    **{spec: Cluster.parse(spec) for spec in ("local:4", "8xH100-SXM", "2x2xA100-80GB")},
    "mixed": Cluster.parse("1x2xH100-SXM+1x2xA100-40GB"),
    "with a host": replace(Cluster.local(4), own_host=Host(2e9, 2**40)),
    "measured": MACHINE,
}
SHARE_OF_MEMORY = [1.0, 0.8]
PRICES = (0.0, 1.0)
EVERY = 5


def search(graph: Graph, cluster: Cluster, rows: int) -> Search:
    batch_flow = flow(graph)
    work = Workload(graph, batch_flow, variants(graph, batch_flow), rows, "adamw")
    return Search(work, cluster, read_pins({}), True)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("spec", CLUSTERS)
@pytest.mark.parametrize("share", SHARE_OF_MEMORY)
def test_no_plan_beats_its_bounds(model: str, spec: str, share: float) -> None:
    graph, cluster = MODELS[model](), CLUSTERS[spec]
    if share < 1:
        roomy_bytes = plan(graph, cluster, global_batch=8).prediction.peak_bytes
        cluster = with_usable(cluster, roomy_bytes * share)
    found = search(graph, cluster, 8)
    plans = near = 0
    for candidate in list(found._candidates())[::EVERY]:
        bounds = _bounds(found.attempts.bounds, candidate)
        for price in PRICES if candidate.mesh.tensor > 1 else PRICES[:1]:
            cost = cost_model(found.attempts.supply.cluster_of(candidate), candidate.mesh)
            try:
                pieces_ = found.attempts.supply.pieces(candidate, price)
                made = evaluate(found.work, candidate, pieces_, cost)
            except Refused:
                continue
            assert max(bounds) <= made.prediction.step_s * (1 + 1e-9)
            plans += 1
            near += max(bounds) > 0.5 * made.prediction.step_s
    assert 2 * near >= plans


def with_usable(cluster: Cluster, usable_bytes: float) -> Cluster:
    """The same with other memory."""
    memory = {"memory_bytes": int(usable_bytes), "reserve_bytes": 0}
    nodes = tuple(replace(n, device=replace(n.device, **memory)) for n in cluster.nodes)
    return replace(cluster, device=replace(cluster.device, **memory), nodes=nodes)


def _bounds(bounds: PlacedBounds, candidate: Candidate) -> tuple[float, ...]:
    if not bounds.may_fit(candidate):
        return (inf,)
    quick_s = bounds.quick_s(candidate)
    if quick_s == inf:
        return (inf,)
    floor_s = bounds.floor_s(candidate)
    assert floor_s <= quick_s * (1 + 1e-9)
    return (quick_s, *(bounds.close_s(candidate, level) for level in range(2, LEVELS + 2)))


class Choices:
    """A program with the choices (seconds, bytes)."""

    def __init__(self, *choices: tuple[float, float]) -> None:
        self.choices = choices

    def priced(self, price_s: float) -> tuple[float, float, float]:
        seconds, held = min(self.choices, key=lambda c: c[0] + price_s * c[1])
        return seconds, held, seconds + price_s * held

    def least_bytes(self) -> float:
        return min(held for _, held in self.choices)


def test_the_corners_of_a_curve_are_its_choices() -> None:
    choices = (0.0, 10.0), (1.0, 6.0), (3.0, 2.0), (2.9, 4.0)  # the last lies above the curve
    corners = frontier(Choices(*choices)).corners
    assert len(corners) == 3
    for corner, choice in zip(corners, choices, strict=False):
        assert corner == pytest.approx(choice)


def test_seconds_that_hardly_differ_make_no_curve() -> None:
    for tiny_s in (5e-324, 1e-300):
        corners = frontier(Choices((0.0, 10.0), (tiny_s, 2.0))).corners
        assert corners[-1][1] == pytest.approx(2.0)


def test_the_curve_lies_below_every_choice() -> None:
    graph = chain(depth=2, width=64, hidden=256, seq=64)
    found = search(graph, Cluster.parse("8xH100-SXM"), 8)
    kinds = found.work.kinds
    one = Candidate(Mesh(), 1, "1f1b", 8)
    made = pieces(
        graph, found.work.flow, kinds, whole(graph, kinds), one.degrees,
        cost_model(found.cluster, one.mesh), best_menu(None),
    )  # fmt: skip
    for menu, store, times, lowered in zip(
        made.menus, made.storages, made.times, made.lowered, strict=True
    ):
        always = frozenset(lowered.block.inputs) - {n for p in menu for n in p.inputs}
        curve = frontier(KeptProgram(lowered, store, times, always))
        least_s = min(point.backward.total_s for point in menu)
        for point in menu:
            again_s = point.backward.total_s - least_s
            for line in curve.lines:
                assert again_s + line.price * point.held_bytes >= line.value * (1 - 1e-6) - 1e-12



def test_what_a_kernel_needs_while_it_runs_keeps_a_candidate_out() -> None:
    """The loss reads logits of 8 MiB and has two more tensors like them at its peak: 20 MiB are
    too few for it, although no value of the model is larger than the logits."""
    graph = chain(depth=1, width=4, hidden=4, words=4096, seq=64)
    one = Candidate(Mesh(), 1, "1f1b", 8)
    for usable_bytes, fits in ((20 * 2**20, False), (36 * 2**20, True)):
        cluster = with_usable(Cluster.parse("1x1xH100-SXM"), usable_bytes)
        assert search(graph, cluster, 8).attempts.bounds.may_fit(one) == fits
        if fits:
            assert plan(graph, cluster, global_batch=8, pin={"micro_batches": 1})
        else:
            with pytest.raises(Refused, match="no plan"):
                plan(graph, cluster, global_batch=8, pin={"micro_batches": 1})


def test_blocks_of_the_least_problem_need_what_their_kernels_do() -> None:
    """Beside what a block keeps: of four tensors like the logits, which the loss reads through a
    view, those that are no value, and the logits as well where they are not kept."""
    graph = chain(depth=1, width=4, hidden=4, words=4096, seq=64)
    supply = search(graph, Cluster.parse("1x1xH100-SXM"), 8).attempts.supply
    head = LeastProblem(supply.least).of(Candidate(Mesh(), 1, "1f1b", 8)).runs[-1]
    logits_bytes = 8 * 2**20
    for point in head.points:
        kept = min(point.saved_bytes, logits_bytes)
        assert point.transient_bytes >= 4 * logits_bytes - kept - 2**16


def test_what_backward_reads_whole_is_in_the_closest_bound() -> None:
    """Layers whose products want whole activations: to keep those takes room, and to gather them
    again seconds."""
    graph = chain(depth=6, width=1024, hidden=4096, words=512, seq=1024)
    cluster = with_usable(Cluster.parse("1x8xH100-SXM"), 300 * 2**20)
    bounds = search(graph, cluster, 16).attempts.bounds
    candidate = Candidate(Mesh(data=2, tensor=4), 2, "1f1b", 4)
    assert bounds.close_s(candidate, 5) > 1.03 * bounds.close_s(candidate, 4)


@pytest.mark.parametrize(
    ("width", "mib", "without", "gain"),
    [(1024, 220, "prices", 0.004), (2048, 700, "sharding", 0.0008)],
)
def test_the_last_look_is_at_more_prices_and_at_one_sharding(
    width: int, mib: int, without: str, gain: float, monkeypatch
) -> None:
    """Of interleaved ranks, each against the bound without it."""
    graph = chain(depth=8, width=width, hidden=4 * width, words=512, seq=1024)
    cluster = with_usable(Cluster.parse("1x8xH100-SXM"), mib * 2**20)
    bounds = search(graph, cluster, 16).attempts.bounds
    candidate = Candidate(Mesh(pipeline=2, tensor=4), 4, "interleaved", 4, virtual_stages=2)
    closest_s = bounds.close_s(candidate, LEVELS + 1)
    if without == "prices":
        monkeypatch.setattr("planner.least_joint.BETWEEN", ())
    else:
        monkeypatch.setattr(LeastProblem, "one_sharding", lambda *_: None)
    assert closest_s > (1 + gain) * bounds.close_s(candidate, LEVELS + 1)


def two_stages(working_bytes: float) -> StageProblem:
    """Four blocks; rank 0 holds two micro-batches of its own, which fill 40 of 44 bytes if kept."""
    points = (
        Point(1.0, 1.0, 10.0, 0.0, working_bytes, "kept"),
        Point(1.0, 3.0, 1.0, 0.0, working_bytes, "again"),
    )
    return StageProblem((Run("block", 4, points),), 2, 4, "1f1b", (44.0, 44.0))


def pace_by_cuts(problem: StageProblem) -> float:
    """Of the slower rank, with two blocks each."""
    seconds = relaxed_seconds(problem)
    return float(max(seconds[0, 0, 2], seconds[1, 2, 4]))


def no_wait(limit_s: float) -> tuple[float, ...]:
    return (0.0, 0.0)


def pace_by_shares(problem: StageProblem) -> float:
    """Of the slower rank, in any share."""
    found = [moments("1f1b", rank, 2, 4) for rank in range(2)]
    return least_slowest_s(problem, found, no_wait) / problem.micro_batches


@pytest.mark.parametrize("pace_s", [pace_by_cuts, pace_by_shares])
def test_room_that_a_running_block_needs_is_not_for_keeping(
    pace_s: Callable[[StageProblem], float],
) -> None:
    """With 8 bytes of it some block is run again, in the bound as in the plan."""
    assert pace_s(two_stages(0.0)) == 4.0
    assert plan_stages(two_stages(0.0)).step_s == 4 * 4.0 + 4.0
    assert 4.1 < pace_s(two_stages(8.0)) <= plan_stages(two_stages(8.0)).step_s / 4
    assert pace_s(two_stages(43.0)) == inf


def test_a_rank_keeps_most_where_it_holds_fewest_micro_batches() -> None:
    """Two blocks on each rank, one on a stage of 16 micro-batches in flight and one on a stage of
    one: 26 bytes have room for the values of the second one."""
    points = (Point(1.0, 1.0, 10.0, 0.0, 0.0, "kept"), Point(1.0, 3.0, 1.0, 0.0, 0.0, "again"))
    problem = StageProblem((Run("block", 4, points),), 2, 1, "1f1b", (26.0, 26.0))
    found = [((Held(16, 0), Held(1, 0)),)] * 2
    assert least_slowest_s(problem, found, no_wait) == pytest.approx(2.0 + 4.0)


def test_only_what_a_prologue_takes_is_made_once() -> None:
    """Of the head the number of labels that count, of which every data rank has a part; but not its
    weights, which each micro-batch would gather."""
    work = search(chain(depth=1), Cluster.local(4), 8).work
    block, call = work.kinds[-1].block, work.graph.calls[-1]
    state = {item.name for item in work.graph.state}
    pairs = zip(block.inputs, call.arguments, strict=True)
    early = work.early[-1]
    assert early & {name for node in block.forward for name in node.outputs}
    assert not early & {name for name, value in pairs if value in state}
    assert not work.early[1]


def test_a_bound_has_copies_of_tied_parameters() -> None:
    """The head's rank holds the embedding as well, and where that is told apart exchanges its
    gradient."""
    cluster, candidate = Cluster.parse("8xH100-SXM"), Candidate(Mesh(2, 2, 2), 2, "1f1b", 2)
    tied, alone = (
        LeastProblem(search(chain(words=512, tied=is_tied), cluster, 8).attempts.bounds.least)
        for is_tied in (True, False)
    )
    ((first, last, held_bytes),) = tied.of(candidate).tied
    embedding_bytes = 512 * 16 * 4  # in float32
    assert (first, last) == (0, 2) and held_bytes == 4 * embedding_bytes / 2  # on 2 devices
    ((*_, added_s),) = tied.of(candidate).tied_s
    ((*_, exchanged_s),) = tied.of(candidate, Exchange.APART).tied_s
    assert 0 < added_s < exchanged_s
    assert not alone.of(candidate).tied


def test_a_view_is_no_larger_than_what_it_views() -> None:
    """A node that reads rows repeated by a view needs them once."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).unsqueeze(1).expand(-1, 32, -1).sum(1).sum()

    graph = trace(Repeated(), (torch.zeros(8, 16),), {})
    (kind,) = variants(graph, flow(graph))
    computed = [node for node in kind.block.forward if op_def(node.op).kind != "view"]
    sizes = [touched_bytes(kind, node, 8) for node in computed]
    row_bytes = 16 * 4
    assert max(each for _, each in sizes) == 2 * row_bytes
