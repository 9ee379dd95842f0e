"""ZeRO in the planner: what it divides, what it moves, when it is chosen, what a pin may ask."""

import dataclasses
import json
from math import ceil
from random import Random
from typing import Any

import pytest
from small_models import chain, products, whole

from ir.cluster import Cluster, Mesh
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.layout import TENSOR
from ir.lower import Degrees
from ir.plan import Plan, spmd
from ir.spmd import Spmd, lower_all
from planner import plan
from planner.attempts import SLACK
from planner.candidate import Workload, _Evaluation, evaluate
from planner.cost import Roofline
from planner.pieces import best_menu, pieces
from planner.pieces import whole as unsharded
from planner.pins import Candidate, parse_pins
from planner.stages import plan_stages
from planner.zero import ZeroMoves, held_cost, least_held_cost
from tests.hand_plan import even_stages, hand_plan, keep_all, kinds_of, whole_shardings
from tests.numbers.random_plans import random_plan

DATA = 3
CLUSTER, MESH = Cluster.local(DATA, memory_GiB=1), Mesh(1, DATA, 1)
COST = Roofline(CLUSTER, MESH)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain(width=64, hidden=256)


def program(graph: Graph, zero: int, data: int = DATA, pipeline: int = 1) -> Spmd:
    degrees = Degrees(8 * data, data, 1, 2)
    batch_flow, kinds = kinds_of(graph)
    shardings = whole_shardings(kinds)
    keeps = keep_all(graph, kinds, lower_all(graph, batch_flow, kinds, shardings, degrees))
    made = hand_plan(
        graph, degrees, kinds, shardings, keeps, even_stages(graph, pipeline), zero=zero
    )
    return spmd(graph, made)


def name_of(found: Spmd, end: str) -> str:
    return next(s.name for s in found.graph.state if s.names[0].endswith(end))


