"""The front door's part for predictions: rows of a table, models, and the `predict` command.

In: a CSV of training configurations, or a model with a configuration. Out: seconds, GiB and
whether it fits, by the same trace, costs and memory count that `plan` uses.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from deciding import call_arguments, cluster_of
from ir.cluster import Cluster
from ir.deepen import deepen, layer_run
from ir.errors import UsageError
from ir.graph import Graph
from ir.interrupts import held_interrupts
from ir.resize import resize
from ir.trace import trace
from ir.whole_file import check_writable, whole_file
from planner.explain import explain, explain_json
from planner.predict import Predicted, Predictor
from planner.predict_table import COLUMNS, Row, predict_row, predict_table, record
from planner.rows import read_configuration
from planner.stacks import has_wide_logits, padded_vocabulary
from planner.stated import check_stated_cluster, check_stated_model
from planner.table_file import read_rows, write_rows
from runtime.arguments import filled
from runtime.row_models import RowShape, build_row_model, probe_of, row_shape, size_changes

FEW_ROWS = 24
"""Tables up to this length are predicted in this process."""
MOST_REASONS = 5
"""Of refusals, that a summary names."""


class RowGraphs:
    """Graphs of rows: traced once per structure, then resized and deepened."""

    def __init__(self) -> None:
        self.probes: dict[RowShape, Graph] = {}
        self.graphs: dict[RowShape, Graph] = {}

    def __call__(self, row: Row) -> Graph:
        """The graph of a row's model; `ValueError` for sizes that make no model."""
        stated = row_shape(row)
        vocab = padded_vocabulary(row, stated.vocab)
        shape = replace(stated, vocab=vocab, wide_logits=has_wide_logits(row))
        if shape not in self.graphs:
            probe = probe_of(shape)
            if probe not in self.probes:
                self.probes[probe] = trace(*build_row_model(probe))
            graph = resize(self.probes[probe], size_changes(probe, shape))
            self.graphs[shape] = deepen(graph, layer_run(graph), shape.layers)
        return self.graphs[shape]


def predict(
    model: Any, cluster: Cluster | str | None, config: Mapping[str, Any], batch: Any = None,
    **options: Any,
) -> Predicted:  # fmt: skip
    """What one configuration takes: seconds of a step and its parts, GiB, whether it fits.

    `config` has the column names of measured runs: tp, pp, dp, micro_batch, global_batch,
    recompute, zero_stage, precision, ... What it leaves out is decided. `model`: a module (with an
    example `batch` as for `plan`), a traced `Graph`, or None for the transformer that `config`
    describes. `cluster` None: as `config` states it. Raises `UsageError` for what can't be, also
    for a `config` that says something else of a given model or cluster.
    """
    if not isinstance(config, Mapping):
        raise UsageError(
            f"a configuration names its values, as {{'tp': 2, 'micro_batch': 1}}, not {config!r}"
        )
    row = {key: _cell(value) for key, value in config.items()}
    cluster = None if cluster is None else cluster_of(cluster)
    wanted = read_configuration(row, cluster)
    if cluster is not None:
        check_stated_cluster(row, cluster)
    graph = _graph(model, row, batch, options)
    if model is not None:
        check_stated_model(row, graph)
    try:
        return Predictor().predict(graph, wanted)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _cell(value: Any) -> str:
    """A value as a table has it: flags are 0 and 1."""
    if value is None:
        return ""
    return str(int(value) if isinstance(value, bool) else value)


def _graph(model: Any, row: Row, batch: Any, options: Mapping[str, Any]) -> Graph:
    if isinstance(model, Graph):
        return model
    if model is None:
        try:
            return RowGraphs()(row)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if batch is None:
        raise UsageError("give predict an example batch, as for plan, to trace the model with")
    return trace(model, *call_arguments(batch), **options)


