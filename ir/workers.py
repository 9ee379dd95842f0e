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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
_Told: TypeAlias = tuple[int, Any, float]  # number of a request, its answer, seconds that it took


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
        self._copies: list[tuple[BaseProcess, _Pipe]] = []
        self._owners: dict[Hashable, int] = {}
        self._busy_s: dict[int, float] = {0: 0.0}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Makes the copies, where that can be done."""
        if self._copies or self.processes == 1 or not can_fork():
            return
        self._owners = {}
        with held_interrupts():  # none is to be made that `close` does not know of
            for number in range(1, self.processes):
                self._copies.append(self._copy())
                self._busy_s[number] = 0.0

    def _copy(self) -> tuple[BaseProcess, _Pipe]:
        context = get_context("fork")
        mine, other = (_Pipe(end, self.shared) for end in context.Pipe())
        unused = [mine, *(pipe for _, pipe in self._copies)]
        copy = context.Process(target=_answer, args=(self.serve, other, unused), daemon=True)
        with warnings.catch_warnings():  # of threads that are not Python's: they hold no lock
            warnings.simplefilter("ignore", DeprecationWarning)
            copy.start()
        other.close()
        return copy, mine

    def close(self) -> None:
        """Ends the copies."""
        for copy, pipe in self._copies:
            pipe.close()
            copy.kill()
            copy.join()
        self._copies, self._owners, self._busy_s = [], {}, {0: 0.0}

    def answers(self, requests: Sequence[Request], until_s: float = inf) -> list[Any]:
        """What `serve` returns for each; None for those not begun by `until_s`, of `monotonic`. The
        first error that it raises is raised here."""
        shares = self._shares(requests)
        for number, (_, pipe) in enumerate(self._copies, start=1):
            if shares[number]:
                pipe.ask([(n, requests[n][1]) for n in shares[number]], until_s)
        told = [_told(self.serve, n, requests[n][1], until_s) for n in shares[0]]
        self._busy_s[0] += sum(seconds for *_, seconds in told)
        for number in range(1, len(self._copies) + 1):
            told += self._received(number, [(n, requests[n][1]) for n in shares[number]], until_s)
        found = {n: answer for n, answer, _ in told}
        for n in range(len(requests)):
            if isinstance(found[n], _Failed):
                raise found[n].error
        return [found[n] for n in range(len(requests))]

    def _shares(self, requests: Sequence[Request]) -> list[list[int]]:
        """By process the requests that it answers: a new key goes to the process with the fewest of
        these, and of equal ones to that which has been busy least long."""
        shares: list[list[int]] = [[] for _ in self._busy_s]
        for n, (key, _) in enumerate(requests):
            if key not in self._owners:
                self._owners[key] = min(
                    self._busy_s, key=lambda p: (len(shares[p]), self._busy_s[p], p)
                )
            shares[self._owners[key]].append(n)
        return shares

    def _received(
        self, number: int, asked: Sequence[tuple[int, Any]], until_s: float
    ) -> list[_Told]:
        """The answers of a copy; what it did not answer before it was killed is answered here."""
        pipe, told = self._copies[number - 1][1], list[_Told]()
        try:
            told += [pipe.recv() for _ in asked]
        except (EOFError, OSError):
            left = asked[len(told):]
            self._owners = {k: 0 if p == number else p for k, p in self._owners.items()}
            told += [_told(self.serve, n, request, until_s) for n, request in left]
        self._busy_s[number] += sum(seconds for *_, seconds in told)
        return told


@contextmanager
def ahead(function: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Begins to call a function in a copy of this process; inside, what this yields waits for its
    answer. Where no copy can be made, or its answer can't be copied, that calls the function."""
    with Workers(lambda _: function(), 2) as workers:
        workers.start()
        if not workers._copies:
            yield function
            return
        asked = [(0, None)]
        workers._copies[0][1].ask(asked, inf)

        def answer() -> T:
            ((_, found, _),) = workers._received(1, asked, inf)
            if isinstance(found, _Failed):
                raise found.error
            return cast(T, found)

        yield answer


class _Pipe:
    """One end of a pipe between copies of a process, which both have the `shared` objects."""

    def __init__(self, end: Connection, shared: Sequence[object]) -> None:
        self.end, self.shared = end, shared
        self.numbers = {id(item): number for number, item in enumerate(shared)}

    def ask(self, requests: Sequence[tuple[int, Any]], until_s: float) -> None:
        """Sends requests to a copy; if it was killed, `Workers._received` answers instead."""
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


def _told(serve: Callable[[Any], Any], number: int, request: Any, until_s: float) -> _Told:
    start_s = monotonic()
    if start_s > until_s:
        return number, None, 0.0
    try:
        answer = serve(request)
    except Exception as error:
        answer = _Failed(error)
    return number, answer, monotonic() - start_s


def _answer(serve: Callable[[Any], Any], pipe: _Pipe, unused: list[_Pipe]) -> None:
    """A copy: answers until the other process closes the pipe, or is gone, or an answer can't be
    sent: then the other one answers itself."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who made it ends it so
    for other in unused:
        other.close()
    try:
        while True:
            asked, until_s = pipe.recv()
            for number, request in asked:
                pipe.send(_told(serve, number, request, until_s))
    except Exception:
        return
