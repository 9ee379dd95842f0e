"""How long the actions of all ranks take, each after those that it waits for.

Input: a schedule's order, seconds of every stage's forward and backward. Output: seconds until the
last action ends: the longest way through the actions, each of which waits for the one before it on
its rank and for the same micro-batch's on the stage that it has its input from. Nothing else holds
an action up; what stages spend on sends is in their seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ir.schedules import BACKWARD, FORWARD, Action, schedule_order

_Order = tuple[tuple[Action, ...], ...]
_Seconds = NDArray[np.float64]
_Places = NDArray[np.int64]


def longest_way_s(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, seconds: _Seconds
) -> _Seconds:
    """[k]: of each of k settings. `seconds`: [k, stages, 2], forward and whole backward."""
    waves = _waves(schedule, ranks, micro_batches, virtual_stages)
    found: _Seconds = _ends(waves, seconds).max(axis=0)
    return found


def visits(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, seconds: _Seconds
) -> NDArray[np.int64]:
    """[stages, 2]: how often the longest way comes through every stage, forward and backward;
    `seconds` of one setting."""
    waves = _waves(schedule, ranks, micro_batches, virtual_stages)
    end = _ends(waves, seconds[None])[:, 0]
    found, at = np.zeros(seconds.size, dtype=np.int64), int(end.argmax())
    while at >= 0:
        found[waves.what[at]] += 1
        at = max(int(waves.same_rank[at]), int(waves.elsewhere[at]), key=lambda n: end[n])
    return found.reshape(seconds.shape)


def _ends(waves: _Waves, seconds: _Seconds) -> _Seconds:
    """[action, k]: when actions end; the last row is of no action, and 0."""
    each = seconds.reshape(len(seconds), -1).T
    end = np.zeros((len(waves.what) + 1, len(seconds)))
    for start, stop in waves.spans:
        before = np.maximum(end[waves.same_rank[start:stop]], end[waves.elsewhere[start:stop]])
        end[start:stop] = before + each[waves.what[start:stop]]
    return end


@dataclass(frozen=True)
class _Waves:
    """All actions, in waves of which none waits for another. `what`: twice the stage, one more for
    backward; `same_rank`, `elsewhere`: the action that each waits for there, -1 if there is none;
    `spans`: the first action of each wave, and the one behind its last."""

    what: _Places
    same_rank: _Places
    elsewhere: _Places
    spans: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def _waves(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> _Waves:
    order = schedule_order(
        schedule, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    wave: dict[Action, int] = {}
    for action, waited in _possible(order):
        wave[action] = 1 + max((wave[before] for before in waited if before), default=-1)
    sorted_ = sorted(wave, key=lambda action: wave[action])
    place = {action: n for n, action in enumerate(sorted_)}
    waited_for = {a: [place[b] if b else -1 for b in waited] for a, waited in _possible(order)}
    ends = np.cumsum([len(list(group)) for _, group in groupby(sorted_, key=wave.__getitem__)])
    return _Waves(
        np.array([2 * a.stage + (a.kind == BACKWARD) for a in sorted_]),
        np.array([waited_for[a][0] for a in sorted_]),
        np.array([waited_for[a][1] for a in sorted_]),
        tuple(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)),
    )


def _possible(order: _Order) -> Iterator[tuple[Action, tuple[Action | None, Action | None]]]:
    """Every action after those that it waits for: of its rank, and elsewhere."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    done, next_ = set[Action](), [0] * len(order)
    ranks = list(range(len(order)))
    while ranks:
        ranks = [rank for rank in ranks if next_[rank] < len(order[rank])]
        for rank in ranks:
            while next_[rank] < len(order[rank]):
                n, actions = next_[rank], order[rank]
                elsewhere = _awaited(actions[n], stages)
                if elsewhere and elsewhere not in done:
                    break
                yield actions[n], (actions[n - 1] if n else None, elsewhere)
                done.add(actions[n])
                next_[rank] += 1


def _awaited(action: Action, stages: int) -> Action | None:
    """What has to be done on another stage; its own stage's forward came earlier on its rank."""
    step = -1 if action.kind == FORWARD else 1
    stage = action.stage + step
    return action._replace(stage=stage) if 0 <= stage < stages else None
