"""Tables of configurations as CSV.

Input: a path, or rows. Output: rows (column name -> text), or lines of a file. A file that is no
such table is a `UsageError` that says what is wrong with it; what is wrong with one row is that
row's error.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from ir.errors import UsageError
from planner.row_cells import BEYOND_HEADER, KNOWN, shown

OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header (UTF-8, with or without a byte order mark)."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [cells for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not a CSV table: {error}.") from error
    if not lines:
        raise UsageError(f"{path} is empty: the first line has to name the columns.")
    header = [name.strip() for name in lines[0]]
    _check_header(header, path)
    if len(lines) == 1:
        raise UsageError(f"{path} has a header and no rows.")
    return [_row(header, cells) for cells in lines[1:]]


def _check_header(header: Sequence[str], path: str | Path) -> None:
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise UsageError(f"{path} has the column {shown(twice[0])} twice. Keep one of them.")
    if not set(header) & set(KNOWN):
        other = [word for mark, word in OTHER_SEPARATORS.items() if mark in "".join(header)]
        hint = f" It looks separated by {other[0]}: save it with commas." if other else ""
        raise UsageError(
            f"{path} has none of the columns that configurations have (layers, hidden, device, tp, "
            f"micro_batch, ...): is it such a table?{hint}"
        )


def _row(header: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    """Cells by column; what is beyond the header makes the row's error, not another row's."""
    row = dict(zip(header, cells, strict=False))
    more = [cell for cell in cells[len(header) :] if cell.strip()]
    return row | ({BEYOND_HEADER: ", ".join(more)} if more else {})


def write_rows(handle: IO[str], columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Header and rows as CSV."""
    writer = csv.DictWriter(handle, columns)
    writer.writeheader()
    writer.writerows(rows)
