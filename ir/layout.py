"""How one tensor lies on a mesh axis: whole, cut along a piece of a dim, or a partial sum.

`Shard(dim, outer)` sees dim `dim` as (outer, rest) and cuts `rest`: with `outer == 1` that is an
ordinary contiguous cut; a fused query-key-value weight is cut by heads with `outer == 3`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ir.graph import Size


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds one piece; `factor` only names the cut for people."""

    dim: int
    outer: Size = 1
    factor: str = field(default="", compare=False)

    def __str__(self) -> str:
        inner = "" if self.outer == 1 else f"/{self.outer}"
        return f"shard({self.dim}{inner})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The ranks' tensors add up to the tensor."""

    def __str__(self) -> str:
        return "partial"


Placement: TypeAlias = Replicate | Shard | Partial
REPLICATE, PARTIAL = Replicate(), Partial()
DATA, TENSOR = "data", "tensor"


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements on the data axis (micro-batches included) and the tensor axis."""

    data: Placement = REPLICATE
    tensor: Placement = REPLICATE

    def __str__(self) -> str:
        parts = [
            f"{axis} {place}" for axis, place in ((DATA, self.data), (TENSOR, self.tensor))
            if place != REPLICATE
        ]  # fmt: skip
        return ", ".join(parts) or "whole"
