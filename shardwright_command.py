"""The command's entry: `shardwright`, and `python -m shardwright`.

Importing torch takes seconds; Ctrl-C meanwhile ends the command with one line, as it does later.
That is why the import stands in the function. Nearly everything that a command makes lives until
its end: the collector is not to look through it, neither during imports nor as Python ends.
"""

import gc
import sys

from ir.collector import paused_collector

INTERRUPTED = 130


def main() -> int:
    """The command's exit code."""
    try:
        with paused_collector():
            from shardwright import main as run
            gc.freeze()
    except KeyboardInterrupt:
        print("shardwright: interrupted", file=sys.stderr)
        return INTERRUPTED
    try:
        return run()
    finally:
        gc.freeze()
