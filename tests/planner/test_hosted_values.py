"""Saved values on the host: points of a menu, their price, and when they are chosen."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import Chain, chain

from codegen import emit
from codegen.load import load
from ir.cluster import Cluster, Mesh
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.machines import Host
from ir.offload import staying_inputs
from ir.plan import Plan
from ir.recompute import kept_values, state_inputs
from planner import plan
from planner.candidate import Workload, evaluate
from planner.cost import Roofline
from planner.frontier import frontier
from planner.offload import Hosting, hosting_of, pinned_bytes
from planner.pieces import Pieces, best_menu, pieces, whole
from planner.pins import Candidate
from planner.recompute_program import KeptProgram
from planner.timeline import simulate_plan
from runtime.host import Hosted
from runtime.trainer import run_threads
from tests.hand_plan import kinds_of

FAST, SLOW = 4e9, 1e6
SIZES = {"depth": 24, "width": 32, "hidden": 64, "seq": 256}
ROWS = 8


def cluster(link_bytes_per_s: float, memory_GiB: float = 1, host_bytes: int = 2**30) -> Cluster:
    host = Host(link_bytes_per_s, host_bytes, link_part=1.0)
    return replace(Cluster.local(1, memory_GiB=memory_GiB), own_host=host)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Activations outweigh state, and take long to make again."""
    return chain(**SIZES)


def made(graph: Graph, link_bytes_per_s: float, recompute: str | None = None) -> Pieces:
    """The pieces of one device with menus that may use the host."""
    batch_flow, kinds = kinds_of(graph)
    candidate = Candidate(Mesh(), 1, "1f1b", ROWS)
    where = cluster(link_bytes_per_s)
    return pieces(
        graph, batch_flow, kinds, whole(graph, kinds), candidate.degrees, Roofline(where, Mesh()),
        best_menu(recompute, hosting_of(graph, where, "activations")),
    )  # fmt: skip


def layer(graph: Graph) -> int:
    _, kinds = kinds_of(graph)
    return max(range(len(kinds)), key=lambda number: len(kinds[number].calls))


# the menu


def test_a_point_on_the_host_costs_its_copies(graph: Graph) -> None:
    """By hand: every storage out in forward and back in backward, with a launch each."""
    for recompute in ("none", "full"):
        found, number = made(graph, FAST, recompute), layer(graph)
        near, far = found.menus[number]
        storage, lowered = found.storages[number], found.lowered[number]
        assert far.label == f"{near.label} on the host"
        owners = {storage.owner[name] for name in far.hosted}
        moved_bytes = sum(storage.size_bytes[owner] for owner in owners)
        copies_s = moved_bytes / FAST + 5e-6 * len(owners)
        assert far.copy_s == pytest.approx(copies_s)
        assert far.forward.total_s == pytest.approx(near.forward.total_s + copies_s)
        assert far.backward.total_s == pytest.approx(near.backward.total_s + copies_s)
        assert moved_bytes == near.held_bytes > 0 == far.held_bytes
        assert far.host_bytes == sum(pinned_bytes(storage.size_bytes[o]) for o in owners)
        assert far.transient_bytes == near.transient_bytes + moved_bytes
        always = state_inputs(lowered, graph.calls[1].arguments, {s.name for s in graph.state})
        assert far.hosted == set(kept_values(lowered, far.kept, always))


@pytest.mark.parametrize("link", [FAST, SLOW, 1e12])
def test_no_point_of_a_menu_beats_another(graph: Graph, link: float) -> None:
    for menu in made(graph, link).menus:
        for one in menu:
            assert not any(other.beats(one) for other in menu if other is not one)
        assert len({point.label for point in menu}) == len(menu) <= 24


def test_a_slow_link_is_for_what_cannot_be_made_again(graph: Graph) -> None:
    """Recomputing everything but the block's input is faster; the input itself has no other way."""
    for point in made(graph, SLOW).menus[layer(graph)]:
        assert not point.hosted or point.held_bytes < 2 * 32 * 256 * ROWS * 4


