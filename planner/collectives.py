"""Seconds of a collective or a send, from how its groups lie on the cluster's links.

Input: `Groups` (see `planner.links`), an op, a size. Every algorithm under every protocol p is a
curve over the size; the library takes about the best, so a collective costs the lowest curve.
n members in u machines of m, S bytes, B(p) the ring's bandwidth, h(p) a step's latency, L launch:

    (1) ring       all_reduce       L + b(p) + 2 (n-1) h(p) + 2 (n-1)/n S / B(p)
                   gather, scatter  L + b(p) +   (n-1) h(p) +   (n-1)/n S / B(p)
                   broadcast        L + b(p) +   (n-1) h(p) +           S / B(p)
    (2) tree       all_reduce       L + b(p) + 2 ((m-1) + log2 u) h(p) + 2 S / B(p); S over 2 units
    (3) nvls       all ops          L + h + S / (e (m-1)/m B), e the switch's efficiency
    (4) nvls_tree  all_reduce       (3), then 2 log2(u) h and 2 S / (m NICs)
    (5) pat        gather, scatter  L + b + n c + log2(n) h / 3.5, one member per machine
    (6) hierarchical                in the machine, between machines, and back: three calls
    (7) all_to_all                  L + b + 1.5 (n-1) h + the slowest level's share of S
    (8) ramp       of (1)-(4)       2 sqrt(k a T): chunks fill the pipeline of k steps

Source: NCCL 2.30.7 src/graph/tuning.cc; (8) is the usual optimum of (k + S/c) (a + c/B) over the
chunk size c. "hierarchical" is not in `LIBRARY`: no library composes it by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2, sqrt

from ir.cluster import Cluster, Mesh
from planner.links import Groups, neighbours
from planner.nccl_constants import (
    CHUNK_OVERHEAD_S,
    EXCHANGE_BASE_S,
    EXCHANGE_HOP,
    LAUNCH_S,
    PAIR_FRACTION,
    PAT_BASE_S,
    PAT_FRACTION,
    PAT_HOP,
    PAT_RANK_S,
    PEERS_FRACTION,
    PROTOCOLS,
    RAMP_END_S,
    SIMPLE,
    SWITCH_RAMP_S,
    Protocol,
)

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
FREE = ("shard", "first")  # take a piece of what is there
LIBRARY = ("ring", "tree", "nvls", "nvls_tree", "pat")
EVERYTHING = (*LIBRARY, "hierarchical")


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over bytes of one algorithm under one protocol; `ramp_s` is k a of (8)."""

    algorithm: str
    protocol: str
    start_s: float
    s_per_byte: float
    ramp_s: float = 0.0

    def at(self, size_bytes: float) -> float:
        """Seconds at that size."""
        moving_s = size_bytes * self.s_per_byte
        if self.ramp_s == 0.0:
            return self.start_s + moving_s
        return self.start_s + moving_s + 2 * sqrt(self.ramp_s * min(moving_s, RAMP_END_S))


def collective_s(
    groups: Groups, op: str, size_bytes: float, algorithms: tuple[str, ...] = LIBRARY
) -> float:
    """Seconds of one collective while all groups of its axis do the same.

    `size_bytes`: the whole (gathered) tensor for all_reduce, all_gather, reduce_scatter and
    broadcast; this rank's tensor for all_to_all. 0 for groups of one and for what moves nothing.
    `ValueError`: an unknown op, or none of `algorithms` applies.
    """
    if groups.members == 1 or op in FREE:
        return 0.0
    return min([curve.at(size_bytes) for curve in curves(groups, op, algorithms)])


def fastest(
    groups: Groups, op: str, size_bytes: float, algorithms: tuple[str, ...] = LIBRARY
) -> Curve:
    """The curve that decides `collective_s`: which algorithm and protocol, and its two parts."""
    return min(curves(groups, op, algorithms), key=lambda curve: curve.at(size_bytes))


def send_s(cluster: Cluster, mesh: Mesh, size_bytes: float, stage: int | None = None) -> float:
    """From a pipeline stage to the next, all ranks at once: L + h + S / B of the slowest pair.

    The slowest pair of neighbouring stages if `stage` is None; 0 without a pipeline.
    """
    stages = range(mesh.pipeline - 1) if stage is None else (stage,)
    return max((_pair_s(neighbours(cluster, mesh, s), size_bytes) for s in stages), default=0.0)


@lru_cache(maxsize=65536)
def curves(groups: Groups, op: str, algorithms: tuple[str, ...] = LIBRARY) -> tuple[Curve, ...]:
    """Every algorithm that can carry out `op` in these groups, under every protocol."""
    if op not in OPS:
        raise ValueError(f"unknown collective {op!r}; known: {', '.join(OPS)}")
    if op == "all_to_all":
        return (_exchange(groups),)
    found = tuple(curve for curve in _all_curves(groups, op) if curve.algorithm in algorithms)
    if not found:
        raise ValueError(f"none of {', '.join(algorithms)} can carry out {op} in these groups.")
    return found


def _all_curves(groups: Groups, op: str) -> Iterator[Curve]:
    for protocol in PROTOCOLS[groups.library]:
        yield _ring(groups, op, protocol)
        if op == "broadcast":
            continue
        if op == "all_reduce" and groups.library != "gloo":
            yield _tree(groups, protocol)
        if groups.near and groups.far:
            yield _hierarchical(groups, op, protocol)
    if op == "broadcast":
        return
    if groups.members_near >= 4 and groups.near[-1].nvls:
        yield from _switch(groups, op)
    if op != "all_reduce" and groups.members_near == 1 and groups.library == "nccl":
        yield _pat(groups)


