"""Schedules as lists of actions: torch's order, what is held, that they end, what is refused."""

from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from ir.errors import UsageError
from ir.schedules import Action, check_schedule, fits_rounds, held_over_time, schedule_order

TORCH = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}  # fmt: skip
SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 5, 8, 13)]
INTERLEAVED = [
    (p, v, m) for p in (2, 3, 4, 8) for v in (2, 3, 4) for m in range(p, 4 * p + 1)
    if fits_rounds(p, m)
]  # fmt: skip


def ours(schedule: str, ranks: int, micro: int, virtual: int = 1) -> list[list[str]]:
    order = schedule_order(
        schedule, ranks=ranks, micro_batches=micro, virtual_stages=virtual
    )  # fmt: skip
    return [list(map(str, actions)) for actions in order]


def torchs(schedule: str, ranks: int, micro: int, virtual: int | None = None) -> list[list[str]]:
    rows = get_schedule_ops(TORCH[schedule], ranks, micro, virtual)
    computed = [[str(a) for a in row if a is not None] for row in rows]
    return [[word for word in row if "REDUCE" not in word] for row in computed]


@pytest.mark.parametrize(("ranks", "micro"), [(p, m) for p, m in SIZES if m >= p])
def test_gpipe_and_1f1b_are_torchs(ranks: int, micro: int) -> None:
    assert ours("gpipe", ranks, micro) == torchs("gpipe", ranks, micro)
    wanted = torchs("1f1b", ranks, micro)
    forwards = [int(word.split("F")[1]) for word in wanted[-1] if "F" in word]
    assert forwards == list(range(1, micro + 1))  # torch numbers the last rank's from 1
    last = [f"{ranks - 1}F{int(w.split('F')[1]) - 1}" if "F" in w else w for w in wanted[-1]]
    assert ours("1f1b", ranks, micro) == [*wanted[:-1], last]


@pytest.mark.parametrize(("ranks", "virtual", "micro"), INTERLEAVED)
def test_interleaved_is_torchs(ranks: int, virtual: int, micro: int) -> None:
    assert ours("interleaved", ranks, micro, virtual) == torchs(
        "interleaved", ranks, micro, virtual
    )


@pytest.mark.parametrize(
    ("ranks", "micro"), [(p, m) for p in (1, 2, 3, 4, 7) for m in range(1, 17) if fits_rounds(p, m)]
)
def test_zero_bubble_is_torchs_with_one_stage_per_rank(ranks: int, micro: int) -> None:
    """Which `get_schedule_ops` asks for two of; the class itself takes one."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks, None
    made = schedules.ScheduleInterleavedZeroBubble([stage], micro)
    wanted = [[str(a) for a in made.pipeline_order[r] if a is not None] for r in range(ranks)]
    assert ours("zero-bubble", ranks, micro) == wanted


EVERY = [
    *((name, p, 1, m) for name in ("gpipe", "1f1b", "zero-bubble") for p, m in SIZES),
    *(("interleaved", *sizes) for sizes in INTERLEAVED),
]


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "micro"), EVERY)
def test_each_stage_runs_each_micro_batch_once_in_order_on_its_rank(
    schedule: str, ranks: int, virtual: int, micro: int
) -> None:
    order = schedule_order(schedule, ranks=ranks, micro_batches=micro, virtual_stages=virtual)
    kinds = "FIW" if schedule == "zero-bubble" else "FB"
    for rank, actions in enumerate(order):
        for stage in range(rank, ranks * virtual, ranks):
            for kind in kinds:
                found = [a.micro for a in actions if (a.stage, a.kind) == (stage, kind)]
                assert found == list(range(micro))
        assert len(actions) == virtual * micro * len(kinds)


def most_held(schedule: str, rank: int, ranks: int, micro: int, virtual: int = 1) -> int:
    """Most pieces that a rank holds something of."""
    order = schedule_order(schedule, ranks=ranks, micro_batches=micro, virtual_stages=virtual)
    stages = tuple(range(rank, ranks * virtual, ranks))
    return int(held_over_time(order[rank], stages).sum(axis=(1, 2)).max())


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_what_is_held_is_what_the_papers_say(ranks: int, micro: int) -> None:
    for rank in range(ranks):
        assert most_held("gpipe", rank, ranks, micro) == micro
        assert most_held("1f1b", rank, ranks, micro) == min(micro, ranks - rank)
        assert most_held("zero-bubble", rank, ranks, micro) == min(micro, ranks)


@pytest.mark.parametrize(("ranks", "virtual", "micro"), INTERLEAVED)
def test_interleaved_holds_what_megatron_does(ranks: int, virtual: int, micro: int) -> None:
    """2 (P - 1 - r) + (v - 1) P + 1 pieces, where rounds are as long as there are ranks."""
    if micro % ranks:
        return
    for rank in range(ranks):
        pieces = 2 * (ranks - 1 - rank) + (virtual - 1) * ranks + 1
        held = most_held("interleaved", rank, ranks, micro, virtual)
        assert held == min(pieces, micro * virtual)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2), 'unknown schedule "zigzag"; there are gpipe, 1f1b'),
        (("1f1b", 2, 2, 2), "virtual_stages=2 with schedule 1f1b, which has one stage"),
        (("zero-bubble", 2, 2, 2), "virtual_stages=2 with schedule zero-bubble"),
        (("interleaved", 2, 2, 1), "at least two of each"),
        (("interleaved", 1, 2, 2), "at least two of each"),
        (("interleaved", 4, 11, 2), "pipeline=4 micro-batches.*Use micro_batches=10 or 12"),
        (("interleaved", 4, 2, 2), "Use micro_batches=4"),
    ],
)
def test_sizes_without_an_order_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_schedule(*arguments)


def test_actions_print_as_torchs() -> None:
    assert str(Action(2, "F", 5)) == "2F5"
