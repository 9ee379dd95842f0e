"""Schedules as instruction lists: torch's order, their invariants, and that they never lock up."""

from collections import Counter, deque

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from runtime.errors import UsageError
from runtime.schedule import (
    Backward,
    Forward,
    Link,
    Receive,
    ReceiveGradient,
    Reduce,
    Send,
    SendGradient,
    Step,
    instructions,
    order,
)

TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}
TORCH_ACTIONS = {Forward: "FORWARD", Backward: "FULL_BACKWARD"}
SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 5, 8, 13)]
SCHEDULES = ["gpipe", "1f1b"]


def skips(stages):
    """Neighbours, plus a value that jumps over stages and one without a gradient."""
    links = [Link("h", s, s + 1, True) for s in range(stages - 1)]
    links += [Link("skip", 0, t, True) for t in range(2, stages)]
    return tuple(links + [Link("mask", 0, t, False) for t in range(1, stages)])


def lists(schedule, stages, micro_batches):
    return [
        instructions(schedule, s, stages=stages, micro_batches=micro_batches, links=skips(stages))
        for s in range(stages)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(p, m) for p, m in SIZES if m >= p])
def test_the_order_is_torchs(schedule, stages, micro_batches):
    for stage, row in enumerate(get_schedule_ops(TORCH_NAMES[schedule], stages, micro_batches)):
        actions = [(a.computation_type.name, a.microbatch_index) for a in row if a is not None]
        wanted = [(name, micro) for name, micro in actions if name in TORCH_ACTIONS.values()]
        ours = order(schedule, stage, stages=stages, micro_batches=micro_batches)
        found = [(TORCH_ACTIONS[type(action)], action.micro) for action in ours]
        if schedule == "1f1b" and stage == stages - 1:  # torch numbers these forwards from 1
            found = [(name, micro + (name == "FORWARD")) for name, micro in found]
        assert found == wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_each_micro_batch_runs_once_forward_then_backward(schedule, stages, micro_batches):
    for stage, steps in enumerate(lists(schedule, stages, micro_batches)):
        forwards = [step.micro for step in steps if isinstance(step, Forward)]
        backwards = [step.micro for step in steps if isinstance(step, Backward)]
        assert forwards == backwards == list(range(micro_batches))
        assert steps[-2:] == (Reduce(), Step())
        in_flight = peak = 0
        for step in steps:
            in_flight += isinstance(step, Forward) - isinstance(step, Backward)
            assert in_flight >= 0
            peak = max(peak, in_flight)
        bound = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
        assert peak == bound


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_stage_gets_to_its_end(schedule, stages, micro_batches):
    """Runs the lists against channels; a receive takes the channel's oldest or waits."""
    waiting = [deque(steps) for steps in lists(schedule, stages, micro_batches)]
    channels = {}
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(waiting):
            while steps and advance(stage, steps[0], channels):
                steps.popleft()
                moved = True
    assert not any(waiting)
    assert not any(channels.values())


def advance(stage, step, channels):
    match step:
        case Send(micro, value, peer) | SendGradient(micro, value, peer):
            channels.setdefault((stage, peer), deque()).append((micro, value))
        case Receive(micro, value, peer) | ReceiveGradient(micro, value, peer):
            channel = channels.get((peer, stage))
            if not channel:
                return False
            assert channel.popleft() == (micro, value)
    return True


def test_a_stage_receives_before_it_runs_and_sends_after():
    steps = instructions("1f1b", 1, stages=3, micro_batches=1, links=skips(3))
    assert steps == (
        Receive(0, "h", 0),
        Receive(0, "mask", 0),
        Forward(0),
        Send(0, "h", 2),
        ReceiveGradient(0, "h", 2),
        Backward(0),
        SendGradient(0, "h", 0),
        Reduce(),
        Step(),
    )


def test_only_values_with_a_gradient_send_one_back():
    steps = lists("1f1b", 4, 3)[0]
    values = Counter(step.value for step in steps if isinstance(step, ReceiveGradient))
    assert values == {"h": 3, "skip": 6}


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UsageError, match='"gpipe" and "1f1b"'):
        list(order("zigzag", 0, stages=2, micro_batches=2))
