"""How long a pipelined step takes, and how many micro-batches a stage holds at once.

Input: seconds of each stage's forward and backward per micro-batch, the number of micro-batches,
the schedule. Output: seconds. GPipe runs all forwards, then all backwards; 1F1B starts a
backward as soon as it can, so stage s of P holds at most P - s micro-batches.
"""

from collections.abc import Sequence

SCHEDULES = ("gpipe", "1f1b")
StageTime = tuple[float, float]  # seconds of one micro-batch's forward and backward on a stage


def in_flight(stage: int, stages: int, micro_batches: int, schedule: str) -> int:
    """How many micro-batches' saved tensors a stage holds at its peak.

    >>> [in_flight(stage, 4, 8, "1f1b") for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(micro_batches, stages - stage) if schedule == "1f1b" else micro_batches


def slowest_s(times: Sequence[StageTime], schedule: str) -> float:
    """Seconds that every further micro-batch adds to a step.

    GPipe's two phases each go at the pace of their slowest stage; 1F1B has one phase.
    """
    if schedule == "gpipe":
        return max(forward for forward, _ in times) + max(backward for _, backward in times)
    return max(forward + backward for forward, backward in times)


def pipeline_step_s(times: Sequence[StageTime], micro_batches: int, schedule: str) -> float:
    """(M - 1) slowest + sum over stages of (forward + backward): seconds from first to last.

    GPipe: exact, as two flow shops of identical jobs (also when its stages differ). 1F1B: exact
    for equal stages (Narayanan et al., SC 2021, section 2.2) and an upper bound whenever the
    stages differ only by a factor; where forward and backward are unbalanced in opposite ways
    the true time can be some percent longer.
    """
    fill_s = sum(forward + backward for forward, backward in times)
    return (micro_batches - 1) * slowest_s(times, schedule) + fill_s


def bubble_s(times: Sequence[StageTime], micro_batches: int, schedule: str) -> float:
    """Seconds in which the busiest stage waits."""
    busy_s = micro_batches * max(forward + backward for forward, backward in times)
    return pipeline_step_s(times, micro_batches, schedule) - busy_s
