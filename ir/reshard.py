"""From one placement to another on one mesh axis: the collective that does it.

The planner prices exactly the step that codegen emits. Sources are always one of whole, cut or
partial; a whole tensor becomes cut or partial without communication.
"""

from __future__ import annotations

from ir.layout import Partial, Placement, Replicate, Shard

FREE = frozenset({"shard", "first"})
"""Steps that move nothing between ranks."""


def step(have: Placement, want: Placement) -> str | None:
    """The one operation that turns `have` into `want`; None if they are equal.

    Raises `ValueError` for cut -> partial, which no strategy asks for.
    """
    if have == want:
        return None
    match have, want:
        case Replicate(), Shard():
            return "shard"
        case Replicate(), Partial():
            return "first"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case _:
            raise ValueError(f"no step from {have} to {want}")


def possible(have: Placement, want: Placement) -> bool:
    """Whether `step` has an operation: cut to partial has none, nor has a cut of the same dim
    with another `outer` (its pieces interleave)."""
    if isinstance(have, Shard):
        same_dim = isinstance(want, Shard) and want.dim == have.dim
        return have == want or not (same_dim or isinstance(want, Partial))
    return True
