"""Folding: repeated siblings are captured once.

Children of one container that are alike (same classes, parameters, buffers and attributes, except
an integer equal to their own index) form a family. A dry run on fake tensors at two batch sizes
records how each member is called and which operations it runs; while the whole model is exported
every member is then one opaque call with the recorded result types. A 126-layer model exports in
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ir.errors import CaptureError
from ir.trace.adapters import flatten, unflatten
from ir.trace.carried import OWN, PLAIN
from ir.trace.library import CALL_SIGNATURE
from ir.trace.operations import Operations, Outside, tensors_of
from ir.trace.step import named_tensors


def families(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of module paths that are alike, two or more each; outermost containers only."""
    found: list[tuple[str, ...]] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(path.startswith(member + ".") for group in found for member in group):
            continue
        groups: dict[Any, list[str]] = {}
        counters = _index_attributes(module)
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                member = f"{path}.{name}" if path else name
                groups.setdefault(likeness(child, counters), []).append(member)
        found += [tuple(group) for group in groups.values() if len(group) > 1]
    return found


def _index_attributes(container: nn.Module) -> frozenset[tuple[str, str]]:
    """(path, attribute) of the integers that are each child's own index in all children."""
    values: dict[tuple[str, str], set[bool]] = {}
    for index, child in enumerate(container.children()):
        for path, part in child.named_modules():
            for key, value in vars(part).items():
                if type(value) is int:
                    values.setdefault((path, key), set()).add(value == index)
    return frozenset(place for place, found in values.items() if found == {True})


def likeness(module: nn.Module, counters: frozenset[tuple[str, str]]) -> tuple[Any, ...]:
    """What two siblings must share to be captured as one; `counters` hold their own index."""
    parts: list[Any] = []
    for path, part in module.named_modules():
        own = tuple(
            (k, "its index" if (path, k) in counters else _comparable(v))
            for k, v in sorted(vars(part).items()) if k not in OWN
        )
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        types = tuple(
            (n, tuple(t.shape), str(t.dtype), t.requires_grad, type(t).__name__)
            for n, t in tensors
        )
        parts.append((path, type(part), own, types, tuple(map(id, part._forward_hooks.values()))))
    return tuple(parts)


def _comparable(value: Any) -> Any:
    """Equal for equal plain values and collections of them; else only for the same object."""
    match value:
        case dict():
            return "dict", tuple((repr(k), _comparable(v)) for k, v in value.items())
        case list() | tuple():
            return type(value).__name__, tuple(map(_comparable, value))
        case int() | float() | str() | torch.dtype() | torch.device() | None:
            return type(value).__name__, repr(value)
        case _:
            return id(value)


class Entangled(CaptureError):
    """A member of a family reads or changes what others do, beside its arguments and results, or
    is called otherwise than when it was seen alone."""


@dataclass
class Record:
    """One call of a folded member: how it was called, what it ran and what came out."""

    path: str
    family: int
    module: nn.Module
    spec: Any
    leaves: list[Any]
    rows: int
    operations: str = ""
    has_more: bool = False
    """Whether it reads tensors that are neither arguments nor its module's own state."""
    out_spec: Any = None
    out_leaves: list[Any] = field(default_factory=list)
    input_sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    output_sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        """Each once: of a tensor that is given several times all gradients add up."""
        return distinct(self.leaves)

    def watched(self) -> Operations:
        """For a run of it."""
        inputs = {f"input {i}": x for i, x in enumerate(self.inputs)}
        return Operations(inputs | dict(named_state(self.module)))

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """The member's (args, kwargs) with these tensors in place of the recorded ones."""
        supply = dict(zip(map(id, self.inputs), tensors, strict=True))
        return unflatten([supply.get(id(x), x) for x in self.leaves], self.spec)

    @property
    def names(self) -> list[str]:
        """Names of the input tensors, after the parameters of the member's forward."""
        args, kwargs = unflatten(self.leaves, self.spec)
        names = dict[int, str]()
        for name, _, tensor in named_tensors(self.module, args, kwargs):
            names.setdefault(id(tensor), name)
        return list(names.values())

    @property
    def call(self) -> tuple[Any, ...]:
        """The family, and what its member was called with: literals, types of tensors, and which
        of those are the same."""
        return self.family, str(self.spec), *map(_word, self.leaves), *places(self.leaves)

    def is_called_by(self, path: str, leaves: list[Any], spec: Any) -> bool:
        """Whether another run calls this member in the same way, but for sizes of tensors: literals
        that depend on those are none."""
        return (
            path == self.path and str(spec) == str(self.spec)
            and places(leaves) == places(self.leaves)
            and list(map(_kind, leaves)) == list(map(_kind, self.leaves))
        )  # fmt: skip

    @property
    def made(self) -> tuple[Any, ...]:
        """What came out: literals and types of tensors."""
        return str(self.out_spec), *map(_word, self.out_leaves)

    @property
    def variant(self) -> tuple[Any, ...]:
        """Calls with the same variant share one captured block."""
        return *self.call, self.operations


