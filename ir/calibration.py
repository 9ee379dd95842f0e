"""What was measured of a machine: kernels with so many processes at once, collectives by group.

Input: the measurements of `shardwright calibrate`, or of nccl-tests. Output: frozen values that a
`Cluster` carries and cost models read. What is missing (not measured, or too noisy) is priced by
the catalogue's rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ir.curves import Curve, Grid
from ir.errors import UsageError

KERNELS = (
    "elementwise", "exp", "tanh", "silu", "gelu", "reduce", "copy", "cat", "gather", "scatter",
    "normalize", "normalize_backward", "cross_entropy", "cross_entropy_backward", "view",
    "adamw", "sgd", "attention", "attention_backward",
)  # fmt: skip
"""Curves over bytes: operands and results once; a parameter's for optimizers, the scores' (float32)
for attention."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Seconds over bytes of one kind of kernel; `head_dim` for attention, else 0."""

    name: str
    curve: Curve
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """Seconds of `batch` products at once, over (m, n, k)."""

    dtype: str
    batch: int
    grid: Grid


@dataclass(frozen=True, slots=True)
class Collective:
    """Seconds over bytes of one op in groups of `members`, while `processes` ranks do the same.

    `size_bytes` as cost models count it: the whole (gathered) tensor for all_reduce, all_gather
    and reduce_scatter, this rank's for the others. `members_near`: of a group, on one machine.
    """

    op: str
    processes: int
    members: int
    members_near: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on one process while `processes` of them, with `threads` each, do the same."""

    processes: int
    threads: int
    kernels: tuple[Kernel, ...] = ()
    products: tuple[Product, ...] = ()

    def kernel_s(self, name: str, size_bytes: float) -> float | None:
        """Seconds of a kind of kernel; None if it was not measured."""
        for kernel in self.kernels:
            if kernel.name == name and not kernel.head_dim:
                return kernel.curve.at(size_bytes)
        return None

    def attention_s(self, name: str, scores_bytes: float, head_dim: int) -> float | None:
        """Linear in the head dimension: passes over the scores, and products of that depth."""
        found = sorted((k for k in self.kernels if k.name == name), key=lambda k: k.head_dim)
        if len(found) < 2:
            return found[0].curve.at(scores_bytes) if found else None
        high = next((i for i in range(1, len(found)) if found[i].head_dim >= head_dim), -1)
        a, b = (found[high - 1], found[high]) if high > 0 else (found[-2], found[-1])
        a_s, b_s = a.curve.at(scores_bytes), b.curve.at(scores_bytes)
        part = (head_dim - a.head_dim) / (b.head_dim - a.head_dim)
        return max(a_s + part * (b_s - a_s), min(a_s, b_s) * min(1.0, head_dim / a.head_dim))

    def product_s(self, dtype: str, batch: int, m: int, n: int, k: int) -> float | None:
        """Seconds of `batch` products: of one from its own grid, of several from theirs."""
        grids = {p.batch: p.grid for p in self.products if p.dtype == dtype}
        if not grids or min(batch, m, n, k) <= 0:
            return 0.0 if grids else None
        one = grids.get(1)
        batches = [b for b in grids if b > 1]
        if batch == 1 and one is not None:
            return one.at(m, n, k)
        if not batches:
            return batch * one.at(m, n, k) if one is not None else None
        several_s = grids[batches[0]].at(m, n, k)
        if one is None or batch >= batches[0]:
            return several_s * max(1.0, batch / batches[0])
        return Curve((1.0, float(batches[0])), (one.at(m, n, k), several_s)).at(batch)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements of a machine. `cores`: that its CPU processes share; 0 on GPUs."""

    cores: int
    timings: tuple[Timings, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @property
    def most_processes(self) -> int:
        """The largest number of processes that were measured at once."""
        return max((t.processes for t in self.timings), default=1)

    def on(self, processes: int) -> Calibration:
        """What counts when that many processes run: of them, or of the next larger number.

        GPUs are not shared, so their kernels are those of one process. `UsageError` if fewer
        processes than that were measured on a CPU.
        """
        if not self.cores:
            return self
        counts = sorted(t.processes for t in self.timings if t.processes >= processes)
        if self.timings and not counts:
            raise UsageError(
                f"this machine was measured with up to {self.most_processes} processes at once, "
                f"not {processes}. Measure again: shardwright calibrate --processes {processes}"
            )
        timings = tuple(t for t in self.timings if counts and t.processes == counts[0])
        same = tuple(c for c in self.collectives if counts and c.processes == counts[0])
        return Calibration(self.cores, timings, same)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back to an equal calibration."""
        return {
            "cores": self.cores,
            "timings": [_timings_json(t) for t in self.timings],
            "collectives": [
                {"op": c.op, "processes": c.processes, "members": c.members,
                 "members_near": c.members_near, **_curve_json(c.curve)}
                for c in self.collectives
            ],
        }  # fmt: skip

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Calibration:
        """The calibration that `to_json` wrote; KeyError or TypeError for other shapes."""
        return Calibration(
            value["cores"], tuple(_timings(t) for t in value["timings"]),
            tuple(
                Collective(c["op"], c["processes"], c["members"], c["members_near"], _curve(c))
                for c in value["collectives"]
            ),
        )  # fmt: skip


def _timings_json(timings: Timings) -> dict[str, Any]:
    kernels = []
    for kernel in timings.kernels:
        head = {"head_dim": kernel.head_dim} if kernel.head_dim else {}
        kernels.append({"name": kernel.name, **head, **_curve_json(kernel.curve)})
    products = [
        {"dtype": p.dtype, "batch": p.batch, "sizes": [*p.grid.sizes], "us": _us(p.grid.seconds)}
        for p in timings.products
    ]
    return {
        "processes": timings.processes, "threads": timings.threads,
        "kernels": kernels, "products": products,
    }  # fmt: skip


def _timings(value: Mapping[str, Any]) -> Timings:
    return Timings(
        value["processes"], value["threads"],
        tuple(Kernel(k["name"], _curve(k), k.get("head_dim", 0)) for k in value["kernels"]),
        tuple(
            Product(p["dtype"], p["batch"], Grid(_floats(p["sizes"]), _seconds(p["us"])))
            for p in value["products"]
        ),
    )  # fmt: skip


def _curve_json(curve: Curve) -> dict[str, Any]:
    return {"bytes": [int(size) for size in curve.sizes], "us": _us(curve.seconds)}


def _curve(value: Mapping[str, Any]) -> Curve:
    return Curve(_floats(value["bytes"]), _seconds(value["us"]))


def _us(seconds: tuple[float, ...]) -> list[float]:
    """Four digits are more than any measurement has."""
    return [float(f"{s * 1e6:.4g}") for s in seconds]


def _seconds(us: list[float]) -> tuple[float, ...]:
    return tuple(value * 1e-6 for value in us)


def _floats(values: list[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
