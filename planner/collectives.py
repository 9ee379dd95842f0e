"""Seconds of a collective or a send, from how its groups lie on the cluster's links.

Every algorithm under every protocol is a line, `start_s + bytes * s_per_byte`; the library takes
about the best, so a collective costs the lowest line at its size. With n members, u machines with
m members each, S bytes, B the ring's bandwidth and h(p) the latency of a step under protocol p:

    ring       all_reduce        L + b(p) + 2 (n-1) h(p) + 2 (n-1)/n S / B(p)
               gather, scatter   L + b(p) +   (n-1) h(p) +   (n-1)/n S / B(p)
    tree       all_reduce        L + b(p) + 2 ((m-1) h + log2(u) h) + 2 S / (0.92 B(p))
    nvls       all_reduce        L + b + h_switch + S / (e (m-1)/m B)
    nvls_tree  all_reduce        nvls, then a tree over machines of m NICs each
    pat        gather, scatter   one member per machine: log2(n) steps
    hierarchical                 in the machine, then between machines, then in the machine
    all_to_all                   L + b + (n-1) h + the slowest level's share of S

Formulas and all constants without another source: NCCL 2.30.7 src/graph/tuning.cc. Fitted ones
say so: on the even rows of published curves (A100, H200, B200 nodes, 4 x 8 B200, 2 x 8 H20).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2

from planner.links import Crossing, Groups

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# What the library chooses among by itself; "hierarchical" is a composition of three calls.
LIBRARY = ("ring", "tree", "nvls", "nvls_tree", "pat")


@dataclass(frozen=True, slots=True)
class Protocol:
    """How NCCL moves data: flags beside each word (LL), each 128 bytes (LL128), or per chunk.

    `base_s` once; `hop`, `tree_hop`: of a link's step latency, in the machine and over the
    network; `fraction`, `tree_fraction`: of the ring's bandwidth; `cap`: of a device's own link.
    """

    name: str
    base_s: float
    hop: tuple[float, float]
    tree_hop: tuple[float, float]
    fraction: float
    tree_fraction: float
    cap: tuple[float, float] = (1.0, 1.0)


LL = Protocol("LL", 6.6e-6, (0.18, 0.19), (0.18, 0.36), 0.5, 0.26, (0.37, 0.10))
LL128 = Protocol("LL128", 14.0e-6, (0.56, 0.29), (0.37, 0.61), 0.92, 0.85)
SIMPLE = Protocol("Simple", 8.4e-6, (1.0, 1.0), (1.18, 1.0), 1.0, 0.92)
PROTOCOLS = (LL, LL128, SIMPLE)
LAUNCH_S = 25e-6
NVLS_HOP_S = 25e-6
# A collective of send and receive pairs: one channel pair per peer, Simple protocol.
PAIR_FRACTION = 0.66
EXCHANGE_FRACTION = 0.82
EXCHANGE_BASE_S = 40e-6
EXCHANGE_HOP = 1.0
SWITCH_FRACTION = 1.0
SIMPLE_FILL_S = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """`start_s + bytes * s_per_byte`: one algorithm under one protocol."""

    algorithm: str
    protocol: str
    start_s: float
    s_per_byte: float

    def at(self, size_bytes: float) -> float:
        """Seconds at that size."""
        return self.start_s + size_bytes * self.s_per_byte


def collective_s(
    groups: Groups, op: str, size_bytes: float, algorithms: tuple[str, ...] = LIBRARY
) -> float:
    """Seconds of one collective while all groups of the axis do the same.

    `size_bytes`: the whole (gathered) tensor for all_reduce, all_gather and reduce_scatter; this
    rank's tensor for all_to_all. 0 for groups of one and for what moves nothing (shard, first).
    `ValueError` for an unknown op.
    """
    if groups.members == 1 or op in ("shard", "first"):
        return 0.0
    return min(line.start_s + size_bytes * line.s_per_byte for line in lines(groups, op, algorithms))


def fastest(
    groups: Groups, op: str, size_bytes: float, algorithms: tuple[str, ...] = LIBRARY
) -> Line:
    """The line that decides `collective_s`: it says which algorithm, and why it takes so long."""
    return min(lines(groups, op, algorithms), key=lambda line: line.at(size_bytes))


@lru_cache(maxsize=65536)
def lines(groups: Groups, op: str, algorithms: tuple[str, ...] = LIBRARY) -> tuple[Line, ...]:
    """Every algorithm that can carry out `op` in these groups, under every protocol."""
    if op not in OPS:
        raise ValueError(f"unknown collective {op!r}; known: {', '.join(OPS)}")
    if op == "all_to_all":
        return (_exchange(groups),)
    found = [line for line in _options(groups, op) if line.algorithm in algorithms]
    if not found:
        raise ValueError(f"none of {', '.join(algorithms)} can carry out {op} in these groups.")
    return tuple(found)


def _options(groups: Groups, op: str) -> Iterator[Line]:
    if not groups.has_nccl:
        yield _ring(groups, op, SIMPLE)
        return
    for protocol in PROTOCOLS:
        yield _ring(groups, op, protocol)
        if op == "all_reduce":
            yield _tree(groups, protocol)
    yield from _switch(groups, op)
    if op != "all_reduce" and groups.members_near == 1 and groups.far:
        yield _pat(groups)
    if groups.near and groups.far:
        yield _hierarchical(groups, op)


def _rate(groups: Groups, protocol: Protocol, fraction: float) -> float:
    """Bytes per second of a ring or tree under a protocol; LL is capped by the device."""
    own = max(crossing.member_bytes_per_s for crossing in groups.crossings)
    cap = protocol.cap[bool(groups.far)]
    rate = groups.ring_bytes_per_s * fraction
    return rate if cap == 1.0 else min(rate, own * cap)


def _ring(groups: Groups, op: str, protocol: Protocol) -> Line:
    """n-1 steps a revolution: one per unit boundary crossed, the others inside the units."""
    n, start_s = groups.members, 0.0
    turns = 2 if op == "all_reduce" else 1
    for crossing in groups.crossings:
        steps = n / crossing.inside - n / crossing.shared
        start_s += steps * crossing.latency_s * protocol.hop[crossing.is_network]
    per_byte = turns * (n - 1) / n / _rate(groups, protocol, protocol.fraction)
    return _line(groups, "ring", protocol, turns * start_s, per_byte)


def _tree(groups: Groups, protocol: Protocol) -> Line:
    """Up and down a double binary tree over the units of each level, a chain inside them."""
    start_s = 0.0
    for depth, crossing in enumerate(groups.crossings):
        steps = log2(crossing.units) if depth or crossing.is_network else crossing.units - 1
        start_s += steps * crossing.latency_s * protocol.tree_hop[crossing.is_network]
    return _line(
        groups, "tree", protocol, 2 * start_s, 2 / _rate(groups, protocol, protocol.tree_fraction)
    )


def _switch(groups: Groups, op: str) -> Iterator[Line]:
    """NVLS: the switches add and multicast. Over a network, a tree joins the machines' parts."""
    near = groups.near[-1] if groups.near else None
    if near is None or near.nvls == 0.0 or groups.members_near < 4:
        return
    m, n = groups.members_near, groups.members
    rate = near.nvls * SWITCH_FRACTION * (m - 1) / m * near.member_bytes_per_s
    start_s = NVLS_HOP_S
    if not groups.far:
        moved = 1.0 if op == "all_reduce" else (n - 1) / n
        yield _line(groups, "nvls", SIMPLE, start_s, moved / rate, base_s=0.0)
    elif op == "all_reduce":
        outer = groups.far[-1]
        across = min(crossing.ring_bytes_per_s for crossing in groups.far)
        turns = 1 if n == 2 * m else 2
        for crossing in groups.far:
            start_s += 2 * log2(crossing.units) * crossing.latency_s
        yield _line(groups, "nvls_tree", SIMPLE, start_s, 1 / min(rate, across / turns), base_s=0.0)


