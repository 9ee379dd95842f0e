"""Keeps what torch says of a model that it can't capture off the user's screen.

Where it is active torch logs and prints nothing below a critical error, and warns of nothing of its
own: a refusal says what failed. The settings before are restored, and warnings of the user's own
code go their way.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

LOGGER = logging.getLogger("torch")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Loggers below torch's own that were given a level, as by TORCH_LOGS, keep it."""
    before = LOGGER.level
    LOGGER.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(torch|contextlib)\b")  # its `with` blocks
            yield
    finally:
        LOGGER.setLevel(before)


@contextmanager
def unprinted() -> Iterator[None]:
    """Nothing is printed on stderr, where torch.export writes the half-made graph of a refusal."""
    with redirect_stderr(io.StringIO()):
        yield
