"""The command's entry: `shardwright`, and `python -m shardwright`.

Importing torch takes seconds; Ctrl-C meanwhile ends the command with one line, as it does later.
That is why the import stands in the function. Nearly everything that a command makes lives until
its end: the collector is not to look through it, neither during imports nor as Python ends.
"""

import gc
import os
import sys
from contextlib import suppress
from typing import NoReturn

from ir.collector import paused_collector
from ir.interrupts import INTERRUPTED, TERMINATED, orderly_end

LAST_WORDS = {INTERRUPTED: "interrupted", TERMINATED: "ended by SIGTERM"}


def main() -> int:
    """The command's exit code; the process ends here if a signal ended the command."""
    try:
        with orderly_end(is_whole_process=True):
            with paused_collector():
                from shardwright import main as run
                gc.freeze()
            try:
                code = run()
            finally:
                gc.freeze()
    except KeyboardInterrupt as end:
        code = getattr(end, "exit_code", INTERRUPTED)
    if code in LAST_WORDS:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """Ends the process without Python's own end, which aborts where threads still compute."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            if stream is sys.stderr:
                print(f"shardwright: {LAST_WORDS[code]}", file=stream)
            stream.flush()
    os._exit(code)
