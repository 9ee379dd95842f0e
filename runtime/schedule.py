"""A rank's part of a step as a static list of instructions.

Input: the order of computations, which the layout carries (`2F5`: stage 2, forward, micro-batch 5),
and the transfers between stages. Output: what a rank does, in order: each computation takes what it
needs before and sends what it made after. Every stage runs its micro-batches in order.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from runtime.errors import LayoutError

COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")


class Message(NamedTuple):
    """A value of a micro-batch on its way from stage `source` to stage `target`.

    `is_gradient`: the gradient of a value that went the other way.
    """

    value: str
    source: int
    target: int
    micro: int
    is_gradient: bool


@dataclass(frozen=True, slots=True)
class Receive:
    """Take a value that another stage's forward made, or the gradient of one that was sent."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Hand on a value that the forward made, or the gradient of one that was received."""

    message: Message


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's forward."""

    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward, which adds to the gradient accumulators."""

    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Run the half of a stage's backward that gives the gradients of what it received."""

    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Run the other half, which adds to the gradient accumulators."""

    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Synchronise the gradients, the loss and the buffer updates over the mesh."""


@dataclass(frozen=True, slots=True)
class Step:
    """Clip, run the optimizer and write the buffers."""


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Instruction: TypeAlias = Receive | Send | Compute | Reduce | Step
Order: TypeAlias = tuple[tuple[Compute, ...], ...]
KINDS: dict[str, type[Compute]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}


@dataclass(frozen=True, slots=True)
class Link:
    """A value that stage `source` sends to stage `target` in each micro-batch."""

    value: str
    source: int
    target: int
    gradient: bool


def read_order(rows: Sequence[str], *, stages: int, micro_batches: int) -> Order:
    """The computations of each pipeline rank, from words such as 2F5.

    `LayoutError` if a word makes no sense, or a stage does not run every micro-batch once, in
    order, on one rank.
    """
    order = tuple(tuple(_compute(word) for word in row.split()) for row in rows)
    homes: dict[int, int] = {}
    for rank, actions in enumerate(order):
        for stage in {action.stage for action in actions}:
            if stage >= stages or homes.setdefault(stage, rank) != rank:
                raise LayoutError(f"layout.json: rank {rank} can't run stage {stage} too.")
    for stage in range(stages):
        mine = [a for a in order[homes[stage]] if a.stage == stage] if stage in homes else []
        _check_stage(stage, mine, micro_batches)
    return order


def _compute(word: str) -> Compute:
    match = COMPUTE.fullmatch(word)
    if match is None:
        raise LayoutError(f'layout.json: the order holds "{word}", which is not like 2F5.')
    return KINDS[match[2]](int(match[1]), int(match[3]))


def _check_stage(stage: int, actions: Sequence[Compute], micro_batches: int) -> None:
    """A stage runs forwards, and backwards or both halves of them, each after what it needs."""
    rows: dict[type[Compute], list[int]] = {kind: [] for kind in KINDS.values()}
    for action in actions:
        rows[type(action)].append(action.micro)
        chain = [len(rows[Forward]), len(rows[BackwardInput]), len(rows[BackwardWeight])]
        if len(rows[Backward]) > chain[0] or sorted(chain, reverse=True) != chain:
            raise LayoutError(f"layout.json: stage {stage} runs {action} before what it needs.")
    every: list[int] = list(range(micro_batches))
    if list(rows.values()) not in ([every, every, [], []], [every, [], every, every]):
        raise LayoutError(
            f"layout.json: stage {stage} must run each of {micro_batches} micro-batches forward "
            "and backward once, in order; emit the program again."
        )


def homes(order: Order) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    found = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return tuple(found[stage] for stage in sorted(found))


def instructions(actions: Sequence[Compute], links: Sequence[Link]) -> tuple[Instruction, ...]:
    """Everything that one rank does in a step."""
    return (*_steps(actions, links), Reduce(), Step())


def _steps(actions: Sequence[Compute], links: Sequence[Link]) -> Iterator[Instruction]:
    for action in actions:
        stage, micro = action.stage, action.micro
        coming = [link for link in links if link.target == stage]
        going = [link for link in links if link.source == stage]
        match action:
            case Forward():
                yield from (Receive(_there(link, micro)) for link in coming)
                yield action
                yield from (Send(_there(link, micro)) for link in going)
            case Backward() | BackwardInput():
                yield from (Receive(_back(link, micro)) for link in going if link.gradient)
                yield action
                yield from (Send(_back(link, micro)) for link in coming if link.gradient)
            case BackwardWeight():
                yield action


def _there(link: Link, micro: int) -> Message:
    return Message(link.value, link.source, link.target, micro, False)


def _back(link: Link, micro: int) -> Message:
    return Message(link.value, link.target, link.source, micro, True)
