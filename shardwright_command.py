"""The command's entry: `shardwright`, and `python -m shardwright`.

Importing torch takes seconds; Ctrl-C meanwhile ends the command with one line, as it does later.
That is why the import stands in the function.
"""

import sys

INTERRUPTED = 130


def main() -> int:
    """The command's exit code."""
    try:
        from shardwright import main as run
    except KeyboardInterrupt:
        print("shardwright: interrupted", file=sys.stderr)
        return INTERRUPTED
    return run()
