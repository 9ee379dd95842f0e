"""Work shared with copies of this process.

Input: a function of requests, requests with keys. Output: their answers, in order. All requests
with one key are answered by one process, in the order in which they are made, so a function that
goes on from earlier requests of a key gives the same answers in any number of processes.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, current_process
from time import monotonic
from typing import Any, TypeAlias, TypeVar, cast

from ir.interrupts import held_interrupts

MOST = 4
"""Processes that are used where no number is given."""

T = TypeVar("T")
Request: TypeAlias = tuple[Hashable, Any]


@dataclass(eq=False)
class Asked:
    """Requests that are being answered, by their numbers."""

    requests: Sequence[Request]
    until_s: float
    found: dict[int, Any] = field(default_factory=dict)

    @property
    def is_answered(self) -> bool:
        return len(self.found) == len(self.requests)


_Open: TypeAlias = tuple[Asked, int]


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_fork() -> bool:
    """Whether a copy of this process goes on as this one would: on Linux, without other threads of
    Python but daemons, since what another one has locked stays locked in the copy."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread()]
    is_alone = all(thread.daemon for thread in others)
    return sys.platform == "linux" and is_alone and not current_process().daemon


class Workers:
    """Answers requests in this process and, once `start` has been called, in copies of it. A copy
    knows what this process knew then. Ends them when it is closed, or left as a context."""

    def __init__(
        self, serve: Callable[[Any], Any], processes: int | None = None,
        shared: Iterable[object] = (),
    ) -> None:  # fmt: skip
        """`processes`: this one and copies; by default as many as there are cores, `MOST` at
        most. `shared`: objects that requests and answers refer to, and do not copy."""
        self.serve, self.shared = serve, tuple(shared)
        self.processes = processes or min(MOST, usable_cores())
        self._copies: list[_Copy] = []
        self._owners: dict[Hashable, int] = {}
        self._mine: deque[_Open] = deque()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Makes the copies, where that can be done. What was asked before stays with this process,
        and so do its keys until then."""
        if self._copies or self.processes == 1 or not can_fork():
            return
        self._owners = {asked.requests[n][0]: 0 for asked, n in self._mine}
        with held_interrupts():  # none is to be made that `close` does not know of
            for _ in range(1, self.processes):
                self._copies.append(self._copy())

    def _copy(self) -> _Copy:
        context = get_context("fork")
        mine, other = (_Pipe(end, self.shared) for end in context.Pipe())
        unused = [mine, *(copy.pipe for copy in self._copies)]
        copy = context.Process(target=_answer, args=(self.serve, other, unused), daemon=True)
        with warnings.catch_warnings():  # of threads that are not Python's: they hold no lock
            warnings.simplefilter("ignore", DeprecationWarning)
            copy.start()
        other.close()
        return _Copy(copy, mine)

    def close(self) -> None:
        """Ends the copies."""
        for copy in self._copies:
            copy.pipe.close()
            copy.process.kill()
            copy.process.join()
        self._copies, self._owners = [], {}
        self._mine.clear()

    def answers(self, requests: Sequence[Request], until_s: float = inf) -> list[Any]:
        """What `serve` returns for each; None for those not begun by `until_s`, of `monotonic`. The
        first error that it raises is raised here."""
        return self.finish(self.ask(requests, until_s))

    def ask(self, requests: Sequence[Request], until_s: float = inf) -> Asked:
        """Begins to answer: copies at once, this process in `finish`. What is asked later is
        answered later, so a few of these at once let no process wait for the others."""
        asked = Asked(requests, until_s)
        shares: list[list[int]] = [[] for _ in range(1 + len(self._copies))]
        for n, (key, _) in enumerate(requests):
            shares[self._owner(key)].append(n)
        self._mine += [(asked, n) for n in shares[0]]
        for copy, share in zip(self._copies, shares[1:], strict=True):
            copy.open += [(asked, n) for n in share]
            if share:
                copy.pipe.ask([requests[n][1] for n in share], until_s)
        return asked

    def _owner(self, key: Hashable) -> int:
        """The process that answers a key; new keys go round, so that neighbours, which are about as
        much work, are shared. This process, which has more to do than answers, comes last."""
        if key not in self._owners:
            self._owners[key] = -(1 + len(self._owners)) % (1 + len(self._copies))
        return self._owners[key]

    def finish(self, asked: Asked) -> list[Any]:
        """The answers, as `answers` has them. While others work on theirs, this process goes on
        with its own."""
        while not asked.is_answered:
            waited = [copy for copy in self._copies if any(a is asked for a, _ in copy.open)]
            ready = next((copy for copy in waited if copy.pipe.end.poll()), None)
            if ready is None and self._mine:
                self._serve()
            else:
                self._receive(ready or waited[0])
        found = [asked.found[n] for n in range(len(asked.requests))]
        for answer in found:
            if isinstance(answer, _Failed):
                raise answer.error
        return found

    def _serve(self) -> None:
        asked, n = self._mine.popleft()
        asked.found[n] = _told(self.serve, asked.requests[n][1], asked.until_s)

    def _receive(self, copy: _Copy) -> None:
        """The next answer of a copy; what it did not answer before it was killed is answered by
        this process, before what was asked of this one later."""
        try:
            answer = copy.pipe.recv()
        except (EOFError, OSError):
            number = 1 + self._copies.index(copy)
            self._owners = {k: 0 if p == number else p for k, p in self._owners.items()}
            self._mine.extendleft(reversed(copy.open))
            copy.open.clear()
            return
        asked, n = copy.open.popleft()
        asked.found[n] = answer


@contextmanager
def ahead(function: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Begins to call a function in a copy of this process; inside, what this yields waits for its
    answer. Where no copy can be made, or its answer can't be copied, that calls the function."""
    with Workers(lambda _: function(), 2) as workers:
        workers.start()
        if not workers._copies:
            yield function
            return
        workers._owners = {"ahead": 1}
        asked = workers.ask([("ahead", None)])
        yield lambda: cast(T, workers.finish(asked)[0])


