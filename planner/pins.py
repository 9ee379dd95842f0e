"""What a caller fixes, and the meshes and micro-batch counts that remain.

Input: pins such as {"tensor": 2, "schedule": "gpipe"}, the cluster, the batch. Output: `Pins`,
checked, and `Candidate`s: meshes, micro-batch counts, schedules, stages per rank. A pin that can't
be honoured is a `UsageError` with the nearest legal values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt, prod
from typing import Any

import sympy

from ir.cluster import AXES, Mesh
from ir.errors import Refused, UsageError
from ir.graph import BATCH, Graph
from ir.lower import Degrees
from ir.offload import OFFLOADS
from ir.schedules import SCHEDULES, check_schedule, fits_rounds, splits_backward

RECOMPUTE = ("none", "selective", "full")
COUNTS = (*AXES, "micro_batches", "virtual_stages")
KEYS = (*COUNTS, "schedule", "recompute", "zero", "offload")
ZERO_STAGES = (0, 1, 2, 3)
WORDS: Mapping[str, tuple[object, ...]] = {
    "schedule": SCHEDULES, "recompute": RECOMPUTE, "zero": ZERO_STAGES, "offload": OFFLOADS,
}  # fmt: skip
"""What those pins may be that are no counts."""
MOST_ROWS = 2**31 - 1
"""Of a global batch."""


@dataclass(frozen=True, slots=True)
class Pins:
    """Fixed decisions; None is free."""

    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    virtual_stages: int | None = None
    zero: int | None = None
    offload: str | None = None

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank must have several stages."""
        return self.schedule == "interleaved" or (self.virtual_stages or 1) > 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh with a micro-batch count, a schedule and stages per rank; `rows` of the batch per
    micro-batch. `zero`: what is divided over the data axis, 0 (nothing) to 3 (`ir.spmd.Spmd`).
    `offload`: what lies in host memory (`ir.offload`). `order`: of the cluster's nodes, where they
    hold different devices (`ir.stage_devices`)."""

    mesh: Mesh
    micro_batches: int
    schedule: str
    rows: int
    virtual_stages: int = 1
    zero: int = 0
    offload: str = "none"
    order: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Of the whole pipeline; stage s lies on rank s mod `mesh.pipeline`."""
        return self.mesh.pipeline * self.virtual_stages

    def stages_of(self, rank: int) -> range:
        """The stages of a pipeline rank."""
        return range(rank, self.stages, self.mesh.pipeline)

    @property
    def degrees(self) -> Degrees:
        mesh, count = self.mesh, self.micro_batches
        return Degrees(self.rows * mesh.data * count, mesh.data, mesh.tensor, count)

    def is_as_large(self, other: Candidate) -> bool:
        """Whether it is the same with no fewer rows, divided and offloaded no more."""
        alike = (self.mesh, self.schedule, self.virtual_stages, self.order)
        return (
            alike == (other.mesh, other.schedule, other.virtual_stages, other.order)
            and self.rows >= other.rows and self.zero <= other.zero
            and (self.offload == "none" or other.offload in (self.offload, "all"))
        )  # fmt: skip

    def __str__(self) -> str:
        more = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        more += f" zero={self.zero}" if self.zero else ""
        more += f" offload={self.offload}" if self.offload != "none" else ""
        return f"{self.mesh} micro_batches={self.micro_batches} {self.schedule}{more}"


def read_pins(values: Mapping[str, Any] | None) -> Pins:
    """Checks keys and types."""
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(
            f"pins are given by name, such as {{\"tensor\": 2, \"schedule\": \"gpipe\"}}, not "
            f"as {values!r}."
        )
    values = dict(values or {})
    for key, value in values.items():
        if key not in KEYS:
            raise UsageError(f"unknown pin {key!r}. Pins are {', '.join(KEYS)}.")
        if key in COUNTS and (type(value) is not int or value < 1):
            raise UsageError(f"pin {key}={value!r}: it must be a whole number of at least 1.")
        words = WORDS.get(key)
        if words and (value not in words or isinstance(value, bool)):
            raise UsageError(f"pin {key}={value!r}: it is one of {', '.join(map(str, words))}.")
    return Pins(**values)


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(number: int, asked: int) -> str:
    """The divisors of `number` next to `asked`, in words."""
    below = [d for d in divisors(number) if d < asked]
    above = [d for d in divisors(number) if d > asked]
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


