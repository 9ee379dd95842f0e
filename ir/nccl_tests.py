"""Reads the text that nccl-tests print (all_reduce_perf and its sisters) into measured collectives.

Input: the output of one program. Output: a `Collective` with its out-of-place times. Columns are
found by the table's own heading, as older and newer versions have different ones. The size column
counts as cost models do: the whole tensor of gathers and scatters (NVIDIA/nccl-tests, README).
"""

import re
from collections.abc import Iterator

from ir.calibration import Collective
from ir.curves import Curve
from ir.errors import UsageError

_PROGRAMS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "sendrecv_perf": "send",
}
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device", re.IGNORECASE)


def read_nccl_tests(text: str, name: str) -> Collective:
    """The collective of one output; `name` is its file's, which may say which program it was.

    `UsageError` if the program, the ranks or the table can't be found.
    """
    op = _op_of(text, name)
    hosts = [match[2] for match in _RANK.finditer(text)]
    if len(hosts) < 2:
        raise UsageError(
            f"{name}: {len(hosts)} lines like `#  Rank  0 ... on HOST device 0` were found; they "
            "say how many ranks met and where. Keep the whole output of the program."
        )
    near = min(hosts.count(host) for host in set(hosts))
    points = dict(_points(text, name))
    sizes = tuple(sorted(points))
    if not sizes:
        raise UsageError(f"{name}: the table has no rows with a size above 0.")
    curve = Curve(sizes, tuple(points[size] for size in sizes))
    return Collective(op, len(hosts), len(hosts), near, curve)


def _op_of(text: str, name: str) -> str:
    for program, op in _PROGRAMS.items():
        if program in text or program.removesuffix("_perf") in name:
            return op
    raise UsageError(
        f"{name}: which collective is it? Neither the text nor the file's name has one of "
        f"{', '.join(_PROGRAMS)}. Name the file after its program."
    )


def _points(text: str, name: str) -> Iterator[tuple[float, float]]:
    """(bytes, seconds) of the rows below the heading."""
    column = None
    for line in text.splitlines():
        words = line.replace("#", " ").split()
        if words[:2] == ["size", "count"] and "time" in words:
            column = words.index("time")
        elif column is not None and words and words[0].isdigit() and len(words) > column:
            size, time_us = float(words[0]), _number(words[column], name, line)
            if size > 0 and time_us > 0:
                yield size, time_us * 1e-6
    if column is None:
        raise UsageError(f"{name}: no heading `size count type ... time` as nccl-tests print it.")


def _number(word: str, name: str, line: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise UsageError(f"{name}: {word!r} is no time in the row {line.strip()!r}.") from error
