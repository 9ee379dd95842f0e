"""The error of `predict` on published runs, by source, device and regime, and of a constant MFU.

    python benchmarks/predict.py [--pred PRED.csv] [--write docs/accuracy.md]

In: `benchmarks/data/rows.csv` (measured runs; quality A and B, dense models, repeats left out) and
`plan_ranking.csv`. Out: Markdown tables; with --write they replace those of the page.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import shardwright

DATA = Path(__file__).parent / "data"
CONSTANT_MFU_PCT = 40.0
"""The trivial predictor: model FLOPs at this part of the device's dense peak."""
FEWEST = 3
"""Smaller groups are not listed."""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Row = Mapping[str, str]


def measured_rows() -> list[dict[str, str]]:
    """The rows that count."""
    with (DATA / "rows.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    return [
        row for row in rows
        if row["quality"] in "AB" and not row["dup_of"] and not row["experts"]
        and row["cp"] in ("", "1")
    ]  # fmt: skip


def predictions(rows: Sequence[Row], path: str | None) -> dict[str, dict[str, str]]:
    """By id; made now unless a file has them."""
    if path is not None:
        with open(path, newline="") as handle:
            return {record["id"]: record for record in csv.DictReader(handle)}
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder) / "rows.csv", Path(folder) / "pred.csv"
        with table.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        if shardwright.main(["predict", str(table), "--out", str(out)]):
            sys.exit("predict failed")
        return predictions(rows, str(out))


def regime(row: Row) -> str:
    """What decides a row's time, by its own columns."""
    words = ["8-bit or less" if row["precision"] not in ("bf16", "fp16") else "16-bit"]
    if row["pp"] not in ("", "1"):
        words.append("pipeline")
    elif row["tp"] not in ("", "1"):
        words.append("tensor")
    else:
        words.append("ZeRO-3" if row["zero_stage"] == "3" else "data")
    return ", ".join(words)


def errors(rows: Iterable[Row], found: Mapping[str, Row], field: str) -> list[float]:
    """Predicted over measured, less one."""
    values = []
    for row in rows:
        record = found.get(row["id"])
        if row[field] and row["oom"] != "1" and record and not record["error"]:
            values.append(float(record[field]) / float(row[field]) - 1)
    return values


def constant_mfu(rows: Iterable[Row]) -> list[float]:
    """Errors of the trivial predictor: its time is to the measured one as the MFUs are."""
    return [
        float(row["implied_mfu_pct"]) / CONSTANT_MFU_PCT - 1
        for row in rows if row["step_s"] and row["implied_mfu_pct"]
    ]  # fmt: skip


def cells(values: Sequence[float]) -> str:
    """Median, 90th percentile and bias of relative errors."""
    if not values:
        return "- | - | -"
    sizes = sorted(abs(v) for v in values)
    p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    bias = statistics.median(values)
    return f"{statistics.median(sizes):.1%} | {p90:.1%} | {bias:+.1%}"


def table(
    title: str, key: Callable[[Row], str], rows: Sequence[Row], found: Mapping[str, Row]
) -> list[str]:
    """Step time and memory by groups, beside the constant MFU."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    lines = [
        f"| {title} | rows | step: median | p90 | bias | 40 % MFU: median | p90 | bias "
        "| memory: rows | median | p90 | bias |",
        "|---" * 12 + "|",
    ]
    for name, group in sorted(groups.items()):
        step, peak = errors(group, found, "step_s"), errors(group, found, "peak_GiB")
        if len(group) >= FEWEST:
            lines.append(
                f"| {name} | {len(step)} | {cells(step)} | {cells(constant_mfu(group))} "
                f"| {len(peak)} | {cells(peak)} |"
            )
    return [*lines, ""]


def fits(rows: Sequence[Row], found: Mapping[str, Row]) -> str:
    """How often a run's fitting was foreseen."""
    counts = {(oom, fit): 0 for oom in "01" for fit in "01"}
    for row in rows:
        record = found.get(row["id"])
        if record and record["fits"]:
            counts["1" if row["oom"] == "1" else "0", record["fits"]] += 1
    return (
        f"Fits: of {counts['0', '1'] + counts['0', '0']} runs that ran, {counts['0', '0']} were "
        f"predicted not to fit; of {counts['1', '1'] + counts['1', '0']} that ran out of memory, "
        f"{counts['1', '1']} were predicted to fit."
    )


def ranking(found: Mapping[str, Row]) -> str:
    """Over the sets of plans for one model: rank agreement, and what the first choice costs."""
    sets: dict[str, list[tuple[float, float]]] = {}
    with (DATA / "plan_ranking.csv").open(newline="") as handle:
        for item in csv.DictReader(handle):
            record = found.get(item["id"])
            if item["step_s"] and record and record["step_s"]:
                pair = (float(item["step_s"]), float(record["step_s"]))
                sets.setdefault(item["set_id"], []).append(pair)
    ranked = [pairs for pairs in sets.values() if len(pairs) > 1]
    if not ranked:
        return "Ranking: no set of plans is covered."
    rhos = [spearman(pairs) for pairs in ranked]
    regrets = [min(p, key=lambda x: x[1])[0] / min(p)[0] - 1 for p in ranked]
    return (
        f"Ranking: {len(ranked)} sets, mean Spearman {statistics.mean(rhos):.2f}; the plan that is "
        f"predicted fastest is {statistics.median(regrets):.1%} slower than the best measured one "
        f"in the median, {statistics.mean(regrets):.1%} on average."
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Correlation of ranks; 0 where all are equal."""
    first, second = ([sorted(v).index(x) for x in v] for v in zip(*pairs, strict=True))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return 0.0
    return statistics.correlation(first, second)


def report(rows: Sequence[Row], found: Mapping[str, Row]) -> str:
    """The measured part of the page."""
    refused = sum(bool(found.get(row["id"], {"error": "absent"})["error"]) for row in rows)
    parts: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("all", lambda row: "dense"), ("source", lambda row: row["source"]),
        ("device", lambda row: row["device"]), ("regime", regime),
    )  # fmt: skip
    lines = [f"{len(rows)} rows, {refused} refused.", ""]
    for title, key in parts:
        lines += table(title, key, rows, found)
    return "\n".join([*lines, fits(rows, found), "", ranking(found), ""])


def main() -> None:
    """Prints the report, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pred", help="predictions made before, as written by predict --out")
    parser.add_argument("--write", help="the page whose measured part is replaced")
    options = parser.parse_args()
    rows = measured_rows()
    text = report(rows, predictions(rows, options.pred))
    if not options.write:
        print(text)
        return
    page = Path(options.write)
    head, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
