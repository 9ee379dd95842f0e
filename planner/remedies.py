"""What would make a plan fit, when none does: changes from the cheapest, each planned.

Input: the request that does not fit and its `Shortage`, `Trials`. Output: `Remedy`s in the order
of what they cost their user: fixed decisions that are freed, a smaller batch, more nodes, more
memory per device. What the search decides by itself (micro-batches, recompute, ZeRO) was tried
already, so it is only a remedy where it was fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from ir.cluster import GIB
from ir.cluster_change import changed, node_count
from ir.errors import UsageError
from ir.plan import Plan
from planner.alternatives import decisions
from planner.pins import divisors
from planner.relaxations import what_if
from planner.shortage import Shortage
from planner.trials import Outcome, Pinned, Request, Trials

MIB = 2**20
FREED_FIRST = ("micro_batches", "recompute", "zero", "offload", "schedule", "virtual_stages")
"""Fixed decisions in the order in which they are freed; degrees of the mesh follow."""
NODE_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""By how much the nodes are multiplied."""
MOST_NODE_TRIALS, MOST_BATCH_TRIALS = 3, 4
MEMORY_STEPS = (1.0, 1.02, 1.1)
"""Over the bytes that the plan of least memory needs: the search may have to find another."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """`kind`: "free", "batch", "nodes" or "memory"; `change`: of it, in words. `outcome`: the plan
    that fits, or why it does not."""

    kind: str
    change: str
    outcome: Outcome
    released: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it was planned."""
        return isinstance(self.outcome, Plan)


def remedies(request: Request, shortage: Shortage, trials: Trials) -> Iterator[Remedy]:
    """Tried one by one, as they are asked for; one kind ends with the first change that fits."""
    for tries in (
        _freed(request, trials), _smaller_batch(request, shortage, trials),
        _more_nodes(request, shortage, trials), _more_memory(request, shortage, trials),
    ):  # fmt: skip
        for remedy in tries:
            if remedy.outcome is None:
                return
            yield remedy
            if remedy.fits and remedy.kind != "free":
                break


def _freed(request: Request, trials: Trials) -> Iterator[Remedy]:
    """Each fixed decision by itself, then all of them."""
    order = [key for key in FREED_FIRST if key in request.pins]
    order += [key for key in request.pins if key not in order]
    for key in order:
        yield _free(request, [key], trials)
    if len(order) > 1:
        together = _free(request, order, trials)
        if len(together.released) > 1:  # one by itself was tried above
            yield together


def _free(request: Request, keys: list[str], trials: Trials) -> Remedy:
    outcome, freed = _needed(request, trials(_without(request, keys)), tuple(keys), trials)
    return Remedy("free", ", ".join(freed), outcome, freed)


def _without(request: Request, keys: Iterable[str]) -> Request:
    freed = set(keys)
    return replace(request, pins={k: v for k, v in request.pins.items() if k not in freed})


def _needed(
    request: Request, outcome: Outcome, freed: tuple[str, ...], trials: Trials
) -> tuple[Outcome, tuple[str, ...]]:
    """Of the freed decisions those that had to change: the others are fixed again, and planned."""
    if not isinstance(outcome, Plan):
        return outcome, freed
    now = decisions(outcome)
    moved = tuple(key for key in freed if now[key] != request.pins[key])
    again = outcome if moved == freed else trials(_without(replace(
        request, cluster=outcome.cluster, global_batch=outcome.global_batch
    ), moved))  # fmt: skip
    return (again, moved) if isinstance(again, Plan) else (outcome, freed)


def _smaller_batch(request: Request, shortage: Shortage, trials: Trials) -> Iterator[Remedy]:
    """Only where even the least plan's micro-batch has several rows: the batch can't be split."""
    if shortage.candidate.rows == 1 or "micro_batches" in request.pins:
        return
    smaller = [rows for rows in divisors(request.global_batch) if rows < request.global_batch]
    for rows in smaller[: -MOST_BATCH_TRIALS - 1 : -1]:
        yield Remedy("batch", str(rows), trials(replace(request, global_batch=rows)))


def _more_nodes(request: Request, shortage: Shortage, trials: Trials) -> Iterator[Remedy]:
    """From what the state alone asks for; with the fixed decisions, or else without them."""
    nodes, least = node_count(request.cluster), shortage.least_devices / shortage.devices
    factors = [factor for factor in NODE_FACTORS if factor >= least]
    for factor in factors[:MOST_NODE_TRIALS]:
        for pins in (request.pins, {}) if request.pins else ({},):
            remedy = _changed(request, "nodes", str(nodes * factor), trials, pins)
            if remedy is None:
                return
            yield remedy


def _more_memory(request: Request, shortage: Shortage, trials: Trials) -> Iterator[Remedy]:
    """What the plan of least memory needs, rounded up to a tenth of a GiB or MiB."""
    device = request.cluster.device
    for factor in MEMORY_STEPS:
        needed_bytes = shortage.need_bytes * factor + device.reserve_bytes
        unit, scale = ("GiB", GIB) if needed_bytes >= GIB else ("MiB", MIB)
        value = f"{ceil(10 * needed_bytes / scale) / 10:.1f}{unit}"
        remedy = _changed(request, "memory", value, trials, request.pins)
        if remedy is not None:
            yield remedy


def _changed(
    request: Request, key: str, value: str, trials: Trials, pins: Pinned
) -> Remedy | None:
    """None where this cluster can't be changed so."""
    try:
        cluster = changed(request.cluster, {key: value})
    except UsageError:
        return None
    outcome, released = what_if(replace(request, pins=pins), cluster, trials)
    freed = tuple(pin for pin in request.pins if pin not in pins)
    outcome, freed = _needed(request, outcome, freed + released, trials)
    return Remedy(key, value, outcome, freed)
