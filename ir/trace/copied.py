"""A function that runs in a copy of this process while a trace goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch

from ir.workers import ahead

T = TypeVar("T")


def meanwhile(function: Callable[[], T]) -> AbstractContextManager[Callable[[], T]]:
    """`ir.workers.ahead` for a function that calls torch."""
    return ahead(partial(_on_one_thread, function))


def _on_one_thread(function: Callable[[], T]) -> T:
    """Torch's other threads are not copied with the process: it would wait for them for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)
