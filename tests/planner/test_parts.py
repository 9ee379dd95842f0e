"""The parts of a prediction add up to its step, and its timeline ends with it, wherever shown."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from small_models import chain

from ir.calibration import Calibration, Collective, Kernel, Product, Timings
from ir.cluster import Cluster
from ir.curves import Curve, Grid
from ir.graph import Graph
from ir.plan import Plan
from ir.predicted import Prediction
from ir.quantities import duration
from planner import plan
from planner.alternatives import PARTS, compare
from planner.explanation import Explanation
from planner.timeline import simulate_plan
from planner.trace_file import trace_events

SIDES = (16.0, 256.0)
GRID = Grid(SIDES, tuple(1e-5 + m * n * k * 1e-10 for m, n, k in product(SIDES, repeat=3)))
KERNELS = ("elementwise", "exp", "reduce", "copy", "view", "adamw")
CURVE = Curve((1024.0, 2**20), (3e-6, 4e-4))


def machine(cores: int) -> Cluster:
    """Four processes on so many cores."""
    timings = Timings(
        4, 1, tuple(Kernel(name, CURVE) for name in KERNELS), (Product("float32", 1, GRID),)
    )
    moved = tuple(
        Collective(op, 4, members, members, Curve((64.0, 2**20), (1e-4, 1e-3)))
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send") for members in (2, 4)
    )  # fmt: skip
    return replace(
        Cluster.local(4, memory_GiB=4), calibration=Calibration(cores, (timings,), moved)
    )


CLUSTERS = {
    "rates": Cluster.local(4), "by shape": Cluster.parse("1x4xH100-SXM"),
    "measured": machine(8), "three cores": machine(3), "two cores": machine(2),
    "one core": machine(1),
}  # fmt: skip
PINS: list[dict[str, Any]] = [
    {"pipeline": 1, "data": 2, "tensor": 2}, {"pipeline": 1, "data": 4, "tensor": 1, "zero": 3},
    *(
        {"schedule": schedule, "pipeline": pipeline, "data": 4 // pipeline, "tensor": 1}
        for schedule in ("gpipe", "1f1b", "zero-bubble") for pipeline in (2, 4)
    ),
    {"schedule": "1f1b", "pipeline": 2, "data": 1, "tensor": 2},
    {"schedule": "interleaved", "pipeline": 4, "virtual_stages": 2},
    {"schedule": "interleaved", "pipeline": 2, "virtual_stages": 4, "tensor": 1, "data": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain(16, width=256, hidden=1024, seq=64)


def parts_s(prediction: Prediction) -> list[float]:
    return [getattr(prediction, f"{part}_s") for part in PARTS]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("pin", PINS, ids=str)
def test_the_parts_are_the_step_and_the_timeline_ends_with_it(
    graph: Graph, name: str, pin: dict[str, Any]
) -> None:
    """The timeline within the 2 % that simulated sends may differ by."""
    made = plan(graph, CLUSTERS[name], global_batch=32, pin=pin | {"micro_batches": 8})
    step_s, found_s = made.prediction.step_s, parts_s(made.prediction)
    assert sum(found_s) == pytest.approx(step_s, rel=1e-9)
    assert min(found_s) >= -1e-9 * step_s
    trace = trace_events(made, simulate_plan(graph, made).timeline)
    last_us = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert last_us / 1e6 == pytest.approx(step_s, rel=0.02)


@pytest.fixture(scope="module")
def shared(graph: Graph) -> tuple[Plan, Plan]:
    """Of four ranks on two cores: with one stage each, and with four ranks to none."""
    return (
        plan(graph, CLUSTERS["two cores"], global_batch=32, pin={"pipeline": 4}),
        plan(graph, CLUSTERS["two cores"], global_batch=32, pin={"pipeline": 1}),
    )


def test_ranks_on_few_cores_say_so(shared: tuple[Plan, Plan]) -> None:
    """In the plan's notes, and in the trace by how much faster they are than all at once."""
    waiting, busy = shared
    assert waiting.approximations[1].startswith("4 ranks share 2 cores: compute and communication")
    assert not any("share" in note for note in busy.approximations)


def test_a_step_on_shared_cores_is_drawn_at_its_mean_speed(
    graph: Graph, shared: tuple[Plan, Plan]
) -> None:
    """Spans are shorter than the stages that all compute at once, by the speed in the file."""
    waiting, busy = shared
    found = simulate_plan(graph, waiting)
    about = trace_events(waiting, found.timeline)["otherData"]
    speed = about["speed_on_shared_cores"]
    assert 1 < speed <= 2
    stage = found.pipeline.stages[0]
    first = next(span for span in found.timeline.spans if span.rank == 0 and span.action)
    assert first.end_s - first.start_s == pytest.approx(stage.forward_s / speed)
    assert simulate_plan(graph, busy).timeline.speed == 1.0


def test_an_explanation_adds_up(shared: tuple[Plan, Plan]) -> None:
    """The line of the step, and what an alternative differs by."""
    first, other = shared
    told = str(Explanation(first, 60.0))
    line = next(line for line in told.splitlines() if line.startswith("step  "))
    assert sum(map(float, re.findall(r"([\d.]+)%", line))) == pytest.approx(100, abs=0.21)
    parts = [float(part) for part in re.findall(r"(-?[\d.]+)%", line)]
    assert parts == [round(100 * s / first.prediction.step_s, 1) for s in parts_s(first.prediction)]
    difference = compare(first, other)
    assert sum(s for _, s in difference.parts) == pytest.approx(difference.total_s)


def test_a_plan_file_and_its_header_hold_the_parts(shared: tuple[Plan, Plan]) -> None:
    plan_, _ = shared
    saved = plan_.to_json()["prediction"]
    assert sum(saved[f"{part}_s"] for part in PARTS) == pytest.approx(saved["step_s"], rel=1e-9)
    words = ("compute", "exposed communication", "bubble", "optimizer")
    wanted = "   ".join(
        f"{word} {duration(s)}" for word, s in zip(words, parts_s(plan_.prediction), strict=True)
    )
    assert f"time  {wanted}" in plan_.text.splitlines()