def parse_pins(text: str, *, micro_batches: int | None = None) -> dict[str, int | str]:
    """`tensor=2,schedule=gpipe` as pins, with a number of micro-batches given beside them."""
    pin: dict[str, int | str] = {}
    if text and not text.replace(",", "").strip():
        raise UsageError(f"--pin {text!r} names no decision. Write KEY=VALUE, such as tensor=2.")
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not part.strip():
            continue
        if not (equals and key and value):
            raise UsageError(f"--pin {text!r}: {part!r} is not KEY=VALUE, such as tensor=2.")
        if key in pin:
            raise UsageError(f"--pin {text!r} names {key} twice. Give it once.")
        pin[key] = int(value) if value.isdecimal() else value
    if micro_batches and pin.setdefault("micro_batches", micro_batches) != micro_batches:
        raise UsageError(
            f"--micro-batches {micro_batches} contradicts --pin micro_batches="
            f"{pin['micro_batches']}. Give one of them."
        )
    return pin


def check_batch(graph: Graph, global_batch: int) -> None:
    """The capture must be valid for this batch."""
    check_rows(global_batch)
    for guard in graph.guards:
        if not bool(guard.subs(BATCH, global_batch)):
            raise Refused(
                f"{graph.model} was captured for batches with {guard}, and the global batch is "
                f"{global_batch}. Use a batch that meets it, or trace with this batch size."
            )


def takes_rows(graph: Graph, rows: int) -> bool:
    """Whether a micro-batch of a data rank may have so many."""
    return all(_holds(condition, rows) for condition in row_conditions(graph))


@lru_cache(maxsize=4096)
def _holds(condition: sympy.Eq, rows: int) -> bool:
    try:
        return bool(condition.subs(BATCH, rows))
    except (ZeroDivisionError, TypeError):  # of sizes that there are none of
        return False


def row_conditions(graph: Graph) -> list[sympy.Eq]:
    """Where the capture takes for granted that rows come in pairs, say, those of every micro-batch
    must. What it takes for granted of single sizes, such as more than one row, does not count:
    nothing that is emitted depends on it."""
    return [guard for guard in graph.guards if isinstance(guard, sympy.Eq)]


def check_pins(
    pins: Pins, n_devices: int, global_batch: int | None = None, *, has_batch: bool = True,
    why_fixed: str = "",
) -> None:  # fmt: skip
    """Raises `UsageError` for pins that contradict the devices, the batch or each other.

    `global_batch` None: not known yet. `has_batch`: the model works for other numbers of rows;
    `why_fixed`: what keeps it from that.
    """
    _check_devices(pins, n_devices)
    _check_order(pins, n_devices)
    if pins.zero and _most_data(pins, n_devices, has_batch=has_batch) == 1:
        raise UsageError(
            f"pin zero={pins.zero}: ZeRO divides state over data ranks, and with data=1 there is "
            "nothing to divide. Use zero=0, or pins that leave at least two data ranks."
        )
    if pins.zero in (2, 3) and pins.schedule and splits_backward(pins.schedule):
        raise UsageError(
            f"pin zero={pins.zero} with schedule={pins.schedule}: gradients are scattered when a "
            "block's backward ends, and this schedule cuts it in halves. Use zero=1, or "
            "schedule=1f1b."
        )
    fixed = "could be traced with its own number of rows only"
    if why_fixed:
        fixed = f"works for one batch size only ({why_fixed})"
    for key in ("data", "micro_batches"):
        value = getattr(pins, key)
        if value not in (None, 1) and not has_batch:
            raise UsageError(
                f"pin {key}={value}: the model {fixed}, so it can't be split. Use {key}=1."
            )
    data = pins.data or 1
    if pins.pipeline and pins.tensor and not pins.data:
        data = n_devices // pins.pipeline // pins.tensor
    if data > 1 and not has_batch:
        raise UsageError(
            f"data={data}: the model {fixed}, so it can't be split. Use data=1, with more stages "
            "or a higher tensor degree."
        )
    if global_batch is None:
        return
    check_rows(global_batch)
    if global_batch % data:
        raise UsageError(
            f"a global batch of {global_batch} can't be divided by data={data}. Use "
            f"data={nearest(gcd(global_batch, n_devices), data)}, or a global batch that is a "
            f"multiple of {data}."
        )
    local = global_batch // data
    if pins.micro_batches and local % pins.micro_batches:
        ranks = f" on each of {data} data ranks" if data > 1 else ""
        raise UsageError(
            f"{local} rows{ranks} can't be divided into {pins.micro_batches} micro-batches. Use "
            f"micro_batches={nearest(local, pins.micro_batches)}."
        )


def check_rows(global_batch: int) -> None:
    """A whole number of rows that a step can have."""
    if type(global_batch) is not int or global_batch < 1:
        raise UsageError(f"global batch {global_batch!r}: it must be a whole number of at least 1.")
    if global_batch > MOST_ROWS:
        raise UsageError(f"global batch {global_batch}: a step has at most {MOST_ROWS} rows.")


