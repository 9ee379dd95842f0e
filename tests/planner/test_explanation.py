"""What explanations say: against plans made by hand, and where the answer is known."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from small_models import chain, products

from ir.cluster import GIB, Cluster
from ir.cluster_change import changed
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.plan import Plan
from planner import plan
from planner.alternatives import Moved, compare, decisions, neighbours
from planner.explanation import Explanation, explain_request
from planner.shortage import DoesNotFit
from planner.trials import Planning, Refusal, Request, Trials

LOCAL, PAIR = Cluster.local(4, memory_GiB=1), Cluster.local(2, memory_GiB=1)
OWN = {"schedule": "1f1b", "zero": 0, "micro_batches": 2}
"""Decisions that most requests here fix: fewer are left to search."""


def planning_of(graph: Graph) -> Planning:
    return lambda request, left_s: plan(
        graph, request.cluster, global_batch=request.global_batch, pin=request.pins,
        time_limit_s=left_s,
    )  # fmt: skip


def explained(graph: Graph, cluster: Cluster, pins: Mapping[str, Any], **asked: Any) -> Explanation:
    trials = Trials(planning_of(graph), 600)
    return explain_request(Request(cluster, 8, pins), trials, **asked)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain(depth=2, width=256, hidden=512, seq=32)


@pytest.fixture(scope="module")
def told(graph: Graph) -> Explanation:
    return explained(graph, PAIR, OWN)


# alternatives


def test_an_alternative_is_the_plan_that_its_pins_give(graph: Graph, told: Explanation) -> None:
    assert told.plan is not None
    mesh = {axis: told.plan.mesh.degree(axis) for axis in ("pipeline", "data", "tensor")}
    seen = set()
    for item in told.alternatives:
        ((key, value),) = item.asked
        held = {} if key in mesh else mesh
        seen.add(key)
        if isinstance(item.outcome, Plan) and decisions(item.outcome).items() >= held.items():
            own = {k: v for k, v in OWN.items() if k not in (key, *item.released)}
            byhand = plan(graph, PAIR, global_batch=8, pin=held | own | {key: value})
            assert item.outcome == byhand
            assert key == "recompute" or decisions(byhand)[key] == value
    assert {"micro_batches", "recompute"} <= seen and seen & {"pipeline", "data", "tensor"}


def test_the_parts_add_up_to_the_difference(told: Explanation) -> None:
    assert told.plan is not None
    made = [a.outcome for a in told.alternatives if isinstance(a.outcome, Plan)]
    found = [compare(told.plan, other) for other in made]
    assert found
    for item in found:
        parts = sum(seconds for _, seconds in item.parts)
        assert parts == pytest.approx(item.total_s, abs=1e-9 * told.plan.prediction.step_s)
        assert item.share == pytest.approx(item.total_s / told.plan.prediction.step_s)


def test_neighbours_are_the_next_legal_values() -> None:
    made = plan(chain(), LOCAL, global_batch=8, pin={
        "pipeline": 2, "data": 2, "tensor": 1, "micro_batches": 2, "schedule": "1f1b", "zero": 1
    })  # fmt: skip
    found = list(neighbours(made))
    assert found == [
        ("pipeline", 1), ("pipeline", 4), ("data", 1), ("data", 4), ("tensor", 2),
        ("micro_batches", 1), ("micro_batches", 4), ("schedule", "gpipe"),
        ("schedule", "interleaved"), ("schedule", "zero-bubble"), ("recompute", "selective"),
        ("recompute", "full"), ("zero", 0), ("zero", 2),
    ]  # fmt: skip


def test_one_device_has_no_other_mesh(graph: Graph) -> None:
    made = plan(graph, Cluster.local(1, memory_GiB=1), global_batch=8)
    assert {key for key, _ in neighbours(made)} == {"micro_batches", "recompute"}


def test_what_moves_with_a_degree_is_said(told: Explanation) -> None:
    assert told.plan is not None
    for item in told.alternatives:
        ((key, value),) = item.asked
        if key in ("pipeline", "data", "tensor") and isinstance(item.outcome, Plan):
            moved = {move.key: move for move in compare(told.plan, item.outcome).moved}
            assert moved[key].new == value
            assert len(moved.keys() & {"pipeline", "data", "tensor"}) >= 2  # degrees are tied


def test_batches_of_different_size_are_compared_per_row(told: Explanation, graph: Graph) -> None:
    assert told.plan is not None
    double = replace(told.plan, global_batch=16, prediction=replace(
        told.plan.prediction, step_s=2 * told.plan.prediction.step_s
    ))  # fmt: skip
    assert compare(told.plan, double).total_s == pytest.approx(0)


# why not


def test_why_not_where_the_degree_is_free(graph: Graph) -> None:
    wanted = plan(graph, LOCAL, global_batch=8, pin={"data": 4} | OWN)
    told = explained(graph, LOCAL, {"tensor": 4} | OWN, why_not={"data": 4})
    assert told.why_not is not None and told.plan is not None
    assert told.why_not.outcome == wanted
    assert told.why_not.released == ("tensor",)
    assert not told.alternatives and "which you fixed" in str(told)


TIED = {"pipeline": 2, "tensor": 2, "data": 1, "schedule": "zero-bubble", "micro_batches": 4}


@pytest.mark.parametrize(
    ("asked", "released"),
    [
        ({"schedule": "1f1b"}, ()),
        ({"pipeline": 4}, ("tensor",)),
        ({"data": 2, "tensor": 1}, ()),
        ({"virtual_stages": 2}, ("schedule",)),
    ],
)
def test_only_the_fewest_of_what_is_fixed_is_blamed(
    asked: dict[str, Any], released: tuple[str, ...]
) -> None:
    told = explained(products(8, 64, folded=True), LOCAL, TIED, why_not=asked)
    assert told.why_not is not None and isinstance(told.why_not.outcome, Plan)
    assert told.why_not.released == released
    now = decisions(told.why_not.outcome)
    kept = TIED.keys() - {*asked, *released}
    assert {key: now[key] for key in kept} == {key: TIED[key] for key in kept}


def test_what_contradicts_itself_blames_nothing_that_is_fixed(graph: Graph) -> None:
    asked = {"schedule": "1f1b", "virtual_stages": 3}
    told = explained(graph, LOCAL, {"pipeline": 2}, why_not=asked)
    assert told.why_not is not None and told.why_not.released == ()
    assert "one stage per pipeline rank" in str(told) and "which you fixed" not in str(told)


def test_what_no_freed_decision_makes_possible_blames_none() -> None:
    told = explained(products(8, 64, folded=True), LOCAL, TIED, why_not={"virtual_stages": 99})
    assert told.why_not is not None and isinstance(told.why_not.outcome, Refusal)
    assert told.why_not.released == () and "which you fixed" not in str(told)


def test_what_if_frees_only_the_degree_that_has_no_devices_left(graph: Graph) -> None:
    pins = OWN | {"pipeline": 2, "tensor": 2}
    told = explained(graph, Cluster.parse("2x2xL4"), pins, changes={"nodes": "1"})
    assert told.what_if is not None and len(told.what_if.released) == 1


def test_gpipe_loses_nothing_but_memory_at_equal_recomputation(graph: Graph) -> None:
    pins = {"pipeline": 2, "tensor": 2, "data": 1, "micro_batches": 4, "schedule": "1f1b"}
    told = explained(graph, LOCAL, pins, why_not={"schedule": "gpipe"})
    assert told.why_not is not None and isinstance(told.why_not.outcome, Plan)
    assert told.plan is not None
    found = compare(told.plan, told.why_not.outcome)
    assert found.share == pytest.approx(0, abs=1e-9)
    assert found.moved[0] == Moved("schedule", "1f1b", "gpipe")


def test_more_micro_batches_make_a_smaller_bubble() -> None:
    """Of two equal stages one micro-batch's time: the bubble is the work over M."""
    deep, pins = products(8, 512, folded=True), {"pipeline": 2, "schedule": "1f1b"}
    fast = changed(PAIR, {"link.shared-memory": "100000"})
    told = explained(deep, fast, pins | {"micro_batches": 2}, why_not={"micro_batches": 4})
    assert told.plan is not None and told.why_not is not None
    assert isinstance(told.why_not.outcome, Plan)
    new = told.why_not.outcome.prediction
    bubble_s = dict(compare(told.plan, told.why_not.outcome).parts)["bubble"]
    assert bubble_s == pytest.approx(new.bubble_s - told.plan.prediction.bubble_s)
    work_s = new.compute_s + new.exposed_comm_s
    assert bubble_s < 0 and new.bubble_s == pytest.approx(work_s / 4, rel=0.2)


