"""Stages on nodes that hold different devices: each priced on its own, in either order of nodes."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
from small_models import chain, products

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.graph import Graph
from ir.mixed import slowest
from ir.plan import Plan
from ir.predicted import Prediction
from ir.spmd import StageCall
from ir.stage_devices import (
    held_devices,
    in_order,
    mesh_orders,
    node_orders,
    places_text,
    stage_devices,
    stage_parts,
)
from ir.variants import variants
from planner import plan
from planner.calibrated import cost_model
from planner.least_costs import LeastCosts
from planner.pins import Candidate, read_pins
from planner.places import Supplies
from planner.rank_costs import least_cost, rank_costs
from planner.stage_prices import StagePrices
from planner.supply import Supply
from planner.timeline import simulate_plan
from planner.workload import Workload

TWO = "1x1xH100-SXM+1x1xA100-40GB"
THREE = "1x1xH100-SXM+1x1xA100-40GB+1x1xL40S"
PINS = {"data": 1, "tensor": 1, "recompute": "none", "offload": "none"}


def wide(depth: int = 6) -> Graph:
    """Products that take long enough that the pace of the device decides."""
    return products(depth, width=2048, folded=True)


# where stages lie


def test_orders_put_nodes_of_a_kind_in_a_row() -> None:
    assert node_orders(Cluster.parse("2x8xH100-SXM")) == [()]
    assert node_orders(Cluster.parse(TWO)) == [(), (1, 0)]
    split = Cluster.parse("8xH100+8xA100+8xH100")
    assert [str(in_order(split, order)) for order in node_orders(split)] == [
        "1x8 H100-SXM + 1x8 A100-80GB + 1x8 H100-SXM", "2x8 H100-SXM + 1x8 A100-80GB",
        "1x8 A100-80GB + 2x8 H100-SXM",
    ]  # fmt: skip
    assert len(node_orders(Cluster.parse(THREE))) == 6
    four = Cluster.parse(f"{THREE}+1x1xV100-SXM2-32GB")
    assert len(node_orders(four)) == 3  # as listed, the fastest first, the slowest first


def test_ports_go_with_their_nodes() -> None:
    cluster = Cluster.parse("1x8xH100-SXM+2x8xA100-80GB")
    turned = in_order(cluster, (1, 0))
    assert turned.levels[1].port_rates == tuple(reversed(cluster.levels[1].port_rates))
    assert turned.levels[0].port_rates == (
        cluster.levels[0].port_rates[8:] + cluster.levels[0].port_rates[:8]
    )
    assert in_order(turned, (1, 0)) == cluster


def test_a_stage_sees_the_nodes_of_its_kind_alone() -> None:
    cluster = Cluster.parse("1x8xH100-SXM+2x8xA100-80GB")
    parts = stage_parts(cluster, Mesh(3, 4, 2))
    assert [(str(part[0]), part[1]) for part in parts if part] == [
        ("1x8 H100-SXM", Mesh(1, 4, 2)), ("2x8 A100-80GB", Mesh(2, 4, 2)),
        ("2x8 A100-80GB", Mesh(2, 4, 2)),
    ]  # fmt: skip
    names = [device.name for device in stage_devices(cluster, Mesh(3, 4, 2))]
    assert names == ["H100-SXM", "A100-80GB", "A100-80GB"]
    text = places_text(cluster, Mesh(3, 4, 2), "stage")
    assert text == "stage 0 on H100-SXM (ranks 0 to 7), stages 1 to 2 on A100-80GB (ranks 8 to 23)"


def test_a_stage_on_several_kinds_takes_the_least_of_them() -> None:
    cluster = Cluster.parse("8xH100+8xA100+8xL40S+8xL40S")
    mesh = Mesh(2, 16, 1)
    held = held_devices(cluster, mesh, 0)
    assert [device.name for device in held] == ["H100-SXM", "A100-80GB"]
    assert stage_devices(cluster, mesh) == (slowest(held), cluster.device_of(31))
    words = "H100-SXM and A100-80GB, each taken as one with the least rates"
    assert words in places_text(cluster, mesh, "stage")


def test_orders_are_tried_only_where_stages_differ() -> None:
    cluster = Cluster.parse("1x2xH100-SXM+1x2xA100-40GB")
    assert mesh_orders(cluster, Mesh(1, 4, 1)) == [()]  # on all devices at once
    assert mesh_orders(cluster, Mesh(2, 1, 1)) == [()]  # on two of them
    assert mesh_orders(cluster, Mesh(2, 2, 1)) == [(), (1, 0)]
    assert mesh_orders(Cluster.parse("2x2xH100-SXM"), Mesh(2, 2, 1)) == [()]


# what they take


def test_alike_nodes_have_one_cost_model() -> None:
    cost = cost_model(Cluster.parse("2x2xH100-SXM"), Mesh(2, 2, 1))
    assert all(other is cost for other in rank_costs(cost))


def test_nothing_is_slower_under_the_least_costs() -> None:
    cluster, mesh = Cluster.parse("1x2xH100-SXM+1x2xA100-40GB"), Mesh(2, 1, 2)
    main = cost_model(cluster, mesh)
    least, ranks = least_cost(cluster, mesh), rank_costs(main)
    assert least.capacity_bytes == max(cost.capacity_bytes for cost in ranks)
    for size in (1e3, 1e6, 1e9):
        assert least.group_s(size) == min(cost.group_s(size) for cost in ranks)
        parts = [cost.collective_s("all_reduce", size, "tensor") for cost in ranks]
        assert parts[0] < parts[1]  # the links of H100 are faster
        assert least.collective_s("all_reduce", size, "tensor") == parts[0]
        assert least.send_s(size, 0) == main.send_s(size, 0)


def test_a_kind_of_place_is_priced_once_whatever_the_other_ranks_have() -> None:
    graph, cluster = chain(), Cluster.parse("1x2xH100-SXM+1x2xA100-40GB+1x2xL40S")
    batch_flow = flow(graph)
    work = Workload(graph, batch_flow, variants(graph, batch_flow), 8, "adamw")
    supplies = Supplies(Supply(work, cluster, read_pins({}), is_whole_batch=False))

    def first(mesh: Mesh) -> LeastCosts:
        return supplies.least_of_ranks(Candidate(mesh, 1, "1f1b", 8))[0]

    three, two = Mesh(pipeline=3, tensor=2), Mesh(pipeline=2, tensor=2)
    assert first(three).known_blocks is first(two).known_blocks
    assert first(three).known_totals is first(two).known_totals
    whole = Mesh(pipeline=3, data=2)  # other places of the same devices
    assert first(three).known_blocks is not first(whole).known_blocks
    assert first(three).known_frontiers is first(whole).known_frontiers


def test_the_faster_device_gets_more_layers() -> None:
    made = plan(wide(12), Cluster.parse(TWO), global_batch=4096,
                pin={**PINS, "pipeline": 2, "schedule": "1f1b"})  # fmt: skip
    calls = [sum(p.count for p in stage) for stage in made.stages]
    devices = stage_devices(made.cluster, made.mesh)
    fast = [device.name for device in devices].index("H100-SXM")
    assert calls[fast] > 1.5 * calls[1 - fast]
    times = [cost.forward_s + cost.backward_s for cost in made.prediction.stages]
    assert max(times) < 1.35 * min(times)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved"])
@pytest.mark.parametrize("spec", [TWO, THREE])
def test_the_best_of_all_cuts_is_found(spec: str, schedule: str) -> None:
    cluster, graph = Cluster.parse(spec), wide()
    pins = {**PINS, "pipeline": cluster.n_devices, "schedule": schedule, "micro_batches": 6}
    if schedule == "interleaved":
        pins["virtual_stages"] = 2
    made = plan(graph, cluster, global_batch=6144, pin=pins)
    least_s = min(every_cut(graph, cluster, made))
    assert made.prediction.bound_s <= least_s * (1 + 1e-9)
    # to the search's gap; GPipe's stage problem counts sends half in forward, half in backward
    most = 1.04 if schedule == "gpipe" else 1.006
    assert least_s * (1 - 1e-9) <= made.prediction.step_s <= least_s * most


def every_cut(graph: Graph, cluster: Cluster, made: Plan) -> list[float]:
    """Steps of all cuts in all orders of the nodes, with everything kept; of the plan's mesh."""
    batch_flow, mesh = flow(graph), made.mesh
    work = Workload(graph, batch_flow, variants(graph, batch_flow), made.global_batch, "adamw")
    supplies = Supplies(Supply(work, cluster, read_pins(PINS), is_whole_batch=False))
    found = []
    for order in node_orders(cluster):
        candidate = Candidate(
            mesh, made.micro_batches, made.schedule, made.global_batch // made.micro_batches,
            made.virtual_stages, order=order,
        )  # fmt: skip
        cost = cost_model(in_order(cluster, order), mesh)
        prices = StagePrices(work, candidate, supplies.pieces(candidate, 0.0), cost)
        calls = [StageCall(i, v, "none") for i, v in sorted(prices.variant_of.items())]
        for inner in combinations(range(1, len(calls)), candidate.stages - 1):
            spans = pairwise((0, *inner, len(calls)))
            stages = tuple(tuple(calls[a:b]) for a, b in spans)
            found.append(prices.step_s(replace(prices.program, stages=stages)))
    return found


