"""No plan beats its candidate's lower bounds, and what they say can't fit does not."""

from dataclasses import replace
from math import inf

import pytest
from small_models import chain, products
from test_measured_cost import MACHINE

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.errors import Refused
from ir.graph import Graph
from ir.machines import Host
from ir.variants import variants
from planner import plan
from planner.calibrated import cost_model
from planner.candidate import Workload, evaluate
from planner.frontier import frontier
from planner.pieces import best_menu, pieces, whole
from planner.pins import Candidate, read_pins
from planner.places import PlacedBounds
from planner.recompute_program import KeptProgram
from planner.search import LEVELS, Search

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
    return (quick_s, *(bounds.close_s(candidate, level) for level in range(2, LEVELS + 1)))


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

