"""Keeps what a solver's library prints by itself off the standard output.

HiGHS prints a line of its own at some integer solutions ("HighsMipSolverData::..."), whatever it is
told; a plan written as JSON must not have it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LIBC = ctypes.CDLL(None)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, file descriptor 1 leads nowhere: for C and C++, and for all threads."""
    if sys.stdout is not None:
        sys.stdout.flush()
    _LIBC.fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        _LIBC.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