def test_why_not_a_degree_that_divides_nothing_is_answered_with_the_nearest(graph: Graph) -> None:
    told = explained(graph, LOCAL, OWN, why_not={"tensor": 3})
    assert told.why_not is not None and isinstance(told.why_not.outcome, Refusal)
    assert "Use tensor=2 or 4" in str(told)


def test_why_not_what_does_not_fit_says_by_how_much() -> None:
    big = chain(depth=2, width=256, hidden=512, seq=32)
    pins = {"pipeline": 1, "data": 1, "tensor": 1}
    roomy = plan(big, Cluster.local(1, memory_GiB=1), global_batch=8, pin={"recompute": "none"})
    tight = Cluster.local(1, memory_GiB=0.8 * roomy.prediction.peak_bytes / GIB)
    asked = {"recompute": "none", "micro_batches": 1}
    told = explained(big, tight, pins, why_not=asked)
    assert told.why_not is not None and isinstance(told.why_not.outcome, Refusal)
    shortage = told.why_not.outcome.shortage
    assert shortage is not None and shortage.need_bytes > shortage.capacity_bytes
    assert f"{told.to_json()['why_not']['need_bytes']}" == str(shortage.need_bytes)
    assert "does not fit: " in str(told) and "already too much" in str(told)


# what if, and what holds the plan back


