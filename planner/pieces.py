"""The blocks of a model at one tensor degree and micro-batch size: sharded, lowered and priced.

Input: variants, degrees, a cost model. Output: `Pieces`, which all meshes and micro-batch counts
with these local shapes share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ir.batch import Flow
from ir.graph import Graph
from ir.layout import REPLICATE, Placement
from ir.lower import Degrees, Lowered, Sharding, whole_sharding
from ir.recompute import state_inputs
from ir.spmd import lower_all
from ir.variants import Variant
from planner.call_memory import CallMemory
from planner.cost import CostModel
from planner.offload import Hosting
from planner.price import NodeTimes, node_times
from planner.recompute import MenuPoint, finer, menu
from planner.sharding import ShardingResult
from planner.storage import Storage, storage_of


@dataclass(frozen=True)
class Pieces:
    """Per variant its sharding, lowered program, storages, node times and recompute menu; the
    bytes of menu points, by what they keep and where, as they get known. `elsewhere`: the same on
    other devices (`planner.repriced`)."""

    shardings: tuple[Sharding, ...]
    state: dict[str, Placement]
    lowered: tuple[Lowered, ...]
    storages: tuple[Storage, ...]
    times: tuple[NodeTimes, ...]
    menus: tuple[tuple[MenuPoint, ...], ...]
    memories: dict[tuple[int, str, frozenset[str], frozenset[str]], CallMemory] = field(
        default_factory=dict, compare=False, repr=False
    )
    elsewhere: dict[Hashable, Pieces] = field(default_factory=dict, compare=False, repr=False)


def whole(graph: Graph, kinds: tuple[Variant, ...]) -> ShardingResult:
    """Nothing cut on the tensor axis."""
    shardings = tuple(whole_sharding(v.block, v.spread) for v in kinds)
    state: dict[str, Placement] = {item.name: REPLICATE for item in graph.state}
    return ShardingResult(shardings, state, 0.0, 0.0, 0)


MenuOf: TypeAlias = "Callable[[Variant, Lowered, NodeTimes, frozenset[str]], tuple[MenuPoint, ...]]"
"""The menu of a variant, from its lowered program, node times and inputs that are always there."""


def pieces(
    graph: Graph, batch_flow: Flow, kinds: tuple[Variant, ...], result: ShardingResult,
    degrees: Degrees, cost: CostModel, menu_of: MenuOf,
) -> Pieces:  # fmt: skip
    """Lowers and prices every variant."""
    found = priced(graph, batch_flow, kinds, result, degrees, cost)
    return with_menus(found, graph, kinds, menu_of)


def priced(
    graph: Graph, batch_flow: Flow, kinds: tuple[Variant, ...], result: ShardingResult,
    degrees: Degrees, cost: CostModel,
) -> Pieces:  # fmt: skip
    """Every variant lowered and priced, without menus."""
    lowered = lower_all(graph, batch_flow, kinds, result.shardings, degrees)
    storages = tuple(storage_of(piece) for piece in lowered)
    times = tuple(node_times(p, s, cost) for p, s in zip(lowered, storages, strict=True))
    state: dict[str, Placement] = {item.name: REPLICATE for item in graph.state} | result.state
    return Pieces(result.shardings, state, lowered, storages, times, ())


def with_menus(
    found: Pieces, graph: Graph, kinds: tuple[Variant, ...], menu_of: MenuOf
) -> Pieces:
    """The pieces with a menu for every variant."""
    always = _always(found, graph, kinds)
    menus = tuple(map(menu_of, kinds, found.lowered, found.times, always))
    return replace(found, menus=menus)


def with_finer_menus(found: Pieces, graph: Graph, kinds: tuple[Variant, ...]) -> Pieces:
    """The pieces with more points in the menus of blocks that repeat."""
    always = _always(found, graph, kinds)
    parts = zip(kinds, found.lowered, found.storages, found.times, always, found.menus, strict=True)
    menus = tuple(finer(*of) if len(v.calls) > 1 else of[-1] for v, *of in parts)
    return replace(found, menus=menus)


def _always(
    found: Pieces, graph: Graph, kinds: tuple[Variant, ...]
) -> tuple[frozenset[str], ...]:
    """Per variant its inputs that are state."""
    names = {item.name for item in graph.state}
    return tuple(
        state_inputs(piece, graph.calls[v.calls[0]].arguments, names)
        for v, piece in zip(kinds, found.lowered, strict=True)
    )


def best_menu(
    recompute: str | None, hosting_of: Callable[[Variant], Hosting] | None = None
) -> MenuOf:
    """`planner.recompute.menu`, or the part of it that `recompute` allows. `hosting_of`: the host
    of a variant's values, if they may lie there."""
    return lambda variant, piece, times, always: menu(
        piece, times.storage, times, always, recompute, hosting_of(variant) if hosting_of else None
    )