def test_a_faster_node_never_makes_it_worse() -> None:
    graph = chain(depth=6, width=512, hidden=2048, words=4096, seq=512)
    before = inf
    for spec in ("1x2xA100-40GB", "1x2xA100-40GB+1x2xH100-SXM", "1x2xA100-40GB+2x2xH100-SXM"):
        step_s = plan(graph, Cluster.parse(spec), global_batch=16).prediction.step_s
        assert step_s <= before * (1 + 1e-9)
        before = step_s


def test_both_kinds_are_better_than_either() -> None:
    graph = chain(depth=12, width=2048, hidden=8192, words=8192, seq=1024)
    alone, slow, both = (
        plan(graph, Cluster.parse(spec), global_batch=64).prediction.step_s
        for spec in ("1x2xH100-SXM", "2x2xA100-80GB", "1x2xH100-SXM+1x2xA100-80GB")
    )
    assert both < min(alone, slow)


def test_each_stage_has_the_memory_of_its_device() -> None:
    graph = chain(depth=8, width=512, hidden=2048, words=1024, seq=512)
    pins = {"pipeline": 2, "tensor": 1, "micro_batches": 4, "schedule": "1f1b"}
    roomy = plan(graph, Cluster.parse("1x2xA100-80GB+1x2xH100-SXM"), global_batch=32, pin=pins)
    cluster = with_memory(roomy, 0.7)
    made = plan(graph, cluster, global_batch=32, pin=pins)
    p = made.prediction
    for rank, device in enumerate(stage_devices(made.cluster, made.mesh)):
        assert p.capacity_of(rank) == device.usable_bytes
        assert p.stages[rank].peak_bytes <= device.usable_bytes
    assert len({cost.capacity_bytes for cost in p.stages}) == 2
    assert p.capacity_bytes == p.capacity_of(p.fullest)


