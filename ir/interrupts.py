"""Ctrl-C and SIGTERM that end a command, whatever happens to the exception that they raise.

Input: a block to run in the main thread. Output: `Ended`, with the exit code, for a block in which
such a signal came. An exception out of a signal handler can be lost: in a destructor or a callback,
in C code that clears errors, or turned into another one by an import that it broke. So it is raised
again until the block is left, but not while it is being handled: cleaning up is not disturbed.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
AGAIN_S = 0.1
"""Between two looks whether the exception was lost: a person takes that for at once."""
CLEANING_S = 10.0
"""What handles it for longer is not cleaning up, but goes on; ending started ranks takes 2 s."""

EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


class Ended(KeyboardInterrupt):
    """A signal ended the block."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


@contextmanager
def orderly_end(*, is_whole_process: bool = False) -> Iterator[None]:
    """SIGINT and SIGTERM leave this block by `Ended`; only the main thread may see to that.

    `is_whole_process`: what comes after the block is Python's own end, which Ctrl-C can only
    disturb; else handlers are afterwards as they were.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch, hook = _Watch(), sys.unraisablehook
    before = {number: signal.signal(number, watch.begin) for number in _heard()}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, watch.look)
    try:
        yield
    finally:
        watch.is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # forgets one that is on its way
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_whole_process else handler)
        sys.unraisablehook = hook
        if watch.exit_code is not None:
            raise Ended(watch.exit_code) from None


def _heard() -> list[signal.Signals]:
    """Those that the process that started this one did not have ignored, as `nohup` does."""
    return [number for number in EXIT_CODES if signal.getsignal(number) != signal.SIG_IGN]


class _Watch:
    """What the handlers know: which signal came, and whether its block has been left."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.is_over = False
        self._raised_s = 0.0

    def begin(self, number: int, frame: FrameType | None) -> None:
        """The first signal counts; a further one only helps it along."""
        if self.exit_code is None:
            self.exit_code = EXIT_CODES[signal.Signals(number)]
            if not self.is_over:  # afterwards nobody would look, and the timer would be fatal
                sys.unraisablehook = _say_nothing  # a destructor's loss of it is told as one
                signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
        self.look(number, frame)

    def look(self, number: int, frame: FrameType | None) -> None:
        """Raises `Ended`, unless it is being cleaned up after."""
        if self.exit_code is None or self.is_over:
            return
        now_s = time.monotonic()
        if not _is_handled() or now_s > self._raised_s + CLEANING_S:
            self._raised_s = now_s
            raise Ended(self.exit_code)


def _say_nothing(_: Any) -> None:
    pass


def _is_handled() -> bool:
    """Whether an `except` or `finally` of an `Ended`, or of what it became, runs at present."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, Ended):
            return True
        error = error.__context__
    return False


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Ctrl-C inside counts when this is left. Processes that are started inside never hear of it:
    a terminal tells it to all, and ending them is the matter of the one that started them."""
    came: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit this
    handler = signal.getsignal(signal.SIGINT)
    is_heard = threading.current_thread() is threading.main_thread() and callable(handler)
    if is_heard:  # another thread may take the signal, and the handler would run in this one
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if came:
            signal.raise_signal(signal.SIGINT)
