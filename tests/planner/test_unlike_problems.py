"""Stage problems whose stages lie on different devices: optimal against enumeration."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_stages import brute_force, random_problem, refused_of, split_problem

from planner.stage_cuts import (
    Array,
    best_cuts,
    least_split_s,
    relaxed_seconds,
    sums,
    tail_seconds,
)
from planner.stage_problem import Point, Run, StageProblem, price
from planner.stage_program import solve_program
from planner.stages import plan_stages


def on_devices(problem: StageProblem, seed: int) -> StageProblem:
    """The problem with stages of two kinds, at random: one has a pace of its own for each run."""
    rng = random.Random(1000 + seed)
    other = tuple(_other_run(rng, run) for run in problem.runs)
    unlike = tuple(rng.choice([problem.runs, other]) for _ in range(problem.stages))
    return replace(problem, unlike=unlike)


def _other_run(rng: random.Random, run: Run) -> Run:
    points = tuple(_other_point(rng, point) for point in run.points)
    return replace(run, points=points, sync_s=rng.uniform(0, 1), optimizer_s=rng.uniform(0, 1))


def _other_point(rng: random.Random, point: Point) -> Point:
    pace = rng.uniform(0.3, 1.2)
    return replace(
        point, forward_s=point.forward_s * pace, backward_s=point.backward_s * pace,
        weight_s=point.weight_s * pace, transient_bytes=point.transient_bytes + rng.random(),
    )  # fmt: skip


PROBLEMS = [on_devices(random_problem(seed), seed) for seed in range(120)]


def test_plans_equal_enumeration() -> None:
    assert 10 <= refused_of(PROBLEMS) <= 60


def test_the_whole_program_equals_enumeration() -> None:
    for problem in PROBLEMS[:60]:
        if (best_s := brute_force(problem)) is not None:
            assignment, bound_s = solve_program(problem, 0.0, 60.0)
            assert price(problem, assignment).step_s == pytest.approx(best_s, rel=1e-5)
            assert bound_s <= best_s * (1 + 1e-5)


def test_relaxed_cuts_are_no_slower_than_any_plan() -> None:
    for problem in PROBLEMS:
        if (best_s := brute_force(problem)) is not None:
            seconds = relaxed_seconds(problem)
            cuts = best_cuts(seconds, tail_seconds(problem), problem.micro_batches)
            assert cuts is not None and cuts.cost_s <= best_s * (1 + 1e-9)


def test_split_stages_are_near_the_best_and_their_bound_holds() -> None:
    for seed in range(40):
        problem = on_devices(split_problem(seed), seed)
        if (best_s := brute_force(problem)) is not None:
            found = plan_stages(problem, gap=0.0)
            assert found.bound_s <= best_s * (1 + 1e-9)
            assert best_s * (1 - 1e-9) <= found.step_s <= best_s * 1.1


def test_split_steps_are_no_shorter_than_their_bound() -> None:
    """With halves of any sizes; most bounds are near."""
    near = 0
    for seed in range(80):
        problem = on_devices(split_problem(seed), seed)
        if (best_s := brute_force(problem)) is None:
            continue
        prompt, forward = (
            np.stack([_least(problem, stage, part) for stage in range(problem.stages)])
            for part in (_prompt_s, _forward_s)
        )
        seconds = relaxed_seconds(problem)
        bound_s = least_split_s(seconds, prompt, forward, problem.micro_batches)
        assert bound_s <= best_s * (1 + 1e-9)
        near += bound_s > 0.8 * best_s
    assert near >= 30


def _least(problem: StageProblem, stage: int, part: Callable[[Point], float]) -> Array:
    """Of every stage of blocks the least seconds of a part of all points, and sends."""
    least = [min(map(part, run.points)) for run in problem.runs_at(stage)]
    share = 1.0 if part is _prompt_s else 0.5
    return sums(problem, least) + share * problem.exposed_send_s(stage)


def _prompt_s(point: Point) -> float:
    return point.forward_s + point.backward_s - point.weight_s


def _forward_s(point: Point) -> float:
    return point.forward_s


def test_equal_devices_are_as_if_there_were_one() -> None:
    for seed in range(30):
        problem = random_problem(seed)
        same = replace(problem, unlike=(problem.runs,) * problem.stages)
        if brute_force(problem) is not None:
            assert plan_stages(same, gap=0.0) == plan_stages(problem, gap=0.0)
            assert np.array_equal(relaxed_seconds(same), relaxed_seconds(problem))


def test_as_many_lists_of_runs_as_stages() -> None:
    problem = random_problem(0)
    with pytest.raises(ValueError, match="as many lists of runs"):
        replace(problem, unlike=(problem.runs,) * (problem.stages + 1))