def _pat(groups: Groups) -> Line:
    """NCCL's parallel aggregated trees: log2(n) steps, 3/4 of the bandwidth."""
    n = groups.members
    start_s = 8.0e-6 + sum(log2(c.units) * c.latency_s / 3.5 for c in groups.crossings)
    start_s += 2.8e-6 * n
    return Line("pat", "Simple", LAUNCH_S + start_s, (n - 1) / n / (0.75 * groups.ring_bytes_per_s))


def _hierarchical(groups: Groups, op: str) -> Line:
    m = groups.members_near
    inner = Groups(m, groups.near)
    far = tuple(replace(c, inside=c.inside // m, shared=c.shared // m) for c in groups.far)
    outer = Groups(groups.members // m, far)
    parts = [_ring(inner, "all_gather", SIMPLE)] * (2 if op == "all_reduce" else 1)
    across = _ring(outer, op, SIMPLE)
    return Line(
        "hierarchical",
        "Simple",
        across.start_s + sum(part.start_s for part in parts),
        across.s_per_byte / m + sum(part.s_per_byte for part in parts),
    )


def _exchange(groups: Groups) -> Line:
    """Each pair has its own 1/n of S; what crosses a level uses the sender's own port."""
    n, start_s, per_byte = groups.members, 0.0, 0.0
    for crossing in groups.crossings:
        start_s += (crossing.shared - crossing.inside) * crossing.latency_s * EXCHANGE_HOP
        fraction = 1.0
        if not crossing.is_network and groups.has_nccl:
            fraction = PAIR_FRACTION if n == 2 else EXCHANGE_FRACTION
        share = (crossing.shared - crossing.inside) / n
        per_byte = max(per_byte, share / (fraction * crossing.member_bytes_per_s))
    return Line("pairs", "Simple", LAUNCH_S + EXCHANGE_BASE_S + start_s, per_byte)


def _line(
    groups: Groups, algorithm: str, protocol: Protocol, start_s: float, per_byte: float,
    base_s: float | None = None,
) -> Line:  # fmt: skip
    base = protocol.base_s if base_s is None else base_s
    if protocol is SIMPLE:
        base += SIMPLE_FILL_S
    return Line(algorithm, protocol.name, LAUNCH_S + base + start_s, per_byte)
