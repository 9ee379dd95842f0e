"""The legal ways to run one node on one mesh axis.

Input: a node's factors. Output: `Strategy`s: the placements that its operands must have and that
its results then have. Each axis is independent: on the pieces that another axis cut, a node is
the same operation with smaller sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ir.factors import Factors, Leaf
from ir.graph import Node
from ir.layout import PARTIAL, REPLICATE, Placement


@dataclass(frozen=True, slots=True)
class Strategy:
    """`leaf` is the factor that is cut, None if none is; `communicates` marks inner collectives."""

    leaf: Leaf | None
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    communicates: bool = False

    @property
    def divides(self) -> bool:
        """Whether the work is divided among the ranks."""
        return self.leaf is not None


def strategies(node: Node, factors: Factors, leaves: Iterable[Leaf]) -> tuple[Strategy, ...]:
    """Whole, each of `leaves` that may be cut, and the passing of partial sums."""
    key = (node.outputs[0], tuple(leaves))
    if key not in factors.known:
        factors.known[key] = tuple(_strategies(node, factors, key[1]))
    found: tuple[Strategy, ...] = factors.known[key]
    return found


def _strategies(node: Node, factors: Factors, leaves: Iterable[Leaf]) -> list[Strategy]:
    facts = factors.nodes[node]
    names = node.operands
    results = [name for name in node.outputs if name in factors.dims]
    found = [Strategy(None, (REPLICATE,) * len(names), (REPLICATE,) * len(results))]
    own = {f for dims in (*facts.operands, *facts.results) for d in dims for f in d}
    for leaf in leaves:
        if leaf in own and leaf not in facts.whole:
            cut = _cut(leaf, names, results, factors, node)
            found += [cut] if cut else []
    for group in facts.signature.linear:
        operands = tuple(PARTIAL if k in group else REPLICATE for k in range(len(names)))
        found.append(Strategy(None, operands, (PARTIAL,) * len(results)))
    return found


def _cut(
    leaf: Leaf, names: tuple[str, ...], results: list[str], factors: Factors, node: Node
) -> Strategy | None:
    facts = factors.nodes[node]

    def place(value: str) -> Placement | None:
        count = factors.leaves(value).count(leaf)
        return REPLICATE if count == 0 else factors.shard(value, leaf)

    operands = [place(name) for name in names]
    outputs: list[Placement | None] = []
    for name in results:
        here = place(name)
        if here != REPLICATE:
            outputs.append(here)
        elif leaf in facts.adds:
            outputs.append(PARTIAL)
        elif leaf in facts.gathers:
            outputs.append(REPLICATE)
        else:
            return None
    if None in operands or None in outputs:
        return None
    return Strategy(
        leaf, tuple(p for p in operands if p is not None),
        tuple(p for p in outputs if p is not None), leaf in facts.gathers,
    )  # fmt: skip