def distinct(leaves: list[Any]) -> list[Tensor]:
    """The tensors among them, each once."""
    return list({id(x): x for x in tensors_of(leaves)}.values())


def places(leaves: list[Any]) -> list[int]:
    """Of every tensor among them, which of the distinct ones it is."""
    numbers = {id(x): n for n, x in enumerate(distinct(leaves))}
    return [numbers[id(x)] for x in tensors_of(leaves)]


def _word(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


def _kind(leaf: Any) -> str:
    """As `_word`, without sizes, and without what an object calls itself."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dim()} dims of {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, (*PLAIN, torch.SymInt, torch.dtype)) else "an object"


_PENDING: dict[str, Record] = {}
# torch leaves these two calls untyped
_LIBRARY = torch.library.Library("shardwright_fold", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(CALL_SIGNATURE)  # type: ignore[no-untyped-call]


def _opaque(xs: list[Tensor], key: str) -> list[Tensor]:
    record = _PENDING[key]
    results = []
    for leaf, sizes in zip(tensors_of(record.out_leaves), record.output_sizes, strict=True):
        shape = [_size(pair, record.input_sizes, xs) for pair in zip(*sizes, strict=True)]
        results.append(xs[0].new_empty(shape, dtype=leaf.dtype))
    return results


torch.library.register_fake("shardwright_fold::call", _opaque, lib=_LIBRARY)
OPAQUE = torch.ops.shardwright_fold.call.default


def _size(pair: tuple[int, int], input_sizes: list[Any], xs: list[Tensor]) -> Any:
    """A result size from the sizes at two batch sizes: constant, or a multiple of an input dim."""
    if pair[0] == pair[1]:
        return pair[0]
    for x, (small, large) in zip(xs, input_sizes, strict=True):
        for dim, (a, b) in enumerate(zip(small, large, strict=True)):
            if a != b and pair[0] * b == pair[1] * a:
                return x.shape[dim] * pair[0] // a if pair[0] != a else x.shape[dim]
    raise RuntimeError(f"no input of the block explains a result size of {pair}")


def named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, tied ones under each of their names."""
    return [*module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False)]  # fmt: skip