def test_a_faster_link_takes_off_communication_alone() -> None:
    """Pinned whole: nothing else can change, and half the seconds beyond latency go."""
    pins = {"pipeline": 1, "data": 2, "tensor": 1, "micro_batches": 1, "zero": 0}
    graph = chain(width=256, hidden=1024)
    told = explained(graph, PAIR, pins, changes={"link.shared-memory": "x2"})
    assert told.what_if is not None and isinstance(told.what_if.outcome, Plan)
    assert told.plan is not None
    found = compare(told.plan, told.what_if.outcome)
    parts = dict(found.parts)
    assert parts["exposed_comm"] == pytest.approx(found.total_s) and found.total_s < 0
    assert parts["exposed_comm"] > -told.plan.prediction.exposed_comm_s / 2
    assert found.moved == ()


def test_what_if_equals_a_plan_for_that_cluster(graph: Graph) -> None:
    cluster = Cluster.parse("2xA100-80GB")
    told = explained(graph, cluster, {"data": 2}, changes={"nodes": "2", "memory": "+8GiB"})
    assert told.what_if is not None
    again = changed(cluster, {"nodes": "2", "memory": "+8GiB"})
    assert told.what_if.outcome == plan(graph, again, global_batch=8, pin={"data": 2})
    text = str(told)
    assert "what if nodes=2, memory=+8GiB" in text and "on 2x2 A100-80GB" in text


def test_memory_binds_where_there_is_little() -> None:
    big = chain(depth=2, width=64, hidden=256, seq=64)
    one = Cluster.local(1, memory_GiB=1)
    roomy = plan(big, one, global_batch=8, pin={"micro_batches": 1})
    need_gib = roomy.prediction.peak_bytes / GIB / 0.9  # a tenth of CPU memory is the reserve
    tight = Cluster.local(1, memory_GiB=0.95 * need_gib)
    told = explained(big, tight, {"micro_batches": 1})
    memory = told.relaxations[0]
    assert memory.constraint == "memory" and told.plan is not None
    assert memory.binds(told.plan) and "(binds)" in str(told)
    easy = explained(big, one, {"micro_batches": 1})
    assert easy.plan is not None and not easy.relaxations[0].binds(easy.plan)


def test_a_batch_that_keeps_degrees_out_is_a_constraint() -> None:
    trials = Trials(planning_of(chain()), 600)
    told = explain_request(Request(LOCAL, 6, {"tensor": 1} | OWN), trials)
    (batch,) = [item for item in told.relaxations if item.constraint == "batch"]
    assert (batch.limits, batch.change) == ((4,), "8")
    assert "4 do not divide 6 rows; with 8, per row: " in str(told)


# limits and mistakes


