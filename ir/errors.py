"""The errors a user can cause, each with the exit code that the command line gives it.

An error message is one paragraph: what failed, where, the numbers, what to try.
"""


class ShardwrightError(Exception):
    """Base of all errors that are the user's to mend; shown without a traceback."""

    exit_code = 3


class UsageError(ShardwrightError):
    """A request that makes no sense as written: an unknown device, a spec that does not parse."""

    exit_code = 2


class Refused(ShardwrightError):
    """A request that is understood but can't be carried out right: no plan fits, say."""

    exit_code = 3


class Different(ShardwrightError):
    """Numbers differ where they must not."""

    exit_code = 4


class CaptureError(Refused):
    """A model that can't be traced; the message names the module and the source line."""
