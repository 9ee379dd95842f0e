"""How long a pipelined step takes, and how many micro-batches a stage holds at once.

Input: seconds of each stage's forward and backward per micro-batch, the number of micro-batches,
the schedule. Output: seconds. GPipe runs all forwards, then all backwards; 1F1B starts a
backward as soon as it can, so stage s of P holds at most P - s micro-batches. With v virtual
stages, each rank runs v pieces of the model in turn: a v-th of the fill, for more that is held.
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


def held_batches(
    stage: int, stages: int, micro_batches: int, schedule: str, virtual_stages: int = 1
) -> float:
    """As `in_flight`, in whole micro-batches, with virtual stages.

    Interleaved 1F1B holds 2 (P - s - 1) + (v - 1) P + 1 pieces (Megatron-LM,
    core/pipeline_parallel/schedules.py).
    """
    if virtual_stages == 1 or stages == 1 or schedule != "1f1b":
        return float(in_flight(stage, stages, micro_batches, schedule))
    pieces = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages + 1
    return min(float(micro_batches), pieces / virtual_stages)


def slowest_s(times: Sequence[StageTime], schedule: str) -> float:
    """Seconds that every further micro-batch adds to a step.

    GPipe's two phases each go at the pace of their slowest stage; 1F1B has one phase.
    """
    if schedule == "gpipe":
        return max(forward for forward, _ in times) + max(backward for _, backward in times)
    return max(forward + backward for forward, backward in times)


def pipeline_step_s(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1
) -> float:
    """(M - 1) slowest + sum over stages of (forward + backward): seconds from first to last.

    With v virtual stages the fill, that is the sum less the slowest, takes a v-th of it.

    GPipe: exact, as two flow shops of identical jobs (also when its stages differ). 1F1B: exact
    for equal stages (Narayanan et al., SC 2021, section 2.2) and an upper bound whenever the
    stages differ only by a factor; where forward and backward are unbalanced in opposite ways
    the true time can be some percent longer.
    """
    fill_s = sum(forward + backward for forward, backward in times)
    pace_s = slowest_s(times, schedule)
    if virtual_stages > 1:
        return micro_batches * pace_s + max(0.0, fill_s - pace_s) / virtual_stages
    return (micro_batches - 1) * pace_s + fill_s


def shared_step_s(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1,
    core_sharing: float = 1.0,
) -> float:  # fmt: skip
    """`pipeline_step_s` where ranks that wait leave their cores to those that compute.

    `times` are of stages that all compute; alone a stage is `core_sharing` times as fast. The step
    takes as long as its longest way at that speed, and no less than all work on all cores:
    max(pipeline_step_s / sharing, M mean(forward + backward)).
    """
    step_s = pipeline_step_s(times, micro_batches, schedule, virtual_stages)
    if core_sharing == 1.0:
        return step_s
    mean_s = sum(forward + backward for forward, backward in times) / len(times)
    return max(step_s / core_sharing, micro_batches * mean_s)


def bubble_s(
    times: Sequence[StageTime], micro_batches: int, schedule: str, virtual_stages: int = 1
) -> float:
    """Seconds in which the busiest stage waits."""
    busy_s = micro_batches * max(forward + backward for forward, backward in times)
    return pipeline_step_s(times, micro_batches, schedule, virtual_stages) - busy_s
