"""Trace files: the format, streams in order, every micro-batch, and which ranks are written."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_models import chain

from ir.cluster import Cluster
from ir.graph import Graph
from ir.plan import Plan
from planner import plan
from planner.timeline import simulate_plan
from planner.trace_file import MOST_RANKS, trace_events, write_trace

PINS = [
    {"schedule": "1f1b", "pipeline": 2, "data": 2},
    {"schedule": "zero-bubble", "pipeline": 4},
    {"schedule": "interleaved", "pipeline": 2, "virtual_stages": 2, "tensor": 2},
]
COMPLETE = {"ph", "pid", "tid", "name", "cat", "ts", "dur"}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain(8, width=64, hidden=128, seq=16)


def made(graph: Graph, pin: dict[str, Any], devices: int = 4) -> tuple[Plan, dict[str, Any]]:
    chosen = plan(
        graph, Cluster.local(devices), global_batch=8 * devices, pin={**pin, "micro_batches": 4}
    )
    return chosen, trace_events(chosen, simulate_plan(graph, chosen).timeline)


def spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_events_have_the_format(graph: Graph, pin: dict[str, Any]) -> None:
    chosen, trace = made(graph, pin)
    names = {e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == set(range(chosen.mesh.size))
    for event in spans(trace):
        assert event.keys() - {"args"} == COMPLETE
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert (event["pid"], event["tid"]) in threads
    last = max(event["ts"] + event["dur"] for event in spans(trace))
    assert last == pytest.approx(trace["otherData"]["simulated_step_s"] * 1e6)
    json.dumps(trace)


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_streams_are_in_order_and_hold_one_thing_at_a_time(
    graph: Graph, pin: dict[str, Any]
) -> None:
    _, trace = made(graph, pin)
    for one, other in pairwise(spans(trace)):
        if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_every_action_of_the_plan_is_there(graph: Graph, pin: dict[str, Any]) -> None:
    chosen, trace = made(graph, pin)
    per_rank = chosen.mesh.data * chosen.mesh.tensor
    words = {"forward": "F", "backward": "B", "backward of inputs": "I", "backward of weights": "W"}
    found = Counter(
        (e["pid"], f"{e['args']['stage']}{words[e['args']['what']]}{e['args']['micro_batch']}")
        for e in spans(trace) if "args" in e
    )  # fmt: skip
    wanted = Counter(
        (rank * per_rank + replica, str(action))
        for rank, actions in enumerate(chosen.order) for action in actions
        for replica in range(per_rank)
    )  # fmt: skip
    assert found == wanted


def test_of_many_ranks_one_replica_is_written(graph: Graph) -> None:
    devices = 2 * MOST_RANKS
    chosen, trace = made(graph, {"pipeline": 2, "data": MOST_RANKS, "tensor": 1}, devices)
    assert {event["pid"] for event in spans(trace)} == {0, MOST_RANKS}
    assert f"0 of {MOST_RANKS} replicas" in trace["otherData"]["ranks"]
    assert chosen.mesh.size == devices


def test_a_file_is_written(graph: Graph, tmp_path: Path) -> None:
    chosen = plan(graph, Cluster.local(2), global_batch=8, pin={"pipeline": 2})
    simulated = simulate_plan(graph, chosen)
    write_trace(tmp_path / "out.json", chosen, simulated.timeline)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["otherData"]["plan"] == chosen.hash