def marks_of(model: nn.Module) -> tuple[str, ...]:
    """What a program depends on of a model beside its code: whether modules train, the options of
    torch's own ones, and the state with what of it is trained or tied."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(tensor), name) for name, tensor in named_state(model)}
    return (
        *(f"{name or 'the model'}: {type(part).__qualname__}({_options(part)})"
          f"{'' if part.training else ' in eval mode'}" for name, part in model.named_modules()),
        *(f"{name}: {tuple(tensor.shape)} {tensor.dtype}"
          f"{' trained' if tensor.requires_grad else ''}"
          f"{f' (is {tied[name]})' if tied[name] != name else ''}"
          for name, tensor in named_state(model)),
    )  # fmt: skip


def _options(part: nn.Module) -> str:
    return part.extra_repr() if type(part).__module__.startswith("torch.nn.") else ""


class Recorder:
    """Replaces the forward of every family member; see the module's docstring."""

    def __init__(self, model: nn.Module, groups: list[tuple[str, ...]], rows: int):
        self.model, self.groups, self.rows = model, groups, rows
        self.records: list[Record] = []
        self.known: dict[Any, Record] = {}
        self.position = 0
        self.phase = "record"
        self.outside: Outside | None = None
        self.hidden: tuple[str, ...] = ()
        """Members whose own tensors only they use; export need not see those."""

    @contextmanager
    def installed(self, phase: str) -> Iterator[None]:
        """`record` or `every` at the first batch size, `resize` at the second, `opaque` during
        export. `record` takes equal calls of a family to do the same, `every` runs each, `replay`
        none: they give what they gave before."""
        self.phase, self.position = phase, 0
        members = [(i, path) for i, group in enumerate(self.groups) for path in group]
        for family, path in members:
            module = self.model.get_submodule(path)
            module.forward = self._stub(family, path, module, module.forward)
        try:
            yield
        finally:
            for _, path in members:
                del self.model.get_submodule(path).forward
            _PENDING.clear()

    def _stub(self, family: int, path: str, module: nn.Module, forward: Any) -> Any:
        def stub(*args: Any, **kwargs: Any) -> Any:
            with self.outside.paused() if self.outside else nullcontext():
                leaves, spec = flatten((args, kwargs))
                if self.phase in ("record", "every"):
                    record = Record(path, family, module, spec, leaves, self.rows)
                    return self._record(record, partial(forward, *args, **kwargs))
                record = self._next(path, leaves, spec)
                if self.phase == "resize":
                    return self._resize(record, forward, leaves, spec)
                if self.phase == "replay":
                    return self._again(record)
                key = str(self.position - 1)
                _PENDING[key] = record
                return self._results(record, OPAQUE(distinct(leaves), key))

        return stub

    def _next(self, path: str, leaves: list[Any], spec: Any) -> Record:
        """What was recorded of the call that is next."""
        self.position += 1
        if self.position <= len(self.records):
            record = self.records[self.position - 1]
            if record.is_called_by(path, leaves, spec):
                return record
        raise Entangled(f"{path} is called otherwise than before")

    def check_all_called(self) -> None:
        """After a run that follows what was recorded."""
        if self.position < len(self.records):
            raise Entangled(f"{self.records[self.position].path} is called no more")

    def _record(self, record: Record, run: Callable[[], Any]) -> Any:
        """The caller's own arguments are given: what is put into them is found there."""
        known = self.known.setdefault(record.call, record)
        if known is record or self.phase == "every":
            with record.watched() as seen:
                record.out_leaves, record.out_spec = flatten(run())
            record.operations, record.has_more = seen.digest, bool(seen.foreign)
        else:
            record.out_leaves, record.out_spec = known.out_leaves, known.out_spec
            record.operations = known.operations
        self.records.append(record)
        self.position += 1
        return self._again(record)

    def _again(self, record: Record) -> Any:
        return self._results(record, [torch.empty_like(t) for t in tensors_of(record.out_leaves)])

    def _resize(self, record: Record, forward: Any, leaves: list[Any], spec: Any) -> Any:
        """Runs once per variant; pairs the sizes at both batch sizes."""
        twin = next((r for r in self.records if r.variant == record.variant), record)
        if not twin.output_sizes:
            args, kwargs = unflatten(leaves, spec)
            outputs = tensors_of(flatten(forward(*args, **kwargs))[0])
            twin.input_sizes = _pairs(record.inputs, distinct(leaves))
            twin.output_sizes = _pairs(tensors_of(record.out_leaves), outputs)
        record.input_sizes, record.output_sizes = twin.input_sizes, twin.output_sizes
        like = zip(tensors_of(record.out_leaves), record.output_sizes, strict=True)
        return self._results(record, [t.new_empty(large) for t, (_, large) in like])

    def _results(self, record: Record, tensors: list[Tensor]) -> Any:
        for number, tensor in enumerate(tensors):
            if self.outside:
                self.outside.know(f"result {number} of call {len(self.outside.words)}", tensor)
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(x, Tensor) else x for x in record.out_leaves]
        return unflatten(leaves, record.out_spec)


def _pairs(small: list[Tensor], large: list[Tensor]) -> list[Any]:
    return [(tuple(a.shape), tuple(b.shape)) for a, b in zip(small, large, strict=True)]
