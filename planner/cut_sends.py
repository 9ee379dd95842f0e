"""What a stage sends and takes, by the blocks on it, where that depends on the cuts.

Input: the values that blocks hand on, with their seconds on either side. Output: seconds of a
micro-batch of every possible stage. A value goes straight to the stages that read it (a skip
connection passes by the others): its maker's stage sends it if a later block on another stage reads
it, and a stage takes it once if a block there does. One without a gradient goes from reader to
reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

StageSends = NDArray[np.float64]


class Handed(NamedTuple):
    """A value, made by a block and read by later ones, in order: seconds of its maker's stage where
    it is sent, and of a stage that takes it, there and back. `is_passed_on`: by such a stage, too,
    if a later one reads it."""

    maker: int
    readers: tuple[int, ...]
    sent_s: float
    taken_s: float
    is_passed_on: bool = False


def are_alike(blocks: int, values: Sequence[Handed]) -> bool:
    """Whether as much crosses wherever the model is cut."""
    crossing = [
        sorted(v.sent_s + v.taken_s for v in values if v.maker < place <= v.readers[-1])
        for place in range(1, blocks)
    ]
    return all(found == crossing[0] for found in crossing)


def stage_sends(blocks: int, values: Sequence[Handed]) -> StageSends:
    """[blocks + 1, blocks + 1]: seconds of a stage of blocks a..b-1."""
    out = np.zeros((blocks + 1, blocks + 1))
    for value in values:
        maker, last = value.maker, value.readers[-1]
        out[: maker + 1, maker + 1 : last + 1] += value.sent_s
        for first in range(maker + 1, last + 1):
            next_ = next(reader for reader in value.readers if reader >= first)
            out[first, next_ + 1 :] += value.taken_s
            if value.is_passed_on:
                out[first, next_ + 1 : last + 1] += value.sent_s
    return out
