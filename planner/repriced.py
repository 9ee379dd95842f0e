"""The pieces of a candidate on another device: the same programs and menus, with other seconds.

Input: `Pieces`, what is always there of each variant, a cost model. Output: `Pieces` whose menus
keep the same values under the same labels. What kernels need beside their values differs as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ir.cluster import Cluster
from planner.cost import CostModel
from planner.offload import Hosting
from planner.pieces import Pieces
from planner.price import node_times
from planner.rank_costs import kind_of
from planner.recompute import named_point


def repriced(
    found: Pieces, always: Sequence[frozenset[str]], cost: CostModel, cluster: Cluster
) -> Pieces:
    """`always`: per variant the inputs that are state; `cluster`: with the host that all use."""
    key = kind_of(cost), tuple(tuple(p.label for p in menu) for menu in found.menus)
    if key not in found.elsewhere:
        found.elsewhere[key] = _repriced(found, always, cost, Hosting(cluster))
    return found.elsewhere[key]


def _repriced(
    found: Pieces, always: Sequence[frozenset[str]], cost: CostModel, hosting: Hosting
) -> Pieces:
    times = tuple(
        node_times(lowered, storage, cost)
        for lowered, storage in zip(found.lowered, found.storages, strict=True)
    )
    menus = tuple(
        tuple(
            named_point(lowered, storage, time, there, p.label, p.kept, p.hosted, hosting)
            for p in menu
        )
        for lowered, storage, time, there, menu in zip(
            found.lowered, found.storages, times, always, found.menus, strict=True
        )
    )
    return replace(found, times=times, menus=menus, memories={}, elsewhere={})
