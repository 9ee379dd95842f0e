"""layout.json as frozen values: what an emitted program needs to know to run on its mesh.

`load_layout` reads the file, `parse_layout` the parsed JSON; whatever is missing, of another
version or of another type is a LayoutError that names the place. Loading executes nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from runtime.errors import LayoutError
from runtime.mesh import AXES, MeshShape
from runtime.schedule import Order, homes, read_order

FORMAT = "shardwright-layout/2"
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shard:
    """A dim, seen as (outer, rest), whose rest is cut contiguously over a mesh axis."""

    axis: str
    dim: int
    outer: int


@dataclass(frozen=True, slots=True)
class Sync:
    """One collective of a synchronisation; `dim` and `outer` mean nothing to an all_reduce."""

    op: str  # "all_reduce" | "reduce_scatter" | "all_gather" | "shard"
    axis: str
    dim: int
    outer: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that a stage's forward gives per micro-batch: the loss, a metric, a buffer update.

    `rank`: the stage's pipeline rank.
    """

    name: str
    stage: int
    rank: int
    value: str
    reduce: str  # "sum" over the micro-batches | "keep" the last one
    sync: tuple[Sync, ...]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One parameter, buffer or constant; tied names are one entry.

    `ranks`: the pipeline ranks of the `stages` that hold it; stages of one rank share one tensor.
    `zero`: what the data axis divides in flat pieces (`runtime.zero`).
    """

    names: tuple[str, ...]
    kind: str  # "parameter" | "buffer" | "constant"
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    shards: tuple[Shard, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    gradient_shards: tuple[Shard, ...]
    sync: tuple[Sync, ...]
    update: Scalar | None
    zero: int = 0  # 1: the optimizer's state, 2: the gradient too, 3: the parameter too
    hosted: bool = False  # whether the optimizer's state lies in host memory between steps


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the batch, global shape. `path` (optional) finds it instead of its number."""

    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    path: str | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that goes from one stage to another, in each micro-batch; local shape."""

    value: str
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool  # whether a gradient of this dtype comes back
    gradient_shape: tuple[int, ...]  # its local shape: it may be cut otherwise than the value


@dataclass(frozen=True, slots=True)
class StageLayout:
    """What one pipeline stage holds, reads, receives and sends."""

    weights: Mapping[str, Any]  # nested dicts and lists; leaves are indices into the state
    inputs: tuple[str, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    has_prologue: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole layout.json. `order`: what each pipeline rank computes; `homes`: of each stage its
    pipeline rank; `plain`: the text of the batch's numbers, words and other plain values by path,
    which are part of the program, if the file has them."""

    plan: str
    mesh: MeshShape
    order: Order
    homes: tuple[int, ...]
    micro_batches: int
    global_batch: int
    state: tuple[StateEntry, ...]
    inputs: tuple[Input, ...]
    stages: tuple[StageLayout, ...]
    loss: Scalar
    metrics: tuple[Scalar, ...]
    plain: Mapping[str, str] | None = None


