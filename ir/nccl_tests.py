"""Reads the text that nccl-tests print (all_reduce_perf and its sisters) into measured collectives.

Input: the output of one program. Output: a `Collective` with its out-of-place times, and on what it
was measured. Columns are found by the table's own heading, as older and newer versions have
different ones. The size column counts as cost models do: the whole tensor of gathers and scatters
(NVIDIA/nccl-tests, README).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

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
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s*(?:\[\S*\])?\s*(.*)", re.IGNORECASE
)
_PREFIX = re.compile(r"^(\[[^\]\s]*\d,\d+\]<std\w+>:|\s*\d+: (?=\s*[#\d]))")
"""Who printed a line: `[1,0]<stdout>:` of `mpirun --tag-output`, `0: ` of `srun --label`."""
_FOOTER = "Avg bus bandwidth"
Lines = list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class NcclTests:
    """One output: its file's name, the collective, how many ranks each host had, the names of their
    devices as printed (each once), and what is to be said of the reading."""

    name: str
    collective: Collective
    on_hosts: tuple[int, ...]
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_nccl_tests(text: str, name: str) -> NcclTests:
    """What one output says; `name` is its file's, which may say which program it was.

    `UsageError` if the program, the ranks or the table can't be found, or the table is not whole or
    holds what can't be: wrong results, times that are not above 0.
    """
    op = _op_of(text, name)
    lines = [(n, _PREFIX.sub("", line)) for n, line in enumerate(text.splitlines(), start=1)]
    hosts, devices = _ranks(lines, name)
    _check_passed(lines, name)
    rows = list(_rows(lines, name))
    if not rows:
        raise UsageError(f"{name}: the table has no rows with a size above 0.")
    points = {size: seconds for _, size, seconds in rows}
    sizes = tuple(sorted(points))
    curve = Curve(sizes, tuple(points[size] for size in sizes))
    on_hosts = tuple(Counter(hosts).values())
    collective = Collective(op, len(hosts), len(hosts), min(on_hosts), curve)
    return NcclTests(name, collective, on_hosts, devices, tuple(_notes(text, rows, name)))


def _op_of(text: str, name: str) -> str:
    """The text's own word counts before the file's name."""
    for program, op in _PROGRAMS.items():
        if program in text:
            return op
    for program, op in _PROGRAMS.items():
        if program.removesuffix("_perf") in name:
            return op
    raise UsageError(
        f"{name}: which collective is it? Neither the text nor the file's name has one of "
        f"{', '.join(_PROGRAMS)}. Name the file after its program."
    )


def _ranks(lines: Lines, name: str) -> tuple[list[str], tuple[str, ...]]:
    """The host of every rank, and the names of devices."""
    found = [(n, match) for n, line in lines if (match := _RANK.search(line))]
    if len(found) < 2:
        raise UsageError(
            f"{name}: {len(found)} lines like `#  Rank  0 ... on HOST device 0` were found; they "
            "say how many ranks met and where. Keep the whole output of the program."
        )
    for expected, (number, match) in enumerate(found):
        if int(match[1]) != expected:
            raise UsageError(
                f"{name}, line {number}: rank {match[1]} where rank {expected} is expected. A file "
                "holds one run with all its ranks (under mpirun, of nccl-tests made with MPI=1)."
            )
    names = (match[3].strip() for _, match in found)
    return [match[2] for _, match in found], tuple(dict.fromkeys(word for word in names if word))


def _check_passed(lines: Lines, name: str) -> None:
    """Raises `UsageError` for a footer such as `# Out of bounds values : 31 FAILED`."""
    for number, line in lines:
        if line.lstrip().startswith("#") and "FAILED" in line.split():
            raise UsageError(
                f"{name}, line {number}: {line.strip(' #')!r}. A collective with wrong results is "
                "no measurement: correct the machine and run it again."
            )


def _rows(lines: Lines, name: str) -> Iterator[tuple[int, float, float]]:
    """(line, bytes, seconds) of the rows below the heading; those of 0 bytes are passed over."""
    heading: list[str] = []
    for number, line in lines:
        words = line.replace("#", " ").split()
        if words[:2] == ["size", "count"] and "time" in words:
            heading = words
        elif heading and words and words[0].isdigit():
            at = f"{name}, line {number}"
            _check_row(words, heading, at)
            if int(words[0]):
                yield number, float(words[0]), _time_us(words[heading.index("time")], at) * 1e-6
    if not heading:
        raise UsageError(f"{name}: no heading `size count type ... time` as nccl-tests print it.")


def _check_row(words: list[str], heading: list[str], at: str) -> None:
    """Raises `UsageError` for a row that is cut short or counts wrong results."""
    if len(words) < len(heading):
        raise UsageError(
            f"{at}: the row ends after {len(words)} of {len(heading)} columns, so the output is "
            "cut short. Keep all of it, or delete the row to do without what follows."
        )
    for column, title in enumerate(heading):
        if title == "wrong" and words[column].isdigit() and int(words[column]):
            raise UsageError(
                f"{at}: {words[column]} wrong results at {words[0]} bytes. Such a collective is no "
                "measurement: correct the machine and run it again."
            )


def _time_us(word: str, at: str) -> float:
    try:
        time_us = float(word)
    except ValueError as error:
        raise UsageError(f"{at}: {word!r} is no time.") from error
    if not isfinite(time_us) or time_us <= 0:
        raise UsageError(f"{at}: the time {word} is not above 0 and finite. Run it again.")
    return time_us


def _notes(text: str, rows: list[tuple[int, float, float]], name: str) -> Iterator[str]:
    """What is taken otherwise than it may seem."""
    counts = Counter(size for _, size, _ in rows)
    if again := [size for size, count in counts.items() if count > 1]:
        yield (
            f"{name}: several rows have the same size ({len(again)} times, first {again[0]:.0f} "
            "bytes); the last of them counts"
        )
    if _FOOTER not in text:
        number, size, _ = rows[-1]
        yield (
            f"{name}: there is no `# {_FOOTER}` after the last row (line {number}, {size:.0f} "
            "bytes), so larger sizes may be missing"
        )