# one tensor


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_divides_what_it_says_in_padded_pieces(graph: Graph, zero: int) -> None:
    found = program(graph, zero)
    cost = held_cost(found, name_of(found, "0.up.bias"), COST, "adamw")
    whole_bytes, piece_bytes = 4 * 256, 4 * ceil(256 / DATA)
    parts = [cost.optimizer_bytes // 2, cost.gradient_bytes, cost.parameter_bytes]
    assert parts == [piece_bytes] * zero + [whole_bytes] * (3 - zero)


def test_each_stage_moves_what_it_says(graph: Graph) -> None:
    size_bytes = 4 * DATA * ceil(64 * 256 / DATA)
    gather_s, scatter_s, reduce_s = (
        COST.collective_s(op, size, "data")
        for op, size in (
            ("all_gather", size_bytes), ("reduce_scatter", size_bytes), ("all_reduce", 4 * 64 * 256)
        )
    )  # fmt: skip
    costs = []
    for zero in range(4):
        found = program(graph, zero)
        costs.append(held_cost(found, name_of(found, "0.up.weight"), COST, "adamw"))
    assert [c.sync_s for c in costs] == pytest.approx(
        [reduce_s, scatter_s + gather_s, gather_s, 0.0]
    )
    assert [c.scatter_s for c in costs] == pytest.approx([0.0, 0.0, scatter_s, scatter_s])
    assert [c.gather_s for c in costs] == pytest.approx([0.0, 0.0, 0.0, gather_s])
    assert costs[1].update_s == costs[3].update_s < costs[0].update_s


def test_a_call_moves_the_weights_and_gradients_of_its_block(graph: Graph) -> None:
    for zero in range(4):
        found = program(graph, zero)
        state = {s.name: held_cost(found, s.name, COST, "adamw") for s in graph.state}
        moves = ZeroMoves(found, state).of(found.stages[0][1])  # the first layer
        names = [n for n in graph.calls[1].arguments if n in state]
        gather_s = sum(state[n].gather_s for n in names)
        scatter_s = sum(state[n].scatter_s for n in names)
        assert len(names) == 6
        assert moves.forward_s == pytest.approx(gather_s)
        assert moves.backward_s == pytest.approx(gather_s + scatter_s)
        gathered = sum(state[n].gathered_bytes for n in names) if zero == 3 else 0
        gradients = sum(state[n].summed_bytes for n in names) if zero >= 2 else 0
        assert moves.whole_bytes == gathered + gradients


def test_a_backward_that_reads_no_weights_gathers_none(graph: Graph) -> None:
    found = program(graph, 3)
    state = {s.name: held_cost(found, s.name, COST, "adamw") for s in graph.state}
    table = state[name_of(found, "embed.weight")]
    moves = ZeroMoves(found, state).of(found.stages[0][0])
    assert moves.forward_s == pytest.approx(table.gather_s)
    assert moves.backward_s == pytest.approx(table.scatter_s)


def drawn(op: str, zero: int) -> tuple[Spmd, str]:
    """A random program, and a parameter whose gradient needs `op` on the tensor axis."""
    graph = chain(width=64, hidden=256)
    for seed in range(200):
        mesh = (1, Degrees(16, 2, 2, 1))
        made = random_plan(graph, 16, Random(seed), mesh=mesh, zero=zero, offload="none")
        found = spmd(graph, made)
        for item in graph.state:
            ops = [o for o, axis, _, _ in found.gradient_sync(item.name) if axis == TENSOR]
            if ops == [op]:
                return found, item.name
    raise AssertionError(f"no draw needs {op}")


@pytest.mark.parametrize("zero", [1, 2])
def test_sums_over_the_tensor_axis_wait_for_the_pieces(zero: int) -> None:
    """Other moves on it come before, on whole gradients: in every micro-batch from stage 2 on."""
    cost = Roofline(Cluster.local(4, memory_GiB=1), Mesh(1, 2, 2))
    for op in ("all_reduce", "reduce_scatter"):
        found, name = drawn(op, zero)
        held, local = held_cost(found, name, cost, "adamw"), found.state_type(name).bytes(1)
        gather_s, scatter_s = (
            cost.collective_s(o, local, "data") for o in ("all_gather", "reduce_scatter")
        )
        whole_bytes = found.state_of[name].type.bytes(1)
        size_bytes = local / 2 if op == "all_reduce" else whole_bytes
        on_tensor_s = cost.collective_s(op, size_bytes, TENSOR)
        always_s = gather_s + (on_tensor_s if op == "all_reduce" else 0.0)
        often_s = scatter_s + (on_tensor_s if op != "all_reduce" else 0.0)
        assert held.sync_s == pytest.approx(always_s + (often_s if zero == 1 else 0.0))
        assert held.scatter_s == pytest.approx(often_s if zero == 2 else 0.0)


def test_least_costs_bound_every_tensor_closely(graph: Graph) -> None:
    """What the search's bounds take; pieces are not padded there."""
    for zero in range(4):
        found = program(graph, zero)
        costs = [held_cost(found, s.name, COST, "adamw") for s in graph.state]
        least = [least_held_cost(s, COST, "adamw", zero) for s in graph.state]
        for part in ("held_bytes", "sync_s", "update_s", "scatter_s", "gather_s"):
            exact = sum(getattr(cost, part) for cost in costs)
            bound = sum(getattr(cost, part) for cost in least)
            assert 0.9 * exact <= bound <= exact * (1 + 1e-9), (zero, part)


# the choice


def best(graph: Graph, memory_GiB: float, **pin: Any) -> Plan:
    cluster = Cluster.local(4, memory_GiB=memory_GiB)
    return plan(graph, cluster, global_batch=16, pin=pin)


@pytest.fixture(scope="module")
def heavy() -> Graph:
    """State outweighs activations."""
    return chain(depth=12, width=128, hidden=512, seq=4)


@pytest.mark.parametrize("part", [2.0, 0.7, 0.45, 0.35])
def test_the_search_finds_the_best_stage(heavy: Graph, part: float) -> None:
    """As trying all of them does, at memory from plenty to scarce."""
    mesh = {"pipeline": 1, "tensor": 1}
    roomy_GiB = best(heavy, 1, zero=0, **mesh).prediction.peak_bytes / 2**30
    pinned = []
    for zero in range(4):
        try:
            pinned.append(best(heavy, roomy_GiB * part, zero=zero, **mesh))
        except Exception as error:
            assert "no plan fits" in str(error)
    found = best(heavy, roomy_GiB * part, **mesh)
    least_s = min(p.prediction.step_s for p in pinned)
    assert least_s <= found.prediction.step_s <= least_s / (1 - SLACK)
    assert found.prediction.bound_s <= least_s


def test_scarce_memory_divides_more(heavy: Graph) -> None:
    mesh = {"pipeline": 1, "tensor": 1, "micro_batches": 1}
    peaks = [best(heavy, 1, zero=zero, **mesh).prediction.peak_bytes for zero in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    stages = []
    for lower, upper in zip(peaks[1:], peaks, strict=False):
        found = best(heavy, (lower + upper) / 2 / 0.97 / 2**30, recompute="none", **mesh)
        stages.append(found.zero)
    assert stages == sorted(stages)
    assert stages[-1] == 3


@pytest.mark.parametrize(("memory_MiB", "zero"), [(6, 1), (4, 2), (3, 3)])
def test_a_stage_that_turns_out_too_full_divides_more(memory_MiB: float, zero: int) -> None:
    """Five layers on two stages: one has three, where an even share has two and a half."""
    graph = chain(depth=5, width=128, hidden=512, seq=4)
    cluster = Cluster.local(16, memory_GiB=memory_MiB / 2**10)
    pin = {"pipeline": 2, "data": 8, "micro_batches": 1, "recompute": "none"}
    assert plan(graph, cluster, global_batch=16, pin=pin).zero == zero
    with pytest.raises(Refused, match="no plan fits"):
        plan(graph, cluster, global_batch=16, pin=pin | {"zero": zero - 1})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_stage_problem_prices_what_the_prediction_does(graph: Graph, zero: int) -> None:
    batch_flow, kinds = kinds_of(graph)
    work = Workload(graph, batch_flow, kinds, 8 * DATA, "adamw")
    candidate = Candidate(MESH, 2, "1f1b", 4, zero=zero)
    found = pieces(
        graph, batch_flow, kinds, unsharded(graph, kinds), candidate.degrees, COST,
        best_menu("none"),
    )  # fmt: skip
    problem = _Evaluation(work, candidate, found, COST)._problem
    stages = plan_stages(dataclasses.replace(problem, capacity_bytes=(2.0**30,) * problem.stages))
    prediction = evaluate(work, candidate, found, COST).prediction
    assert stages.step_s == pytest.approx(prediction.step_s)
    adding_maxima = stages.stage_memory[0].peak_bytes  # where the prediction walks
    assert adding_maxima == pytest.approx(prediction.peak_bytes, rel=0.01)


def test_less_is_divided_where_it_does_not_pay() -> None:
    """SGD without state: stage 1 saves next to nothing and takes two collectives for one."""
    cluster = Cluster.local(2, memory_GiB=1)
    found = plan(products(2), cluster, global_batch=8, pin={"data": 2}, optimizer="sgd")
    assert found.zero == 0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_pinned_stage_is_planned_priced_and_said(graph: Graph, zero: int) -> None:
    found = best(graph, 1, data=2, pipeline=2, zero=zero)
    assert found.zero == zero
    assert spmd(graph, found).zero == zero
    assert f"   zero {zero}   adamw" in found.text
    says = {
        0: None, 1: "ZeRO 1 over data=2: optimizer state divided",
        2: "ZeRO 2 over data=2: optimizer state and gradients divided",
        3: "ZeRO 3 over data=2: optimizer state, gradients and parameters divided",
    }[zero]  # fmt: skip
    assert says is None or says in found.text.splitlines()
    parts = found.prediction
    total_s = parts.compute_s + parts.exposed_comm_s + parts.bubble_s + parts.optimizer_s
    assert parts.step_s == pytest.approx(total_s)


def test_the_program_of_a_prediction_is_the_program_of_its_plan(graph: Graph) -> None:
    """Bytes and seconds are those of the stages that are emitted."""
    found = best(graph, 1, data=2, pipeline=2, zero=3)
    again = spmd(graph, found)
    cost = Roofline(found.cluster, found.mesh)
    for number, stage in enumerate(again.stages):
        names = {n for placed in stage for n in again.call(placed).arguments}
        held = [held_cost(again, n, cost, "adamw") for n in names if n in again.state_of]
        assert found.prediction.stages[number].parameter_bytes == sum(
            c.parameter_bytes for c in held
        )


# pins


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"zero": 4}, "zero=4: it is one of 0, 1, 2, 3"),
        ({"zero": True}, "zero=True: it is one of"),
        ({"zero": "1"}, "zero='1': it is one of"),
        ({"zero": 2, "data": 1}, "pin zero=2: ZeRO divides state over data ranks, and with data=1"),
        ({"zero": 1, "tensor": 4}, "with data=1 there is nothing to divide"),
        ({"zero": 3, "tensor": 2, "pipeline": 2}, "Use zero=0, or pins that leave"),
    ],
    ids=str,
)
def test_pins_that_make_no_sense(graph: Graph, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        best(graph, 1, **pin)


def test_a_pinned_stage_needs_data_ranks() -> None:
    found = plan(chain(), Cluster.local(4, memory_GiB=1), global_batch=8, pin={"zero": 2})
    assert found.mesh.data > 1
    assert parse_pins("zero=2") == {"zero": 2}


def test_the_batch_statistics_of_a_model_allow_zero() -> None:
    found = plan(whole(), Cluster.local(2, memory_GiB=1), global_batch=8, pin={"zero": 3})
    assert (found.zero, found.micro_batches) == (3, 1)


# the plan file


@pytest.mark.parametrize("zero", [0, 3])
def test_json_gives_the_stage_back(graph: Graph, zero: int) -> None:
    found = best(graph, 1, data=4, zero=zero)
    again = Plan.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert again.zero == zero


def test_a_file_without_the_key_divides_nothing(graph: Graph) -> None:
    """As files from before there was a choice: they have another hash only if they say more."""
    found = best(graph, 1, data=4, zero=0)
    assert "zero" not in found.to_json()
    assert dataclasses.replace(found, zero=1).hash != found.hash


@pytest.mark.parametrize(
    ("zero", "message"), [(7, "zero is 7; ZeRO has"), ("3", "must be a int"), (True, "be a int")]
)
def test_another_stage_is_told(graph: Graph, zero: Any, message: str) -> None:
    value = best(graph, 1, data=4, zero=3).to_json()
    with pytest.raises(UsageError, match=message):
        Plan.from_json(value | {"zero": zero})
