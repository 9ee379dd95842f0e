"""Pipeline schedules: what every pipeline rank computes in a step, in order.

Input: a schedule's name, the pipeline ranks, their stages and the micro-batches. Output: a list of
`Action`s per rank. It is the only definition: the planner counts and simulates these lists, and
emitted programs carry them. Stage s lies on rank s mod P, so rank r has stages r, r + P, ...

gpipe        all forwards, then all backwards.
1f1b         P - 1 - r forwards, then one forward and one backward in turn (PipeDream-Flush).
interleaved  1F1B over v stages per rank, in rounds of P micro-batches; 2 (P - 1 - r) + (v - 1) P
             forwards first (Narayanan et al., SC 2021). Rounds may be longer than P, as in torch,
             so that M need only be a multiple of M // P.
zero-bubble  1F1B whose backward is two: the half that gives the input's gradient, which the stage
             before waits for, and r micro-batches later the half that gives the weights' (ZB-H1 of
             Qi et al., ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ir.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"


class Action(NamedTuple):
    """One computation of a stage on a micro-batch.

    `kind` is one of the four letters above.

    >>> str(Action(2, FORWARD, 5))
    '2F5'
    """

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


def splits_backward(schedule: str) -> bool:
    """Whether a schedule runs the two halves of a backward apart."""
    return schedule == "zero-bubble"


def check_schedule(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> None:
    """Raises `UsageError`, with what would do, for sizes that a schedule has no order for."""
    if schedule not in SCHEDULES:
        raise UsageError(f'unknown schedule "{schedule}"; there are {", ".join(SCHEDULES)}.')
    if schedule != "interleaved":
        if virtual_stages != 1:
            raise UsageError(
                f"virtual_stages={virtual_stages} with schedule {schedule}, which has one stage "
                "per pipeline rank. Use schedule=interleaved, or virtual_stages=1."
            )
        return
    if ranks < 2 or virtual_stages < 2:
        raise UsageError(
            f"schedule interleaved with pipeline={ranks} and virtual_stages={virtual_stages}: it "
            "takes at least two of each. Use schedule=1f1b."
        )
    if not fits_rounds(ranks, micro_batches):
        raise UsageError(
            f"schedule interleaved runs rounds of at least pipeline={ranks} micro-batches, all "
            f"equal, and {micro_batches} can't be divided so. Use "
            f"micro_batches={_nearest_rounds(ranks, micro_batches)}."
        )


def fits_rounds(ranks: int, micro_batches: int) -> bool:
    """Whether the interleaved schedule has equal rounds of at least one micro-batch per rank."""
    return micro_batches >= ranks and micro_batches % (micro_batches // ranks) == 0


def _nearest_rounds(ranks: int, micro_batches: int) -> str:
    below = [m for m in range(ranks, micro_batches) if fits_rounds(ranks, m)]
    above = next(m for m in range(micro_batches + 1, micro_batches + ranks + 1) if m % ranks == 0)
    return " or ".join(map(str, [*below[-1:], above]))


@lru_cache(maxsize=64)
def schedule_order(
    schedule: str, *, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions; `UsageError` as of `check_schedule`.

    >>> for actions in schedule_order("1f1b", ranks=2, micro_batches=2):
    ...     print(*actions)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    check_schedule(schedule, ranks, micro_batches, virtual_stages)
    return tuple(
        tuple(_rank_order(schedule, rank, ranks, micro_batches, virtual_stages))
        for rank in range(ranks)
    )


def _rank_order(
    schedule: str, rank: int, ranks: int, micro_batches: int, virtual: int
) -> Iterator[Action]:
    """`warmup` forwards; then forward, backward and an earlier weight half in turn; the rest."""
    stages = [rank + ranks * piece for piece in range(virtual)]
    size = micro_batches // max(1, micro_batches // ranks)
    forward = list(_in_rounds(stages, micro_batches, size))
    backward = list(_in_rounds(stages[::-1], micro_batches, size))
    after = ranks - 1 - rank
    warmup = {
        "gpipe": len(forward), "1f1b": after, "zero-bubble": after,
        "interleaved": (virtual - 1) * size + 2 * after,
    }[schedule]  # fmt: skip
    split = splits_backward(schedule)
    yield from (Action(stage, FORWARD, micro) for stage, micro in forward[:warmup])
    for done, (stage, micro) in enumerate(backward):
        for later, number in forward[warmup + done : warmup + done + 1]:
            yield Action(later, FORWARD, number)
        yield Action(stage, BACKWARD_INPUT if split else BACKWARD, micro)
        if split and done >= rank:
            earlier, number = backward[done - rank]
            yield Action(earlier, BACKWARD_WEIGHT, number)
    if split:
        left = backward[max(0, len(backward) - rank) :]
        yield from (Action(stage, BACKWARD_WEIGHT, micro) for stage, micro in left)


def _in_rounds(stages: list[int], micro_batches: int, size: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch): rounds of `size` micro-batches through one stage after the other.

    With one stage the rounds make no difference.
    """
    if len(stages) == 1:
        size = micro_batches
    for start in range(0, micro_batches, size):
        for stage in stages:
            yield from ((stage, micro) for micro in range(start, start + size))


class Held(NamedTuple):
    """Micro-batches of which a stage holds something: for its backward, or only for the weights."""

    forward: int
    weight: int


def held_over_time(actions: Sequence[Action], stages: Sequence[int]) -> np.ndarray:
    """[actions, stages, 2]: the `Held` of each of a rank's `stages` after each of its actions."""
    index = {stage: place for place, stage in enumerate(stages)}
    change = {FORWARD: (1, 0), BACKWARD: (-1, 0), BACKWARD_INPUT: (-1, 1), BACKWARD_WEIGHT: (0, -1)}
    places = [index[action.stage] for action in actions]
    changes = np.zeros((len(actions), len(stages), 2), dtype=np.int64)
    changes[range(len(actions)), places] = [change[action.kind] for action in actions]
    return changes.cumsum(axis=0)


__all__ = [
    "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FORWARD", "SCHEDULES", "Action", "Held",
    "check_schedule", "fits_rounds", "held_over_time", "schedule_order", "splits_backward",
]  # fmt: skip