def test_a_fast_link_replaces_recomputation(graph: Graph) -> None:
    menu = made(graph, 1e15).menus[layer(graph)]
    assert any(point.hosted for point in menu)
    assert "full" not in {point.label for point in menu}


def test_what_is_on_the_device_anyway_stays_there(graph: Graph) -> None:
    """Token ids are of the batch; the first layer's input is read by it alone."""
    _, kinds = kinds_of(graph)
    stays = [staying_inputs(graph, kind) for kind in kinds]
    ids = {i.name for i in graph.inputs}
    for kind, names in zip(kinds, stays, strict=True):
        call = graph.calls[kind.calls[0]]
        read = dict(zip(kind.block.inputs, call.arguments, strict=True))
        assert {name for name, value in read.items() if value in ids} <= names
    kind = kinds[layer(graph)]
    read = dict(zip(kind.block.inputs, graph.calls[kind.calls[0]].arguments, strict=True))
    made_before = {name for name, value in read.items() if value in graph.calls[0].results}
    assert made_before and not made_before & stays[layer(graph)]


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_the_curve_lies_below_every_point(graph: Graph, link: float) -> None:
    found, (_, kinds) = made(graph, link), kinds_of(graph)
    for number, kind in enumerate(kinds):
        lowered, menu = found.lowered[number], found.menus[number]
        arguments = graph.calls[kind.calls[0]].arguments
        always = state_inputs(lowered, arguments, {s.name for s in graph.state})
        hosting = Hosting(cluster(link), staying_inputs(graph, kind))
        program = KeptProgram(
            lowered, found.storages[number], found.times[number], always, (), hosting
        )
        least_s = min(point.total_s for point in menu)
        for line in frontier(program).lines:
            for point in menu:
                more_s = point.total_s - least_s
                assert more_s + line.price * point.held_bytes >= line.value * (1 - 1e-6) - 1e-12


# the plan


def best(graph: Graph, memory_GiB: float, link: float = FAST, **pin: Any) -> Plan:
    pins = {"micro_batches": 1, **pin}
    return plan(graph, cluster(link, memory_GiB), global_batch=ROWS, pin=pins)


@pytest.fixture(scope="module")
def tight_GiB(graph: Graph) -> float:
    """Less than recomputing everything needs, more than the host leaves."""
    full = best(graph, 1, offload="none", recompute="full").prediction.peak_bytes
    return 0.85 * full / 2**30


def test_what_fits_only_with_the_host_uses_it(graph: Graph, tight_GiB: float) -> None:
    with pytest.raises(Refused, match="no plan fits"):
        best(graph, tight_GiB, offload="none")
    found = best(graph, tight_GiB, offload="activations")
    assert found.offload == "activations"
    assert found.prediction.peak_bytes <= tight_GiB * 2**30
    assert 0 < found.prediction.bound_s <= found.prediction.step_s
    assert found.prediction.stages[0].host_bytes > 0
    assert "saved values in host memory" in found.text and "on the host, " in found.text
    assert best(graph, tight_GiB).offload != "none"


def test_a_permission_is_not_an_order(graph: Graph) -> None:
    found = best(graph, 1, offload="activations")
    assert found.offload == "none" and "host" not in found.text
    assert best(graph, 1, offload="all").offload == "optimizer"


@pytest.mark.parametrize("part", [0.9, 0.7, 0.5])
def test_offload_never_makes_a_plan_slower(graph: Graph, part: float) -> None:
    memory_GiB = part * best(graph, 1, offload="none").prediction.peak_bytes / 2**30
    steps = []
    for link in (SLOW, FAST, 1e15):
        steps.append(best(graph, memory_GiB, link, offload="activations").prediction.step_s)
    alone = best(graph, memory_GiB, offload="none").prediction.step_s
    assert alone * 1.005 >= steps[0] and steps[0] * 1.005 >= steps[1] >= steps[2] / 1.005