def load_layout(path: Path | str) -> Layout:
    """The layout in a file."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"can't read {path}: {error.strerror}; emit the program.") from error
    except ValueError as error:
        raise LayoutError(
            f"{path} is not JSON ({error}); was it cut short? Emit the program again."
        ) from error
    return parse_layout(table)


def parse_layout(table: Any) -> Layout:
    """The layout in a parsed JSON object."""
    if not isinstance(table, Mapping) or "format" not in table:
        raise LayoutError(f'this is no layout.json: it has no "format": "{FORMAT}".')
    if table["format"] != FORMAT:
        raise LayoutError(
            f'the layout has format "{table["format"]}" and this runtime reads '
            f'"{FORMAT}". Emit the program again with the version that is installed.'
        )
    root = _Table(table, "layout.json")
    mesh, micro_batches = root.table("mesh"), root.count("micro_batches")
    stages = root.items("stages", _stage)
    rows = root.table("schedule").sequence("order", str)
    order = read_order(rows, stages=len(stages), micro_batches=micro_batches)
    ranks = homes(order)
    layout = Layout(
        plan=root.text("plan"),
        mesh=MeshShape(*(mesh.count(axis) for axis in AXES)),
        order=order,
        homes=ranks,
        micro_batches=micro_batches,
        global_batch=root.count("global_batch"),
        state=root.items("state", lambda t: _state_entry(t, ranks)),
        inputs=root.items("inputs", _input),
        stages=stages,
        loss=_scalar(root.table("loss"), "loss", ranks),
        metrics=root.items("metrics", lambda t: _scalar(t, t.text("name"), ranks)),
        plain=_plain(root),
    )
    _check_references(layout)
    return layout


def _check_references(layout: Layout) -> None:
    """The numbers and names that one table uses of another exist there."""
    stages, entries = len(layout.stages), len(layout.state)
    if len(layout.order) != layout.mesh.pipeline:
        raise LayoutError(
            f"layout.json has an order for {len(layout.order)} ranks and {stages} stages for "
            f"pipeline={layout.mesh.pipeline}."
        )
    for number, stage in enumerate(layout.stages):
        for entry in weight_indices(stage.weights):
            if not 0 <= entry < entries or number not in layout.state[entry].stages:
                raise LayoutError(f"layout.json: stage {number} has no state entry {entry}.")
        if unknown := set(stage.inputs) - {x.name for x in layout.inputs}:
            raise LayoutError(f"layout.json: stage {number} reads unknown inputs {unknown}.")
    sent = {(i, t.peer, t.value, *_kind(t)) for i, s in enumerate(layout.stages) for t in s.sends}
    taken = {
        (t.peer, i, t.value, *_kind(t)) for i, s in enumerate(layout.stages) for t in s.receives
    }
    if differing := sorted(sent ^ taken, key=str):
        source, target, value = differing[0][:3]
        raise LayoutError(
            f'layout.json: stage {source} and stage {target} disagree about sending "{value}".'
        )
    pieces = layout.mesh.data * layout.micro_batches
    for x in layout.inputs:
        if x.batch_dim is not None and x.shape[x.batch_dim] % pieces:
            raise LayoutError(
                f'layout.json: {x.shape[x.batch_dim]} rows of input "{x.name}" don\'t divide by '
                f"data {layout.mesh.data} x micro_batches {layout.micro_batches}."
            )


def _kind(transfer: Transfer) -> tuple[object, ...]:
    return transfer.shape, transfer.dtype, transfer.gradient, transfer.gradient_shape


def weight_indices(tree: Any) -> list[int]:
    """The leaves of a "weights" tree."""
    match tree:
        case Mapping():
            return [leaf for branch in tree.values() for leaf in weight_indices(branch)]
        case list():
            return [leaf for branch in tree for leaf in weight_indices(branch)]
        case int():
            return [tree]
    raise LayoutError(f'layout.json: "weights" holds {tree!r}, no number of an entry.')


def _state_entry(t: "_Table", ranks: Sequence[int]) -> StateEntry:
    names, stages = tuple(t.sequence("names", str)), tuple(t.sequence("stages", int))
    update = t.table("update") if t.get("update") is not None else None
    entry = StateEntry(
        names=names,
        kind=t.one_of("kind", ("parameter", "buffer", "constant")),
        shape=tuple(t.sequence("shape", int)),
        dtype=t.dtype("dtype"),
        trainable=t.value("trainable", bool),
        shards=t.items("shards", _shard),
        stages=stages,
        ranks=tuple(sorted({_rank_of(stage, ranks, t) for stage in stages})),
        gradient_shards=t.items("gradient_shards", _shard),
        sync=t.items("sync", _sync),
        update=_scalar(update, names[0], ranks) if update else None,
        zero=0 if t.get("zero") is None else t.value("zero", int),
        hosted=False if t.get("hosted") is None else t.value("hosted", bool),
    )
    _check_zero(entry, t.place)
    return entry


def _check_zero(entry: StateEntry, place: str) -> None:
    """Only parameters are divided, and not along the data axis in another way as well."""
    cut = {cutting.axis for cutting in (*entry.shards, *entry.gradient_shards)}
    moved = {step.axis for step in entry.sync if step.op != "all_reduce"}
    if entry.zero not in (0, 1, 2, 3):
        raise LayoutError(f'{place}: "zero" is {entry.zero}, not 0, 1, 2 or 3.')
    if entry.zero and (entry.kind != "parameter" or "data" in cut | moved):
        raise LayoutError(
            f'{place}: "zero" is {entry.zero} for a {entry.kind} that is not a parameter whole on '
            "every data rank. Emit the program again."
        )


def _shard(t: "_Table") -> Shard:
    return Shard(t.one_of("axis", AXES), t.value("dim", int), t.count("outer"))


def _sync(t: "_Table") -> Sync:
    op = t.one_of("op", ("all_reduce", "reduce_scatter", "all_gather", "shard"))
    axis = t.one_of("axis", AXES)
    if op == "all_reduce":
        return Sync(op, axis, 0, 1)
    return Sync(op, axis, t.value("dim", int), t.count("outer"))


def _scalar(t: "_Table", name: str, ranks: Sequence[int]) -> Scalar:
    stage, reduce = t.value("stage", int), t.one_of("reduce", ("sum", "keep"))
    rank = _rank_of(stage, ranks, t)
    return Scalar(name, stage, rank, t.text("value"), reduce, t.items("sync", _sync))


def _rank_of(stage: int, ranks: Sequence[int], t: "_Table") -> int:
    if not 0 <= stage < len(ranks):
        raise LayoutError(f"{t.place} is on stage {stage}, and there are {len(ranks)} stages.")
    return ranks[stage]


def _plain(root: "_Table") -> Mapping[str, str] | None:
    if root.get("plain") is None:
        return None
    return dict(root.items("plain", lambda t: (t.text("path"), t.text("value"))))


def _input(t: "_Table") -> Input:
    batch_dim = None if t.get("batch_dim") is None else t.value("batch_dim", int)
    path = None if t.get("path") is None else t.text("path")
    shape = tuple(t.sequence("shape", int))
    return Input(t.text("name"), t.value("index", int), shape, t.dtype("dtype"), batch_dim, path)


def _stage(t: "_Table") -> StageLayout:
    return StageLayout(
        weights=t.value("weights", dict),
        inputs=tuple(t.sequence("inputs", str)),
        receives=t.items("receives", lambda r: _transfer(r, "from")),
        sends=t.items("sends", lambda s: _transfer(s, "to")),
        has_prologue=t.value("has_prologue", bool),
    )


def _transfer(t: "_Table", peer: str) -> Transfer:
    shape = tuple(t.sequence("shape", int))
    gradient = t.value("gradient", bool)
    back = shape if t.get("gradient_shape") is None else tuple(t.sequence("gradient_shape", int))
    return Transfer(t.text("value"), t.value(peer, int), shape, t.dtype("dtype"), gradient, back)


@dataclass(frozen=True, slots=True)
class _Table:
    """A JSON object and where it stands; every reader checks a type and names the place."""

    data: Mapping[str, Any]
    place: str

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def value(self, key: str, kind: type[Item]) -> Item:
        if key not in self.data:
            raise LayoutError(f'{self.place} has no "{key}"; emit the program again.')
        found = self.data[key]
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise LayoutError(f'{self.place}: "{key}" is {found!r}, not of type {kind.__name__}.')
        return found

    def text(self, key: str) -> str:
        return self.value(key, str)

    def count(self, key: str) -> int:
        found = self.value(key, int)
        if found < 1:
            raise LayoutError(f'{self.place}: "{key}" is {found}, less than 1.')
        return found

    def one_of(self, key: str, allowed: Sequence[str]) -> str:
        found = self.text(key)
        if found not in allowed:
            raise LayoutError(f'{self.place}: "{key}" is "{found}", not one of {list(allowed)}.')
        return found

    def dtype(self, key: str) -> torch.dtype:
        found = getattr(torch, self.text(key), None)
        if not isinstance(found, torch.dtype):
            raise LayoutError(f'{self.place}: "{key}" is "{self.text(key)}", not a torch dtype.')
        return found

    def table(self, key: str) -> "_Table":
        return _Table(self.value(key, dict), f"{self.place} {key}")

    def sequence(self, key: str, kind: type[Item]) -> list[Item]:
        found = self.value(key, list)
        if not all(isinstance(item, kind) for item in found):
            raise LayoutError(f'{self.place}: "{key}" is {found!r}, not a list of {kind.__name__}.')
        return found

    def items(self, key: str, read: Callable[["_Table"], Item]) -> tuple[Item, ...]:
        found = self.sequence(key, dict)
        return tuple(read(_Table(t, f"{self.place} {key}[{i}]")) for i, t in enumerate(found))
