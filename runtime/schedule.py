"""Pipeline schedules as static lists of instructions, one list per stage.

Input: the schedule's name, the stage, the number of micro-batches and the transfers between stages.
Output: what the stage does, in order. Both schedules run forwards and backwards each in micro-batch
order, so the tensors of one channel leave and arrive in one order and never need a tag.

gpipe  all forwards, then all backwards; up to M micro-batches in flight.
1f1b   min(M, P - 1 - s) forwards, then one forward and one backward in turn, then the remaining
       backwards; at most min(M, P - s) in flight (Narayanan et al., PipeDream-Flush, 2021).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Receive:
    """Take a value of a micro-batch from another stage."""

    micro: int
    value: str
    peer: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage's forward."""

    micro: int


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a value that the forward made to another stage."""

    micro: int
    value: str
    peer: int


@dataclass(frozen=True, slots=True)
class ReceiveGradient:
    """Take the gradient of a sent value from the stage that it was sent to."""

    micro: int
    value: str
    peer: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the stage's backward, which adds to the gradient accumulators."""

    micro: int


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Hand the gradient of a received value to the stage that it came from."""

    micro: int
    value: str
    peer: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Synchronise the gradients, the loss and the buffer updates over the mesh."""


@dataclass(frozen=True, slots=True)
class Step:
    """Clip, run the optimizer and write the buffers."""


Instruction: TypeAlias = (
    Receive | Forward | Send | ReceiveGradient | Backward | SendGradient | Reduce | Step
)


@dataclass(frozen=True, slots=True)
class Link:
    """A value that stage `source` sends to stage `target` in each micro-batch."""

    value: str
    source: int
    target: int
    gradient: bool


def order(
    schedule: str, stage: int, *, stages: int, micro_batches: int
) -> Iterator[Forward | Backward]:
    """The forwards and backwards of one stage."""
    match schedule:
        case "gpipe":
            warmup = micro_batches
        case "1f1b":
            warmup = min(micro_batches, stages - 1 - stage)
        case _:
            raise UsageError(f'unknown schedule "{schedule}"; there are "gpipe" and "1f1b".')
    yield from map(Forward, range(warmup))
    for micro in range(warmup, micro_batches):
        yield Forward(micro)
        yield Backward(micro - warmup)
    yield from map(Backward, range(micro_batches - warmup, micro_batches))


def instructions(
    schedule: str, stage: int, *, stages: int, micro_batches: int, links: Sequence[Link]
) -> tuple[Instruction, ...]:
    """Everything that one stage does in a step."""
    steps: list[Instruction] = []
    coming = [link for link in links if link.target == stage]
    going = [link for link in links if link.source == stage]
    for action in order(schedule, stage, stages=stages, micro_batches=micro_batches):
        match action:
            case Forward(micro):
                steps += [Receive(micro, k.value, k.source) for k in coming]
                steps.append(action)
                steps += [Send(micro, k.value, k.target) for k in going]
            case Backward(micro):
                steps += [ReceiveGradient(micro, k.value, k.target) for k in going if k.gradient]
                steps.append(action)
                steps += [SendGradient(micro, k.value, k.source) for k in coming if k.gradient]
    return (*steps, Reduce(), Step())