def test_a_full_host_leaves_the_values_on_the_device(graph: Graph) -> None:
    batch_flow, kinds = kinds_of(graph)
    work = Workload(graph, batch_flow, kinds, ROWS, "adamw")
    candidate = Candidate(Mesh(), 1, "1f1b", ROWS, offload="activations")
    found = made(graph, 1e15)
    roomy = evaluate(work, candidate, found, Roofline(cluster(1e15), Mesh()))
    tight_GiB = 0.7 * roomy.prediction.peak_bytes / 2**30
    offloaded, kept = (
        evaluate(work, candidate, found, Roofline(cluster(1e15, tight_GiB, size), Mesh()))
        for size in (2**30, 2**10)
    )
    assert offloaded.program.offload == "activations"
    assert kept.program.offload == "none" and kept.prediction.stages[0].host_bytes == 0
    assert offloaded.prediction.step_s < kept.prediction.step_s


def test_the_timeline_prices_the_same(graph: Graph, tight_GiB: float) -> None:
    found = best(graph, tight_GiB, offload="all")
    again = simulate_plan(graph, found).prediction
    assert again.step_s == pytest.approx(found.prediction.step_s)
    assert again.stages == found.prediction.stages


def test_json_gives_the_hosted_values_back(graph: Graph, tight_GiB: float) -> None:
    found = best(graph, tight_GiB, offload="activations")
    value = json.loads(json.dumps(found.to_json()))
    again = Plan.from_json(value)
    assert again == found and any(block.hosts for block in again.blocks)
    assert emit(graph, again).files == emit(graph, found).files
    assert all("hosts" not in block for block in best(graph, 1).to_json()["blocks"])
    block = next(block for block in value["blocks"] if "hosts" in block)
    block["hosts"] = [["none"]]
    with pytest.raises(UsageError, match="keeps and hosts must be pairs"):
        Plan.from_json(value)


# the program


def saved_bytes(saved: Any, *, on_device: bool) -> int:
    """Of all storages in what a forward hands to its backward, each once."""
    storages: dict[int, int] = {}

    def visit(item: Any) -> None:
        if isinstance(item, Hosted):
            for buffer in () if on_device else item.buffers:
                storages[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            for part in item:
                visit(part)
        elif on_device:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()

    visit(saved)
    return sum(storages.values())


def test_the_device_holds_what_the_plan_says(tight_GiB: float) -> None:
    """What forward saves, on the device and on the host; the latter is rounded up in the plan."""
    graph = chain(**SIZES)
    model, batch = built()
    held = {}
    for name, memory_GiB, offload in (("near", 1, "none"), ("far", tight_GiB, "activations")):
        found = best(graph, memory_GiB, offload=offload)
        module, layout = load(emit(graph, found))
        seen: list[tuple[int, int]] = []
        stage = module.STAGES[0]

        def forward(*arguments: Any, stage: Any = stage, seen: Any = seen) -> Any:
            y, saved = stage.forward(*arguments)
            seen.append(tuple(saved_bytes(saved, on_device=here) for here in (True, False)))
            return y, saved

        module.STAGES = (replace(stage, forward=forward),)
        run_threads(layout, module, model, 1, lambda trainer: float(trainer.step(*batch)))
        cost = found.prediction.stages[0]
        assert seen[0][0] == pytest.approx(cost.saved_bytes, rel=0.01)
        assert seen[0][1] <= cost.host_bytes <= 2 * seen[0][1]
        held[name] = seen[0]
    assert held["near"][1] == 0 < held["far"][1]
    assert held["far"][0] < 0.3 * held["near"][0]


def built() -> Any:
    torch.manual_seed(0)
    ids = torch.randint(24, (ROWS, SIZES["seq"]))
    return Chain(24, 32, 64, 24), (ids, ids)