def predict_rows(rows: Sequence[Row], cluster: Cluster | None = None) -> list[dict[str, str]]:
    """A record per row, in order; long tables are shared by a process per core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if len(rows) <= FEW_ROWS or (cores or 1) < 2:
        return _predict_part(rows, cluster)
    parts = _shares(rows, min(cores or 1, 8))
    context = multiprocessing.get_context("spawn")
    before = context.active_children()
    with ProcessPoolExecutor(len(parts), mp_context=context) as pool:
        try:
            with held_interrupts():  # which starts them
                told = pool.map(
                    _predict_part, [[rows[i] for i in part] for part in parts],
                    [cluster] * len(parts),
                )  # fmt: skip
            found = [*told]
        except BaseException:  # leaving the pool waits for what is running
            for child in set(context.active_children()) - set(before):
                child.terminate()
            raise
    placed = {i: item for part, items in zip(parts, found, strict=True)
              for i, item in zip(part, items, strict=True)}  # fmt: skip
    return [placed[i] for i in range(len(rows))]


def _predict_part(rows: Sequence[Row], cluster: Cluster | None) -> list[dict[str, str]]:
    return list(predict_table(rows, RowGraphs(), cluster))


def _shares(rows: Sequence[Row], count: int) -> list[list[int]]:
    """Row numbers in parts of about equal length; rows of one model stay together."""
    keys = ("family", "hidden", "heads", "ffn_hidden", "seq_len", "layers", "precision")
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row.get(key) or "" for key in keys), []).append(i)
    parts: list[list[int]] = [[] for _ in range(count)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    return [part for part in parts if part]


def summary(records: Sequence[Mapping[str, str]]) -> str:
    """How many rows were predicted and refused, and the most frequent reasons."""
    errors = [item["error"] for item in records if item["error"]]
    if not errors:
        return f"{len(records)} rows predicted, none refused"
    words = [error.partition(":")[0].partition("=")[0].strip() for error in errors]
    counts = sorted({w: words.count(w) for w in words}.items(), key=lambda pair: -pair[1])
    named = MOST_REASONS if len(counts) > MOST_REASONS + 1 else len(counts)
    why = ", ".join(f"{word} {count}" for word, count in counts[:named])
    if more := sum(count for _, count in counts[named:]):
        why += f", and {more} for {len(counts) - named} other reasons"
    return f"{len(records) - len(errors)} rows predicted, {len(errors)} refused ({why})"


def predict_command(options: argparse.Namespace) -> int:
    """`shardwright predict`: writes the records, or explains one row; 0 also with refusals."""
    rows = read_rows(options.rows)
    cluster = Cluster.parse(options.cluster) if options.cluster else None
    if options.explain:
        if options.out:
            raise UsageError("--out: --explain prints one row and writes no table. Leave one out.")
        chosen = [row for row in rows if row.get("id") == options.explain]
        if len(chosen) != 1:
            count = len(chosen) or "no"
            raise UsageError(
                f"{options.rows} has {count} row{'s' if chosen else ''} with the id "
                f"{options.explain!r}; --explain needs one"
            )
        found = predict_row(Predictor(), chosen[0], RowGraphs(), cluster)
        told = record(options.explain, found) | {"explanation": explain_json(found)}
        print(json.dumps(told) if options.json else explain(found))
        return 0
    if not (options.out or options.json):
        raise UsageError("say where to write the predictions with --out PRED.csv, or use --json")
    records = _written(rows, options, cluster) if options.out else predict_rows(rows, cluster)
    if options.json:
        print(json.dumps({"rows": records, "summary": summary(records)}))
    print(summary(records), file=sys.stderr if options.json else sys.stdout)
    return 0


def _written(
    rows: Sequence[Row], options: argparse.Namespace, cluster: Cluster | None
) -> list[dict[str, str]]:
    """Predicts once it is sure that the result can be written, and writes when all is there."""
    check_writable(options.out, options.rows)
    records = predict_rows(rows, cluster)
    with whole_file(options.out, options.rows) as handle:
        write_rows(handle, COLUMNS, records)
    return records


def add_predict_command(commands: Any) -> None:
    """The command's flags."""
    text = (
        "Predict seconds per step and peak memory of the configurations in a CSV table (columns as "
        "of published measurements: layers, hidden, device, tp, pp, dp, micro_batch, ...). Empty "
        "decisions are made. A row that can't be represented gets a reason; the others go on."
    )
    command = commands.add_parser("predict", help=text.partition(". ")[0], description=text)
    command.add_argument("rows", metavar="ROWS.csv", help="the table of configurations")
    command.add_argument(
        "--out", type=filled, metavar="PRED.csv", help="where to write the predictions"
    )
    command.add_argument(
        "--cluster", type=filled, metavar="SPEC",
        help="predict for this hardware, not the one that rows state",
    )  # fmt: skip
    command.add_argument(
        "--explain", type=filled, metavar="ID", help="print where that row's time and bytes go"
    )
    command.add_argument("--json", action="store_true", help="print JSON on stdout")
    command.set_defaults(run=predict_command)
