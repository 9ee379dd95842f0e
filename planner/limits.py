"""What a search may use: seconds and processes, as they were asked for.

Input: the arguments of `plan` and `explain`. Output: nothing; `UsageError` for what makes no sense.
"""

from __future__ import annotations

from ir.errors import UsageError


def check_time_limit(time_limit_s: object) -> None:
    """A number of seconds above 0; infinity is none."""
    is_number = isinstance(time_limit_s, (int, float)) and not isinstance(time_limit_s, bool)
    if not is_number or not time_limit_s > 0:  # type: ignore[operator]  # nan is not above 0
        raise UsageError(
            f"time_limit_s is {time_limit_s!r}: give a number of seconds above 0, such as 30, or "
            "leave it out."
        )


def check_processes(processes: object) -> None:
    """A whole number from 1, or None for a process per core."""
    is_whole = isinstance(processes, int) and not isinstance(processes, bool)
    if processes is not None and (not is_whole or processes < 1):  # type: ignore[operator]
        raise UsageError(
            f"processes is {processes!r}: give a whole number from 1, or None for one per core."
        )
