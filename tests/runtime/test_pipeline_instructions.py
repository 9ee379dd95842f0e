"""Instruction lists: what a computation takes and sends, and that no rank locks up."""

from collections import Counter, deque

import pytest

from ir.schedules import fits_rounds, schedule_order
from runtime.schedule import (
    Backward,
    BackwardInput,
    Forward,
    Link,
    Message,
    Receive,
    Reduce,
    Send,
    Step,
    homes,
    instructions,
    read_order,
)

SIZES = [(p, 1, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 5, 8, 13)]
ROUNDS = [(p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in range(p, 10) if fits_rounds(p, m)]
EVERY = [(name, *sizes) for name in ("gpipe", "1f1b", "zero-bubble") for sizes in SIZES]
EVERY += [("interleaved", *sizes) for sizes in ROUNDS]


def skips(stages):
    """Neighbours, plus a value that jumps over stages and one without a gradient."""
    links = [Link("h", s, s + 1, True) for s in range(stages - 1)]
    links += [Link("skip", 0, t, True) for t in range(2, stages)]
    return tuple(links + [Link("mask", 0, t, False) for t in range(1, stages)])


def lists(schedule, ranks, virtual, micro_batches):
    """(the pipeline rank of each stage, every rank's instructions)."""
    rows = schedule_order(
        schedule, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual
    )
    words, stages = [" ".join(map(str, row)) for row in rows], ranks * virtual
    order = read_order(words, stages=stages, micro_batches=micro_batches)
    return homes(order), [instructions(actions, skips(stages)) for actions in order]


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "micro_batches"), EVERY)
def test_every_rank_gets_to_its_end(schedule, ranks, virtual, micro_batches):
    """Runs the lists; a message is there once it was sent, whatever else its channel carries."""
    _, steps = lists(schedule, ranks, virtual, micro_batches)
    waiting, sent = [deque(row) for row in steps], set()
    moved = True
    while moved:
        moved = False
        for row in waiting:
            while row and not (isinstance(row[0], Receive) and row[0].message not in sent):
                step = row.popleft()
                moved = True
                if isinstance(step, Send):
                    sent.add(step.message)
                elif isinstance(step, Receive):
                    sent.remove(step.message)
    assert not any(waiting)
    assert not sent


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "micro_batches"), EVERY)
def test_all_that_is_sent_is_taken(schedule, ranks, virtual, micro_batches):
    home, steps = lists(schedule, ranks, virtual, micro_batches)
    assert home == tuple(stage % ranks for stage in range(ranks * virtual))
    sent = Counter(s.message for row in steps for s in row if isinstance(s, Send))
    taken = Counter(s.message for row in steps for s in row if isinstance(s, Receive))
    assert sent == taken
    assert not sent or max(sent.values()) == 1


def test_a_stage_receives_before_it_runs_and_sends_after():
    _, rows = lists("1f1b", 3, 1, 1)
    assert rows[1] == (
        Receive(Message("h", 0, 1, 0, False)),
        Receive(Message("mask", 0, 1, 0, False)),
        Forward(1, 0),
        Send(Message("h", 1, 2, 0, False)),
        Receive(Message("h", 2, 1, 0, True)),
        Backward(1, 0),
        Send(Message("h", 1, 0, 0, True)),
        Reduce(),
        Step(),
    )


def test_a_split_backward_sends_the_inputs_gradient_before_the_weights_half():
    _, rows = lists("zero-bubble", 2, 1, 3)
    row = [step for step in rows[1] if not isinstance(step, Receive)]
    for place, step in enumerate(row):
        if isinstance(step, BackwardInput):
            assert row[place + 1] == Send(Message("h", 1, 0, step.micro, True))


def test_only_values_with_a_gradient_send_one_back():
    _, rows = lists("1f1b", 4, 1, 3)
    gradients = [s.message for s in rows[0] if isinstance(s, Receive) and s.message.is_gradient]
    assert Counter(message.value for message in gradients) == {"h": 3, "skip": 6}