def _ring(groups: Groups, op: str, protocol: Protocol) -> Curve:
    """(1): a revolution crosses each unit's boundary once; its other steps are inside units."""
    n, turns, start_s = groups.members, 2 if op == "all_reduce" else 1, 0.0
    for crossing in groups.crossings:
        steps = n / crossing.inside - n / crossing.shared
        start_s += turns * steps * crossing.latency_s * protocol.hop[crossing.is_network]
    moved = 1.0 if op == "broadcast" else turns * (n - 1) / n
    s_per_byte = moved / _rate(groups, protocol, protocol.fraction)
    return _curve(groups, "ring", protocol, start_s, s_per_byte, n - 1)


def _tree(groups: Groups, protocol: Protocol) -> Curve:
    """(2): a chain in the innermost units, a double binary tree over units of outer levels.

    Over two units both trees have one edge, so that each byte crosses once.
    """
    start_s, s_per_byte, all_steps = 0.0, 0.0, 0.0
    for depth, crossing in enumerate(groups.crossings):
        is_chain = depth == 0 and not crossing.is_network
        steps = crossing.units - 1 if is_chain else log2(crossing.units)
        start_s += 2 * steps * crossing.latency_s * protocol.tree_hop[crossing.is_network]
        s_per_byte = max(s_per_byte, (1 if crossing.units == 2 else 2) / crossing.ring_bytes_per_s)
        all_steps += steps
    slower = groups.ring_bytes_per_s / _rate(groups, protocol, protocol.tree_fraction)
    return _curve(groups, "tree", protocol, start_s, s_per_byte * slower, all_steps)


def _switch(groups: Groups, op: str) -> Iterator[Curve]:
    """(3) and (4): the switches add and multicast; a tree joins the machines' parts."""
    near, m, n = groups.near[-1], groups.members_near, groups.members
    rate = near.nvls * (m - 1) / m * near.member_bytes_per_s
    start_s = LAUNCH_S[groups.library] + near.latency_s
    if not groups.far:
        moved = 1.0 if op == "all_reduce" else (n - 1) / n
        yield Curve("nvls", SIMPLE.name, start_s, moved / rate, SWITCH_RAMP_S)
    elif op == "all_reduce":
        steps = sum(log2(crossing.units) for crossing in groups.far)
        start_s += sum(2 * log2(c.units) * c.latency_s for c in groups.far)
        across = min(crossing.ring_bytes_per_s for crossing in groups.far)
        ramp_s = SWITCH_RAMP_S + CHUNK_OVERHEAD_S * steps
        yield Curve("nvls_tree", SIMPLE.name, start_s, 1 / min(rate, across / 2), ramp_s)


def _pat(groups: Groups) -> Curve:
    """(5)."""
    n = groups.members
    start_s = sum(log2(c.units) * c.latency_s for c in groups.crossings) * PAT_HOP
    start_s += LAUNCH_S[groups.library] + PAT_BASE_S + n * PAT_RANK_S
    return Curve(
        "pat", SIMPLE.name, start_s, (n - 1) / n / (PAT_FRACTION * groups.ring_bytes_per_s)
    )


def _hierarchical(groups: Groups, op: str, protocol: Protocol) -> Curve:
    """(6): each member carries 1/m of the tensor over the network, all m at the same time."""
    m = groups.members_near
    inner = replace(groups, members=m, crossings=groups.near)
    thin = tuple(replace(c, inside=c.inside // m, shared=c.shared // m) for c in groups.far)
    outer = replace(groups, members=groups.members // m, crossings=thin)
    inside = _ring(inner, "all_gather", protocol)
    across, calls = _ring(outer, op, protocol), 2 if op == "all_reduce" else 1
    return Curve(
        "hierarchical",
        protocol.name,
        across.start_s + calls * inside.start_s,
        across.s_per_byte / m + calls * inside.s_per_byte,
        across.ramp_s + calls * inside.ramp_s,
    )


def _exchange(groups: Groups) -> Curve:
    """(7): each pair has its own 1/n of S; what crosses a level uses the sender's own port."""
    n, s_per_byte = groups.members, 0.0
    start_s = LAUNCH_S[groups.library] + EXCHANGE_BASE_S
    for crossing in groups.crossings:
        peers = crossing.shared - crossing.inside
        start_s += peers * crossing.latency_s * EXCHANGE_HOP
        rate = crossing.member_bytes_per_s
        if not crossing.is_network:
            rate *= PAIR_FRACTION if n == 2 else PEERS_FRACTION
        s_per_byte = max(s_per_byte, peers / n / rate)
    return Curve("pairs", SIMPLE.name, start_s, s_per_byte)


def _pair_s(groups: Groups, size_bytes: float) -> float:
    crossing = groups.crossings[-1]
    rate = crossing.pair_bytes_per_s * (1.0 if crossing.is_network else PAIR_FRACTION)
    return LAUNCH_S[groups.library] + crossing.latency_s + size_bytes / rate


def _rate(groups: Groups, protocol: Protocol, fraction: float) -> float:
    """B(p): part of the ring's bandwidth, capped by what a device's NVLink port can carry so."""
    rate, cap = groups.ring_bytes_per_s * fraction, protocol.cap[bool(groups.far)]
    if cap == 1.0 or not groups.near:
        return rate
    return min(rate, cap * max(crossing.member_bytes_per_s for crossing in groups.near))


def _curve(
    groups: Groups,
    algorithm: str,
    protocol: Protocol,
    start_s: float,
    s_per_byte: float,
    steps: float,
) -> Curve:
    start_s += LAUNCH_S[groups.library] + protocol.base_s
    ramp_s = CHUNK_OVERHEAD_S * steps if protocol.has_ramp else 0.0
    return Curve(algorithm, protocol.name, start_s, s_per_byte, ramp_s)