@dataclass(eq=False)
class _Copy:
    """A copy of this process, and what it was asked and did not answer yet, in order."""

    process: BaseProcess
    pipe: _Pipe
    open: deque[_Open] = field(default_factory=deque)


class _Pipe:
    """One end of a pipe between copies of a process, which both have the `shared` objects."""

    def __init__(self, end: Connection, shared: Sequence[object]) -> None:
        self.end, self.shared = end, shared
        self.numbers = {id(item): number for number, item in enumerate(shared)}

    def ask(self, requests: Sequence[Any], until_s: float) -> None:
        """Sends requests to a copy; if it was killed, `Workers._receive` sees to them."""
        with suppress(OSError):
            self.send((requests, until_s))

    def send(self, message: object) -> None:
        numbers, written = self.numbers, io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, item: object) -> int | None:
                return numbers.get(id(item))

        Pickler(written, pickle.HIGHEST_PROTOCOL).dump(message)
        self.end.send_bytes(written.getbuffer())

    def recv(self) -> Any:
        shared = self.shared

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: int) -> object:
                return shared[number]

        return Unpickler(io.BytesIO(self.end.recv_bytes())).load()

    def close(self) -> None:
        self.end.close()


class _Failed:
    """An error in place of an answer."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _told(serve: Callable[[Any], Any], request: Any, until_s: float) -> Any:
    """An answer, or None where it is too late, or what it failed with."""
    if monotonic() > until_s:
        return None
    try:
        return serve(request)
    except Exception as error:
        return _Failed(error)


def _answer(serve: Callable[[Any], Any], pipe: _Pipe, unused: list[_Pipe]) -> None:
    """A copy: answers until the other process closes the pipe, or is gone, or an answer can't be
    sent: then the other one answers itself."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who made it ends it so
    for other in unused:
        other.close()
    try:
        while True:
            asked, until_s = pipe.recv()
            for request in asked:
                pipe.send(_told(serve, request, until_s))
    except Exception:
        return
