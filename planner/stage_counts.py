"""How many stages the ranks of an interleaved pipeline are tried with.

Input: pipeline ranks, the model's blocks, and how many of them lie in its longest run of equal
ones. Output: numbers of stages per rank. More of them make the fill shorter and send more. Ranks
wait for each other in every round if the stages of a round differ, so where some numbers share the
blocks, or that run, in equal parts no others are tried.
"""

from __future__ import annotations

MOST_STAGES = 8
"""Per rank; that a rank sends so often as well."""
MOST_BESIDE = 24
"""The same beside the best plan that was found."""


def stage_counts(ranks: int, blocks: int, longest: int) -> tuple[int, ...]:
    """At most three, rising: the fewest, the most and one between them.

    >>> stage_counts(8, 98, 96), stage_counts(16, 98, 96), stage_counts(8, 90, 5)
    ((2, 3, 6), (2, 3, 6), (2, 4, 8))
    """
    possible = range(2, min(MOST_STAGES, blocks // max(1, ranks)) + 1)
    found = _even(possible, ranks, blocks, longest) or list(possible)
    if not found:
        return ()
    middle = min(found, key=lambda v: abs(v * v - found[0] * found[-1]))
    return tuple(sorted({found[0], middle, found[-1]}))


def counts_beside(ranks: int, blocks: int, longest: int) -> tuple[int, ...]:
    """All that are tried beside the best plan, rising.

    >>> counts_beside(8, 98, 96), counts_beside(8, 90, 5)
    ((2, 3, 4, 6, 12), (2, 3, 4, 5, 6, 7, 8))
    """
    most = blocks // max(1, ranks)
    even = _even(range(2, min(MOST_BESIDE, most) + 1), ranks, blocks, longest)
    return tuple(even or range(2, min(MOST_STAGES, most) + 1))


def _even(possible: range, ranks: int, blocks: int, longest: int) -> list[int]:
    shared = (blocks, longest) if 2 * longest > blocks else (blocks,)
    return [v for v in possible if any(count % (ranks * v) == 0 for count in shared)]