def _check_order(pins: Pins, n_devices: int) -> None:
    """A schedule that has no order for the pinned sizes is refused before anything is planned."""
    pipeline = _only_pipeline(pins, n_devices)
    if pipeline == 1 and pins.schedule in ("gpipe", "zero-bubble"):
        raise UsageError(
            f"schedule={pins.schedule} with pipeline=1: it orders the work of pipeline ranks, and "
            f"there is one. Use schedule=1f1b{_with_more_ranks(pins, n_devices)}."
        )
    ranks = pipeline or 2
    virtual = pins.virtual_stages or (2 if pins.schedule == "interleaved" else 1)
    schedule = pins.schedule or ("interleaved" if virtual > 1 else "1f1b")
    micro_batches = (pins.micro_batches if pipeline else None) or ranks
    check_schedule(schedule, ranks, micro_batches, virtual)


def _only_pipeline(pins: Pins, n_devices: int) -> int | None:
    """The one pipeline degree that the other pins leave; None if there are several."""
    others = [degree for degree in (pins.data, pins.tensor) if degree]
    left = n_devices // prod(others)
    return pins.pipeline or (left if len(others) == 2 or left == 1 else None)


def _with_more_ranks(pins: Pins, n_devices: int) -> str:
    """`, or pipeline=2`, if the other pins leave devices for it."""
    left = n_devices // ((pins.data or 1) * (pins.tensor or 1))
    return f", or pipeline={divisors(left)[1]}" if left > 1 else ""


def _most_data(pins: Pins, n_devices: int, *, has_batch: bool) -> int:
    """The highest data degree that the pins and the model allow."""
    if not has_batch:
        return 1
    return pins.data or n_devices // (pins.pipeline or 1) // (pins.tensor or 1)


def _check_devices(pins: Pins, n_devices: int) -> None:
    """The pinned degrees must divide the number of devices; all three may leave some idle."""
    pinned = [getattr(pins, axis) for axis in AXES]
    fits = prod(degree or 1 for degree in pinned) < n_devices
    if all(pinned) and fits:
        return
    other = "pin all three degrees to leave devices idle" if fits else "a larger cluster"
    left = n_devices
    for axis, degree in zip(AXES, pinned, strict=True):
        if degree and left % degree:
            others = " left by the other pins" if left != n_devices else ""
            raise UsageError(
                f"pin {axis}={degree}: {left} devices{others} can't be split in {degree}. Use "
                f"{axis}={nearest(left, degree)}, or {other}."
            )
        left //= degree or 1


def meshes(pins: Pins, n_devices: int) -> Iterator[Mesh]:
    """Every mesh over all devices that the pins allow."""
    for pipeline in divisors(n_devices):
        for data in divisors(n_devices // pipeline):
            mesh = Mesh(pipeline, data, n_devices // pipeline // data)
            if all(getattr(pins, axis) in (None, mesh.degree(axis)) for axis in AXES):
                yield mesh


def candidates(
    pins: Pins, mesh: Mesh, global_batch: int, calls: int, *, whole_batch: bool,
    virtual: Sequence[int] = (),
) -> Iterator[Candidate]:  # fmt: skip
    """The micro-batch counts and schedules of one mesh; none if its ranks can't share the rows.

    `calls`: how many blocks there are to make stages of; `virtual`: the numbers of stages per rank
    to try, if they are not pinned.
    """
    if global_batch % mesh.data:
        return
    rows = global_batch // mesh.data
    counts = [1] if whole_batch else divisors(rows)
    for count in counts:
        if pins.micro_batches in (None, count):
            for schedule, stages in schedules(pins, mesh.pipeline, count, calls, virtual):
                yield Candidate(mesh, count, schedule, rows // count, stages)


def schedules(
    pins: Pins, ranks: int, micro_batches: int, calls: int, several: Sequence[int]
) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank) that the pins and the sizes allow.

    1F1B is as fast as GPipe and holds less, so GPipe is only taken when it is pinned. Without a
    pipeline there is nothing to choose; with one micro-batch only whether a stage leaves the
    weights' half of its backward until the stage before it has what it waits for.
    """
    if pins.schedule is not None:
        names: tuple[str, ...] = (pins.schedule,)
    elif ranks > 1:
        names = ("1f1b", "zero-bubble", "interleaved")
    else:
        names = ("1f1b",)
    for name in names:
        if name != "interleaved":
            if pins.virtual_stages in (None, 1):
                yield name, 1
            continue
        for virtual in several if pins.virtual_stages is None else (pins.virtual_stages,):
            fits = min(ranks, virtual) > 1 and ranks * virtual <= calls
            if fits and fits_rounds(ranks, micro_batches):
                yield name, virtual


def zero_stages(pins: Pins, candidate: Candidate) -> tuple[int, ...]:
    """The ZeRO stages that a candidate may have: nothing to divide without data ranks, and no
    scattering of whole gradients where backward is in halves."""
    most = 0 if candidate.mesh.data == 1 else 1 if splits_backward(candidate.schedule) else 3
    return tuple(z for z in ZERO_STAGES if z <= most and pins.zero in (None, z))
