"""Python's garbage collector, paused while a large structure is being made.

Tracing and planning make many small objects that live until the end: looking through them again
and again takes a fifth of the time and frees next to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No automatic collection inside; as it was afterwards, but what was made counts as old: else
    the first collection, at once, would look through all of it. Also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # to the oldest generation, from which a full collection frees it
            gc.enable()
