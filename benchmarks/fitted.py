"""Fits the paces of `planner.calibrated` on published runs, and leaves each source out in turn.

    python benchmarks/fitted.py [--cache PACES.csv] [--write docs/accuracy.md]

In: the rows of `benchmarks/predict.py`. Out: the fitted constants, and a Markdown table: per source
the median error with constants from all rows and with constants from all others.

A step is nearly linear in x = 1 / pace, so two or three predictions of a row give all others:

    (1) t(x) = t(x0) + sum over widths w of s_w (x_w - x0_w),  s_w by raising x_w by `STEP`
    (2) pace of class c: the mean of log(t / measured) over the rows that c decides is 0, each row
        weighted by s_c x_c / t, the part of its step that c's products take, over the square root
        of how many such rows its source has, so that no source outvotes all others

(2) in the order of `CLASSES`, repeated until nothing moves: rows in 8 bits have logits in 16.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path

from predict import measured_rows

from ir.errors import ShardwrightError
from planner.calibrated import PACES, Paces
from planner.predict import Predictor
from planner.predict_table import predict_row
from prediction import RowGraphs

CLASSES = ("usual", "hopper", "low")
STEP = 0.05
ROUNDS = 6
BISECTIONS = 40
WORST_RATIO = 1.3
"""What leaving a source out may multiply its error by."""
BEGIN, END = "<!-- left out: begin -->", "<!-- left out: end -->"
FIELDS = ("id", "t", "wide", "narrow", *CLASSES)
"""Of a slope table: seconds at the paces of `CLASSES`, and what `STEP` adds in 16 and in 8 bits."""
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """(1) of one row: seconds at paces `at`, and per unit of 1/pace of its 16- and 8-bit class."""

    source: str
    measured_s: float
    base_s: float
    at: Paces
    slopes: Mapping[str, float]

    def seconds(self, paces: Paces) -> float:
        """The step at other paces."""
        moved = (
            slope * (1 / getattr(paces, name) - 1 / getattr(self.at, name))
            for name, slope in self.slopes.items()
        )
        return self.base_s + sum(moved)

    def error(self, paces: Paces) -> float:
        """log(predicted / measured)."""
        return log(self.seconds(paces) / self.measured_s)

    def share(self, name: str, paces: Paces) -> float:
        """The part of the step that a class's products take."""
        return self.slopes.get(name, 0.0) / getattr(paces, name) / self.seconds(paces)


def step_seconds(rows: Sequence[Row], paces: Paces) -> dict[str, float]:
    """Predicted steps by id; refused rows are left out."""
    predictor, graphs, found = Predictor(paces), RowGraphs(), {}
    for row in rows:
        try:
            found[row["id"]] = predict_row(predictor, row, graphs).step_s
        except (ShardwrightError, ValueError):
            continue
    return found


def raised(*names: str) -> Paces:
    """`PACES` with 1/pace of some classes raised by `STEP`."""
    return replace(PACES, **{name: getattr(PACES, name) / (1 + STEP) for name in names})


