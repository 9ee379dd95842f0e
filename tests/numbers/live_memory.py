"""The bytes that every rank of an emitted program holds, tracked exactly while it runs on threads.

Input: a program, its layout, a model and a batch. Output: `Measured`, each rank's most live bytes
during one step with the optimizer's state there, and what it holds between steps.
A storage counts once, for the rank that made it or was sent it, from the statement that makes it to
its last reference. What a statement needs inside (a product's copies, the kernels of `runtime.ops`)
and the batch, which lies outside of the program on a CPU, do not count; nor does what is marked as
host memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runtime import ops
from runtime.host import Hosted, store
from runtime.random import dropout
from runtime.threads import ThreadTransport
from runtime.trainer import Trainer, run_threads

OUTSIDE = -1
"""In place of a rank: what is on no device."""


@dataclass(frozen=True)
class Measured:
    """Bytes by rank: the peak of a step, and what lies there between steps."""

    peak: list[int]
    resting: list[int]


class Ledger:
    """Live bytes by rank."""

    def __init__(self, ranks: int) -> None:
        self.live, self.peak = [0] * ranks, [0] * ranks
        self._known: dict[int, int] = {}
        self._lock = threading.RLock()
        self._thread = threading.local()

    @property
    def rank(self) -> int:
        """Of this thread."""
        found: int = self._thread.rank
        return found

    def begin(self, rank: int) -> None:
        """This thread is that rank."""
        self._thread.rank = rank

    def enter(self, rank: int, tree: Any) -> None:
        """Counts the storages of all tensors in `tree` that are not known yet."""
        with self._lock:
            for tensor in tensors(tree):
                storage = tensor.untyped_storage()
                if id(storage) in self._known:
                    continue
                size = 0 if rank == OUTSIDE else storage.nbytes()
                self._known[id(storage)] = size
                weakref.finalize(storage, self._leave, id(storage), rank, size)
                self.live[rank] += size
                self.peak[rank] = max(self.peak[rank], self.live[rank])

    def _leave(self, key: int, rank: int, size: int) -> None:
        with self._lock:
            del self._known[key]
            self.live[rank] -= size

    def call(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One statement: only what it returns counts."""
        if getattr(self._thread, "inside", False):
            return function(*args, **kwargs)
        self._thread.inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._thread.inside = False
        self.enter(rank, result)
        return result

    def restart(self, rank: int) -> int:
        """Forgets the peak so far; what is live."""
        with self._lock:
            self.peak[rank] = self.live[rank]
            return self.live[rank]


class Statements(TorchFunctionMode):
    """Enters the results of every torch function that a rank calls."""

    def __init__(self, ledger: Ledger, rank: int) -> None:
        super().__init__()
        self.ledger, self.rank = ledger, rank
        ledger.begin(rank)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self.ledger.call(self.rank, func, *args, **(kwargs or {}))


class Counted:
    """A group or channel whose calls are single statements."""

    def __init__(self, inner: Any, ledger: Ledger, rank: int) -> None:
        self._inner, self._ledger, self._rank = inner, ledger, rank

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._ledger.call(self._rank, found, *args, **kwargs)


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    match tree:
        case Tensor():
            yield tree
        case dict():
            yield from tensors(list(tree.values()))
        case Hosted():
            yield from tensors(tree.buffers)
        case list() | tuple():
            for item in tree:
                yield from tensors(item)


def measured(
    program: ModuleType, layout: Mapping[str, Any], model: nn.Module, batch: tuple[Any, ...],
    ranks: int, **options: Any,
) -> Measured:  # fmt: skip
    """Two steps, the second of which is measured."""
    ledger = Ledger(ranks)
    ledger.enter(OUTSIDE, batch)
    resting = [0] * ranks

    def transport(world: Any, rank: int, device: torch.device) -> Any:
        made = ThreadTransport(world, rank, device)
        return SimpleNamespace(
            rank=rank, world_size=made.world_size, device=device, stand_by=made.stand_by,
            group=lambda members: Counted(made.group(members), ledger, rank),
            channel=lambda *ends: Counted(made.channel(*ends), ledger, rank),
        )  # fmt: skip

    def two_steps(trainer: Trainer) -> None:
        state = trainer.state
        ledger.enter(trainer.rank, [state.tensors, state.accumulators])
        with Statements(ledger, trainer.rank):
            trainer.step(*batch)
            resting[trainer.rank] = ledger.restart(trainer.rank)
            trainer.step(*batch)

    def stored(*found: Tensor) -> Hosted:
        return cast(Hosted, ledger.call(OUTSIDE, store, *found))

    with (
        whole_statements(program, ledger, stored),
        patch("runtime.trainer.ThreadTransport", transport),
        patch("runtime.optimizers.store", stored),
    ):
        run_threads(layout, program, model, ranks, two_steps, **options)
    return Measured(list(ledger.peak), resting)


@contextmanager
def whole_statements(
    program: ModuleType, ledger: Ledger, stored: Callable[..., Hosted]
) -> Iterator[None]:
    """The program calls `runtime.ops` and dropout as single statements, and stores by `stored`."""

    def whole(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            rank = ledger.rank
            return ledger.call(rank, function, *args, **kwargs)

        return call

    names = [name for name in vars(ops) if not name.startswith("_") and callable(vars(ops)[name])]
    wrapped = SimpleNamespace(**{name: whole(vars(ops)[name]) for name in names})
    found = {"ops": wrapped, "dropout": whole(dropout), "store": stored}
    before = {name: vars(program)[name] for name in found if name in vars(program)}
    vars(program).update({name: found[name] for name in before})
    try:
        yield
    finally:
        vars(program).update(before)