def test_nothing_is_begun_after_the_time_limit() -> None:
    now = iter(range(1000))
    trials = Trials(planning_of(chain()), 400, clock=lambda: 200.0 * next(now))
    told = explain_request(Request(LOCAL, 8, {"pipeline": 1, "data": 1}), trials)
    assert told.plan is not None
    left = [item for item in told.alternatives if item.outcome is None]
    assert left and "not tried: the time limit was reached" in str(told)


class Clock:
    """Moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_planning_has_the_time_that_is_left_and_the_last_is_said(graph: Graph) -> None:
    clock, given = Clock(), list[float]()

    def planning(request: Request, left_s: float) -> Plan:
        given.append(left_s)
        clock.now_s += 4
        return plan(graph, request.cluster, global_batch=8, pin=request.pins)

    told = explain_request(Request(PAIR, 8, OWN), Trials(planning, 10, clock))
    assert given == [10, 6, 2] and told.plan is not None
    tried = [item.outcome for item in told.alternatives if item.outcome is not None]
    assert [told.is_cut_short(outcome) for outcome in tried] == [False, True]
    assert str(told).count("but the time limit ended its search") == 1
    cut = [item.get("cut_short", False) for item in told.to_json()["alternatives"]]
    assert cut.count(True) == 1 and "not tried: the time limit was reached" in str(told)


def test_a_plan_that_the_limit_ended_says_so(graph: Graph) -> None:
    clock = Clock()

    def planning(request: Request, left_s: float) -> Plan:
        clock.now_s += 11
        return plan(graph, request.cluster, global_batch=8, pin=request.pins)

    told = explain_request(Request(PAIR, 8, OWN), Trials(planning, 10, clock))
    assert "the limit of 10 s ended its search" in str(told)
    assert told.to_json()["plan"]["cut_short"]


def test_the_same_request_is_planned_once() -> None:
    count = []

    def planning(request: Request, left_s: float) -> Plan:
        count.append(request)
        raise Refused("no")

    trials = Trials(planning, 10)
    assert trials(Request(LOCAL, 8, {"a": 1})) == trials(Request(LOCAL, 8, {"a": 1}))
    assert len(count) == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"why_not": {"tensr": 2}}, "unknown pin 'tensr'. Pins are pipeline"),
        ({"why_not": {"tensor": 0}}, "whole number of at least 1"),
        ({"why_not": {"schedule": "zb"}}, "one of gpipe, 1f1b"),
        ({"changes": {"memry": "+1GiB"}}, "'memry' can't be changed. Changes are memory=.8GiB"),
        ({"changes": {"memory": "+8"}}, r"memory=\+8 can't be read.*GiB, MiB, GB, MB"),
        ({"changes": {"memory": "+8GB/s"}}, "can't be read"),
        ({"changes": {"memory": "-8GiB"}}, "leaves -7.0 GiB"),
        ({"changes": {"nodes": "two"}}, "whole number"),
        ({"changes": {"nodes": "2"}}, "one machine"),
        ({"changes": {"link.node": "900"}}, "no link.node. Its links are link.shared-memory"),
        ({"changes": {"link.shared-memory": "0"}}, "above 0 GB/s"),
    ],
    ids=str,
)
def test_a_question_that_makes_no_sense_is_refused_before_any_work(
    asked: Mapping[str, Any], message: str
) -> None:
    def planning(request: Request, left_s: float) -> Plan:
        raise AssertionError("planned first")

    with pytest.raises(UsageError, match=message):
        explain_request(Request(LOCAL, 8, {}), Trials(planning, 10), **asked)


def test_a_request_that_makes_no_sense_stays_a_usage_error(graph: Graph) -> None:
    with pytest.raises(UsageError, match="can't be split in 3"):
        explained(graph, LOCAL, {"tensor": 3})
    with pytest.raises(Refused, match="finds no sizes") as caught:
        explained(graph, LOCAL, {"pipeline": 4, "schedule": "interleaved", "micro_batches": 4,
                                 "virtual_stages": 8})  # fmt: skip
    assert not isinstance(caught.value, DoesNotFit)


def test_a_difference_prints_its_largest_part_first(told: Explanation) -> None:
    lines = str(told).splitlines()
    assert any(line.strip().startswith("micro_batches = ") and "%" in line for line in lines)
