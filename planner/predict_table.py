"""Predictions for a table of configurations.

Input: rows (column name -> text) and a function that gives a row's graph. Output: a record per
row with the columns of `COLUMNS`; a row that can't be predicted has its reason in `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ir.cluster import Cluster
from ir.errors import ShardwrightError, UsageError
from ir.graph import Graph
from planner.predict import Predicted, Predictor
from planner.rows import read_configuration

COLUMNS = (
    "id", "step_s", "peak_GiB", "fits", "compute_s", "exposed_comm_s", "bubble_s", "optimizer_s",
    "error",
)  # fmt: skip
Row = Mapping[str, str]


def predict_row(
    predictor: Predictor, row: Row, graph_of: Callable[[Row], Graph], cluster: Cluster | None = None
) -> Predicted:
    """One row, on `cluster` or the one that it states; `ShardwrightError` says what about it is
    wrong."""
    wanted = read_configuration(row, cluster)
    try:
        return predictor.predict(graph_of(row), wanted)
    except ValueError as error:
        raise UsageError(str(error)) from error


def predict_table(
    rows: Iterable[Row], graph_of: Callable[[Row], Graph], cluster: Cluster | None = None
) -> Iterator[dict[str, str]]:
    """A record per row, in order."""
    predictor = Predictor()
    for row in rows:
        try:
            yield record(row.get("id", ""), predict_row(predictor, row, graph_of, cluster))
        except ShardwrightError as error:
            yield refusal(row.get("id", ""), str(error))
        except Exception as error:  # the other rows of the table are not lost with this one
            reason = f"{type(error).__name__}: {error}"
            yield refusal(row.get("id", ""), f"a defect of Shardwright, please report it: {reason}")


def record(name: str, found: Predicted) -> dict[str, str]:
    """A prediction as text."""
    return {
        "id": name, "step_s": f"{found.step_s:.6g}", "peak_GiB": f"{found.peak_GiB:.4g}",
        "fits": str(int(found.fits)), "compute_s": f"{found.compute_s:.6g}",
        "exposed_comm_s": f"{found.exposed_comm_s:.6g}", "bubble_s": f"{found.bubble_s:.6g}",
        "optimizer_s": f"{found.optimizer_s:.6g}", "error": "",
    }  # fmt: skip


def refusal(name: str, reason: str) -> dict[str, str]:
    """A row that can't be predicted, with the reason on one line."""
    return dict.fromkeys(COLUMNS, "") | {"id": name, "error": " ".join(reason.split())}