def with_memory(made: Plan, share: float) -> Cluster:
    """The plan's cluster, whose first kind of node has less memory than the plan fills."""
    parts, usable = list(made.cluster.nodes), made.prediction.peak_bytes
    for number, part in enumerate(parts):
        room = int(usable * (share if number == 0 else 4))
        device = replace(part.device, memory_bytes=room, reserve_bytes=0)
        parts[number] = replace(part, device=device)
    least = slowest([part.device for part in parts])
    return replace(made.cluster, device=least, nodes=tuple(parts))


# what a plan says


def test_the_plan_says_where_its_stages_lie_and_comes_back_from_json() -> None:
    made = plan(wide(12), Cluster.parse(TWO), global_batch=4096, pin={**PINS, "pipeline": 2})
    assert places_text(made.cluster, made.mesh, "stage") in made.text or made.virtual_stages > 1
    assert "start the nodes in this order" in made.text and "usable" in made.text
    assert any(note.startswith("nodes in the order") for note in made.approximations)
    assert not any("every device is taken" in note for note in made.approximations)
    again = Plan.from_json(made.to_json())
    assert again == made and again.hash == made.hash
    assert isinstance(again.prediction, Prediction)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved"])
def test_the_simulator_has_the_same_seconds(schedule: str) -> None:
    graph = wide(12)
    pins = {**PINS, "pipeline": 2, "schedule": schedule, "micro_batches": 8}
    made = plan(graph, Cluster.parse(TWO), global_batch=8192, pin=pins)
    again = simulate_plan(graph, made)
    assert again.prediction == made.prediction
    assert again.timeline.makespan_s == pytest.approx(made.prediction.step_s, rel=0.05)
