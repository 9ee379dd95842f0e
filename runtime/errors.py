"""The errors of a running program, each with the exit code that its process ends with.

A message is one paragraph: what failed, where, the numbers, what to try. `run_main` is the way an
entry script turns such an error into that text and code, without a traceback.
"""

import sys
import time
from collections.abc import Callable

PATIENCE_S = 3.0
"""For who started the ranks to see that one is gone; torchrun looks ten times per second."""


class RuntimeFailure(Exception):
    """Base of the errors that are the user's to mend; shown without a traceback."""

    exit_code = 3


class UsageError(RuntimeFailure):
    """A call that makes no sense as written: a batch of another shape, an unknown option."""

    exit_code = 2


class LayoutError(UsageError):
    """A layout.json that is damaged, of another version, or belongs to another program."""


class Refused(RuntimeFailure):
    """A request that is understood but can't be carried out right."""

    exit_code = 3


class CollectiveMismatch(Refused):
    """Ranks that met in one collective with different operations, shapes or dtypes."""


class Aborted(RuntimeFailure):
    """This rank was stopped because another one failed first; the other's error is the cause."""

    exit_code = 1


class PeerLost(Aborted):
    """The connection to another rank broke: that one ended, or did not answer in time."""


class RankFailed(RuntimeFailure):
    """A local process died; carries the first one's rank and how it ended.

    `exit_code` is the rank's own where that says something to the user (2, 3, 4), else 3.
    `unseen`: the part of the message that is not on stderr already.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int, unseen: str) -> None:
        super().__init__(message)
        self.unseen = unseen
        self.rank = rank
        self.exit_code = exit_code if exit_code in (2, 3, 4) else 3


def run_main(main: Callable[[], None]) -> None:
    """Runs `main`; an error that the user can mend is printed and ends the process by its code.

    A rank that only lost another one says so late: who started them knows which one died and of
    what, ends this one and tells that alone.
    """
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except PeerLost as lost:
        time.sleep(PATIENCE_S)
        print(f"error: {lost}", file=sys.stderr, flush=True)
        sys.exit(lost.exit_code)
    except RuntimeFailure as failure:
        print(f"error: {getattr(failure, 'unseen', failure)}", file=sys.stderr, flush=True)
        sys.exit(failure.exit_code)
