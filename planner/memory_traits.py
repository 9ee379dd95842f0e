"""What a software stack holds beside a step's own values: copies of gradients, outputs, buckets.

Input: nothing but numbers. Output: `Memory`, the part of `planner.traits.Traits` that says what
stays, and its `Update`, what the optimizer makes between the last backward and the next forward.
The defaults hold nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Update:
    """What updating the parameters takes, in bytes per parameter; none of it lives beside
    activations.

    `whole`: of every parameter on the device. `shard`: of those whose optimizer state it holds.
    `early`: of these too, but freed before; the blocks are too small for what follows, and stay in
    the allocator's cache. `largest`: of the largest parameter alone, freed before `shard` is made,
    which can reuse it. `bucket_bytes`: of buckets, whatever the model.
    """

    whole: float = 0.0
    shard: float = 0.0
    early: float = 0.0
    largest: float = 0.0
    bucket_bytes: int = 0

    def live_bytes(self, sizes: Sequence[int], members: int) -> float:
        """The most at one time; `sizes` are the parameters' elements, `members` the ranks that
        share their optimizer state."""
        if not sizes:
            return 0.0
        made_bytes = max(self.shard * sum(sizes) / members, self.largest * max(sizes))
        return self.whole * sum(sizes) + made_bytes + self.bucket_bytes

    def cached_bytes(self, sizes: Sequence[int], members: int) -> float:
        """With what was freed before and can't be reused."""
        return self.live_bytes(sizes, members) + self.early * sum(sizes) / members


@dataclass(frozen=True, slots=True)
class Memory:
    """What stays in memory.

    `keeps_gradients`: gradients in the parameter's dtype stay beside wider sums. `sums_whole`: with
    ZeRO-3, gradients are summed whole, and reduced with the last micro-batch. `keeps_shards`: with
    ZeRO-3, parameters in their dtype stay beside the fp32 copies. `keeps_outputs`: a stage holds
    what it sent until its gradient comes back. `whole_logits`: every tensor rank has all columns of
    the logits for the loss. `is_planned`: a compiler places all tensors in one block of memory;
    else torch's allocator caches what is freed.
    """

    keeps_gradients: bool = False
    sums_whole: bool = False
    keeps_shards: bool = False
    keeps_outputs: bool = False
    whole_logits: bool = False
    is_planned: bool = False
    update: Update = Update()