def slope_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A record of `FIELDS` per row."""
    settings = (PACES, raised("usual", "hopper"), raised("low"))
    low = [row for row in rows if row["precision"] not in ("bf16", "fp16")]
    jobs = ((rows, settings[0]), (rows, settings[1]), (low, settings[2]))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        base, wide, narrow = (f.result() for f in [pool.submit(step_seconds, *j) for j in jobs])
    at = {name: repr(getattr(PACES, name)) for name in CLASSES}
    return [
        {
            "id": name, "t": repr(t), "wide": repr(wide[name] - t),
            "narrow": repr(narrow.get(name, t) - t),
        } | at
        for name, t in base.items()
    ]  # fmt: skip


def lines(rows: Sequence[Row], table: Iterable[Row]) -> list[Line]:
    """The rows that ran, with their slopes by class."""
    by_id, found = {row["id"]: row for row in rows}, []
    for record in table:
        row = by_id.get(record["id"])
        if row is None or not row["step_s"] or row["oom"] == "1":
            continue
        wide = "hopper" if row["device"].startswith(("H100", "H200", "H20")) else "usual"
        at = Paces(*(float(record[name]) for name in CLASSES))
        rises = {wide: float(record["wide"]), "low": float(record["narrow"])}
        slopes = {n: rise * getattr(at, n) / STEP for n, rise in rises.items() if rise > 0}
        found.append(Line(row["source"], float(row["step_s"]), float(record["t"]), at, slopes))
    return found


def decides(line: Line, name: str) -> bool:
    """A row with 8-bit products says nothing sure about 16-bit ones."""
    return name in line.slopes and (name == "low" or "low" not in line.slopes)


def fit(rows: Sequence[Line]) -> Paces:
    """(2)."""
    paces = PACES
    for _ in range(ROUNDS):
        for name in CLASSES:
            if deciding := [line for line in rows if decides(line, name)]:
                paces = replace(paces, **{name: _centred(deciding, name, paces)})
    return paces


def _centred(rows: Sequence[Line], name: str, paces: Paces) -> float:
    """The pace of a class at which the weighted mean error of its rows is 0."""
    counts = Counter(line.source for line in rows)
    slow, fast = 0.2, 1.5
    for _ in range(BISECTIONS):
        middle = exp((log(slow) + log(fast)) / 2)
        tried = replace(paces, **{name: middle})
        error = sum(
            line.error(tried) * line.share(name, tried) / sqrt(counts[line.source]) for line in rows
        )
        slow, fast = (middle, fast) if error > 0 else (slow, middle)
    return fast


def median_error(rows: Iterable[Line], paces: Paces) -> float:
    """Median of |predicted / measured - 1|."""
    return statistics.median(abs(exp(line.error(paces)) - 1) for line in rows)


def report(rows: Sequence[Line]) -> str:
    """The fitted constants and the table of sources."""
    everything = fit(rows)
    values = ", ".join(f"`{name}` {getattr(everything, name):.3f}" for name in CLASSES)
    text = [
        f"Fitted on all rows: {values} (in `planner/calibrated.py`: "
        + ", ".join(f"{getattr(PACES, name):.2f}" for name in CLASSES)
        + ").",
        "",
        "| source | rows | error, all rows | error, source left out | ratio | paces without it |",
        "|---" * 6 + "|",
    ]
    worst = 0.0
    for source in sorted({line.source for line in rows}):
        own = [line for line in rows if line.source == source]
        paces = fit([line for line in rows if line.source != source])
        with_s, without_s = median_error(own, everything), median_error(own, paces)
        worst = max(worst, without_s / with_s)
        row = " / ".join(f"{getattr(paces, name):.3f}" for name in CLASSES)
        text.append(
            f"| {source} | {len(own)} | {with_s:.1%} | {without_s:.1%} | "
            f"{without_s / with_s:.2f} | {row} |"
        )
    verdict = "below" if worst < WORST_RATIO else "not below"
    return "\n".join([*text, "", f"The worst ratio is {worst:.2f}, {verdict} {WORST_RATIO}.", ""])


def read_table(path: Path | None, rows: Sequence[Row]) -> list[dict[str, str]]:
    """The slopes, from the cache if it is there."""
    if path is not None and path.exists():
        with path.open(newline="") as handle:
            return list(csv.DictReader(handle))
    table = slope_table(rows)
    if path is not None:
        with path.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, FIELDS)
            writer.writeheader()
            writer.writerows(table)
    return table


def main() -> None:
    """Prints the report, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, help="slopes: read if there, else written")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    rows = measured_rows()
    text = report(lines(rows, read_table(options.cache, rows)))
    if options.write is None:
        print(text)
        return
    head, _, rest = options.write.read_text().partition(BEGIN)
    options.write.write_text(f"{head}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
