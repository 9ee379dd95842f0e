"""How long a pipelined step takes, and how many micro-batches a stage holds at once.

Input: seconds of each stage's forward and backward per micro-batch, the number of micro-batches,
the schedule. Output: seconds; what is held is counted in the schedule's own lists. With P ranks, M
micro-batches, and seconds F, B (of the input's half, where backward is split) and W of the weights'
half of one micro-batch on one rank, a step of equal stages takes

    gpipe, 1f1b   M (F + B) + (P - 1) (F + B)               Narayanan et al., SC 2021, section 2.2
    interleaved   M (F + B) + (P - 1) (F + B) / v           the same, v stages per rank; of stages
                  that differ the longest way through all actions (`planner.longest_way`)
    zero-bubble   M (F + B + W) + (P - 1) (F + B) - (min(M, P) - 1) min(B, W)
                  for M >= P and B >= W the (P - 1) (F + B - W) of ZB-H1, Qi et al., ICLR 2024
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ir.schedules import SCHEDULES, Held, held_over_time, schedule_order, splits_backward
from planner.longest_way import longest_way_s

__all__ = [
    "SCHEDULES", "Shape", "StageTime", "bubble_s", "held_batches", "held_pieces", "in_flight",
    "mean_speed", "moments", "pipeline_step_s", "rank_seconds", "settled_batches",
    "shared_step_s", "slowest_s",
]  # fmt: skip

StageTime = tuple[float, float]  # seconds of one micro-batch's forward and backward on a stage
Shape = tuple[int, str, int, Sequence[float], float]
"""Of a step: micro-batches, schedule, virtual stages, `weight_s`, `core_sharing`."""

SETTLED = 4
"""After so many rounds of P micro-batches a rank has held as much as it ever will."""


@lru_cache(maxsize=4096)
def _moments(
    schedule: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int
) -> tuple[tuple[Held, ...], ...]:
    order = schedule_order(
        schedule, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    stages = tuple(range(rank, ranks * virtual_stages, ranks))
    held = held_over_time(order[rank], stages)
    found = np.unique(held.reshape(len(held), -1), axis=0)
    is_below = (found[:, None] <= found[None]).all(axis=2)  # each of all others, and of itself
    worst = found[is_below.sum(axis=1) == 1].reshape(-1, len(stages), 2).tolist()
    return tuple(tuple(Held(*of_stage) for of_stage in moment) for moment in worst)


def moments(
    schedule: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[Held, ...], ...]:
    """What the stages of a rank hold at every moment at which no other one is worse.

    >>> moments("zero-bubble", 1, 3, 8)
    ((Held(forward=1, weight=1),), (Held(forward=2, weight=1),))
    """
    fewer = settled_batches(schedule, ranks, micro_batches)
    return _moments(schedule, rank, ranks, fewer, virtual_stages)


def settled_batches(schedule: str, ranks: int, micro_batches: int) -> int:
    """As many micro-batches as show all that a rank ever holds, where rounds repeat."""
    repeats = schedule in ("1f1b", "zero-bubble") or micro_batches % ranks == 0  # equal rounds
    if schedule == "gpipe" or not repeats:
        return micro_batches
    return min(micro_batches, SETTLED * ranks)


def held_pieces(
    schedule: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> int:
    """Of how many micro-batches, counted once per stage, a rank holds something at its peak."""
    found = moments(schedule, rank, ranks, micro_batches, virtual_stages)
    return max(sum(held.forward + held.weight for held in moment) for moment in found)


def in_flight(stage: int, stages: int, micro_batches: int, schedule: str) -> int:
    """How many micro-batches' saved tensors a stage holds at its peak, with one stage per rank.

    >>> [in_flight(stage, 4, 8, "1f1b") for stage in range(4)]
    [4, 3, 2, 1]
    """
    return held_pieces(schedule, stage, stages, micro_batches)


def held_batches(
    stage: int, stages: int, micro_batches: int, schedule: str, virtual_stages: int = 1
) -> float:
    """As `in_flight`, in whole micro-batches, where only the number of stages per rank is known.

    Interleaved 1F1B holds 2 (P - s - 1) + (v - 1) P + 1 pieces (Megatron-LM,
    core/pipeline_parallel/schedules.py).
    """
    if virtual_stages == 1 or stages == 1 or schedule != "1f1b":
        return float(in_flight(stage, stages, micro_batches, schedule))
    pieces = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages + 1
    return min(float(micro_batches), pieces / virtual_stages)


def slowest_s(times: Sequence[StageTime], schedule: str) -> float:
    """Seconds that every further micro-batch adds to a step.

    GPipe's two phases each go at the pace of their slowest stage; the others have one phase.
    """
    if schedule == "gpipe":
        return max(forward for forward, _ in times) + max(backward for _, backward in times)
    return max(forward + backward for forward, backward in times)


def pipeline_step_s(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1,
    weight_s: Sequence[float] = (),
) -> float:  # fmt: skip
    """(M - 1) slowest + sum over ranks of (forward + backward): seconds from first to last.

    `times` are of every stage. Interleaved: the longest way through all actions, exact. With any
    other schedule `times` are of ranks, and v virtual stages are those of a program whose stages
    are not known one by one: the fill, that is the sum less the slowest, takes a v-th of it.
    `weight_s`: the weights' half of each backward, where the schedule splits it: a rank fills its
    wait with it, and the step is the longest way, of all micro-batches on one rank and the fill of
    the others.

    GPipe: exact, as two flow shops of identical jobs (also when its stages differ). 1F1B and
    zero-bubble are exact for equal stages, and 1F1B's an upper bound whenever the stages differ
    only by a factor; where forward and backward are unbalanced in opposite ways the true time can
    be some percent longer.
    """
    if schedule == "interleaved":
        ranks = len(times) // virtual_stages
        way = longest_way_s(schedule, ranks, micro_batches, virtual_stages, np.array([times]))
        return float(way[0])
    sum_s = sum(forward + backward for forward, backward in times)
    pace_s = slowest_s(times, schedule)
    if splits_backward(schedule) and weight_s:
        rounds = fill_rounds(len(times), micro_batches)
        fills = [fill_s(*pair, rounds) for pair in zip(times, weight_s, strict=True)]
        pairs = zip(times, fills, strict=True)
        return max(micro_batches * (f + b) - fill for (f, b), fill in pairs) + sum(fills)
    if virtual_stages > 1:
        return micro_batches * pace_s + max(0.0, sum_s - pace_s) / virtual_stages
    return (micro_batches - 1) * pace_s + sum_s


def rank_seconds(
    times: Sequence[StageTime], schedule: str, virtual_stages: int
) -> list[float]:
    """Of a micro-batch on each rank, from `times` as of `pipeline_step_s`."""
    ranks = len(times) // (virtual_stages if schedule == "interleaved" else 1)
    return [sum(f + b for f, b in times[rank::ranks]) for rank in range(ranks)]


def shared_step_s(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1,
    weight_s: Sequence[float] = (), core_sharing: float = 1.0,
) -> float:  # fmt: skip
    """`pipeline_step_s` where ranks that wait leave their cores to those that compute.

    `times` are of stages that all compute; alone a stage is `core_sharing` times as fast. The step
    takes as long as its longest way at that speed, and no less than all work on all cores:
    max(pipeline_step_s / sharing, M mean(forward + backward)).
    """
    step_s = pipeline_step_s(times, micro_batches, schedule, virtual_stages, weight_s)
    if core_sharing == 1.0:
        return step_s
    ranks_s = rank_seconds(times, schedule, virtual_stages)
    return max(step_s / core_sharing, micro_batches * sum(ranks_s) / len(ranks_s))


def mean_speed(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1,
    weight_s: Sequence[float] = (), core_sharing: float = 1.0,
) -> float:  # fmt: skip
    """How many times as fast as when all compute ranks are, in the mean of a step: from 1, where
    none ever waits, to `core_sharing`, where the cores never have work for all."""
    shape = micro_batches, schedule, virtual_stages, weight_s
    shared_s = shared_step_s(times, *shape, core_sharing)
    return pipeline_step_s(times, *shape) / shared_s if shared_s else 1.0


def fill_rounds(ranks: int, micro_batches: int) -> float:
    """The part of a zero-bubble fill that has weights' halves to run."""
    return (min(micro_batches, ranks) - 1) / max(1, ranks - 1)


def fill_s(times: StageTime, weight_s: float, rounds: float) -> float:
    """What a rank adds to the fill of zero-bubble: not the weights' half, which no longer is in the
    way, and less of the rest where the wait is filled with it."""
    forward, backward = times
    return forward + backward - weight_s - rounds * min(backward - weight_s, weight_s)


def bubble_s(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1,
    weight_s: Sequence[float] = (), core_sharing: float = 1.0,
) -> float:  # fmt: skip
    """Seconds in which the busiest rank waits; where ranks share cores, in which these do."""
    shape = micro_batches, schedule, virtual_stages, weight_s
    seconds = rank_seconds(times, schedule, virtual_stages)
    if core_sharing == 1.0:
        return pipeline_step_s(times, *shape) - micro_batches * max(seconds)
    busy_s = micro_batches * (sum(seconds) / len(seconds))
    return shared_step_s(times, *shape, core_sharing) - busy_s
