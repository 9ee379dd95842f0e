"""Plans against the configurations that experts chose: a plan must not be slower under the model.

    python benchmarks/experts.py [--only TEXT] [--limit N] [--all]

In: `benchmarks/data/rows.csv` and `expert_configs.csv` (dense models, pre-training, no context
parallelism). Rows of one model, sequence length, cluster and global batch are a group. Of each the
fastest configuration that fits, by `predict` and as the emitted program runs, is planned again with
its mesh, micro-batches, schedule, ZeRO stage and recomputation pinned, and compared with the free
plan: both are priced as the emitted program, whatever the expert's software. With --all every
distinct configuration of a group is pinned. Out: a line per configuration; exit status 1 if a plan
is slower by more than the search's gap.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ir.cluster import Cluster
from ir.errors import ShardwrightError
from ir.graph import Graph
from ir.plan import Plan
from planner.predict import Predicted, Predictor
from planner.predict_table import predict_row
from planner.rows import read_configuration
from prediction import RowGraphs
from shardwright import plan_graph

DATA = Path(__file__).parent / "data"
GAP = 0.005
"""Relative; the search's own."""
MODELS = {
    "gpt3 175b": "gpt 96 12288 96 96 49152 0 51200 1",
    "llama3 8b": "llama 32 4096 32 8 14336 1 128256 0",
    "llama3 70b": "llama 80 8192 64 8 28672 1 128256 0",
}
"""Of `expert_configs.csv`: family, layers, hidden, heads, kv heads, ffn, gated, vocabulary, tied.
The other dense ones have an activation or a vision part that no row's model has."""
SYSTEMS = {"h100": ("H100-SXM5", 8, 8), "b200": ("B200 (per GPU)", 8, 8),
           "gb200": ("GB200 (per GPU)", 4, 72)}  # fmt: skip
"""Device, devices per node, devices that NVLink joins."""
SHAPE = (
    "family", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "gated_mlp", "vocab",
    "tied_embeddings",
)  # fmt: skip
WORKLOAD = (
    *SHAPE, "head_dim", "seq_len", "device", "devices_per_node", "nvlink_domain",
    "inter_node_GBps_per_device", "n_devices", "global_batch",
)  # fmt: skip
Row = Mapping[str, str]


@dataclass(frozen=True)
class Expert:
    """A configuration that fits, by `predict`."""

    row: Row
    predicted: Predicted

    @property
    def pins(self) -> dict[str, Any]:
        """What the planner has words for; the rest, such as which layers recompute, is free."""
        wanted, traits = read_configuration(self.row), self.predicted.traits
        mesh, recompute = wanted.mesh, _recompute(self.predicted.recompute)
        pins: dict[str, Any] = {
            "pipeline": mesh.pipeline, "data": mesh.data, "tensor": mesh.tensor,
            "micro_batches": wanted.micro_batches, "recompute": recompute,
            "zero": traits.zero_stage if mesh.data > 1 else 0,
        }  # fmt: skip
        if mesh.pipeline > 1 and traits.virtual_stages > 1:
            return pins | {"schedule": "interleaved", "virtual_stages": traits.virtual_stages}
        return pins | {"schedule": "1f1b"}


def _recompute(label: str) -> str:
    return label if label in ("none", "full") else "selective"


def rows() -> Iterator[Row]:
    """Dense rows of both tables, with the columns of `rows.csv`."""
    with (DATA / "rows.csv").open(newline="") as handle:
        for row in csv.DictReader(handle):
            if not row["experts"] and row["cp"] in ("", "1"):
                yield row
    with (DATA / "expert_configs.csv").open(newline="") as handle:
        for number, row in enumerate(csv.DictReader(handle), start=2):
            name = f"{row['model']} {row['size']}"
            if row["task"] == "pre_train" and name in MODELS and row["cp_size"] == "1":
                yield _recommended(row, number)


def _recommended(row: Row, number: int) -> Row:
    """A line of `expert_configs.csv`, priced in bf16 as its plan is."""
    device, per_node, domain = SYSTEMS[row["system"]]
    devices = int(row["num_gpus"])
    tensor, pipeline = int(row["tp_size"]), int(row["pp_size"])
    model = dict(zip(SHAPE, MODELS[f"{row['model']} {row['size']}"].split(), strict=True))
    return model | {
        "id": f"expert_configs:{number}", "seq_len": row["seq_len"], "device": device,
        "devices_per_node": str(min(per_node, devices)), "nvlink_domain": str(domain),
        "nodes": str(max(1, devices // per_node)), "n_devices": str(devices),
        "tp": str(tensor), "pp": str(pipeline), "dp": str(devices // tensor // pipeline),
        "virtual_stages": row["vp_size"] if pipeline > 1 else "1", "micro_batch": row["mbs"],
        "global_batch": row["gbs"], "precision": "bf16", "attention_flash": "1",
        "head_dim": "", "inter_node_GBps_per_device": "",
        "recompute": "none" if row["recompute_layers"] in ("", "0") else "full",
    }  # fmt: skip


def groups(only: str) -> Iterator[tuple[str, list[Row]]]:
    """Rows by what is to be planned, in the order of the tables."""
    found: dict[str, list[Row]] = {}
    for row in rows():
        words = [row.get(key) or "-" for key in WORKLOAD]
        found.setdefault(" ".join([*words, _dtype(row)]), []).append(row)
    for name, members in found.items():
        if only in name or any(only in row["id"] for row in members):
            yield name, members


def _dtype(row: Row) -> str:
    """Of the traced model: lower precisions concern products only, and plans have none."""
    return "fp16" if row["precision"] == "fp16" else "bf16"


def experts(members: list[Row], graphs: RowGraphs) -> list[Expert]:
    """The configurations that fit, one of each kind, fastest first."""
    predictor, found = Predictor(), dict[str, Expert]()
    for row in members:
        try:
            expert = Expert(row, predict_row(predictor, row, graphs))
        except ShardwrightError:
            continue  # predict does not represent it
        if expert.predicted.fits:
            found.setdefault(str(expert.pins), expert)
    return sorted(found.values(), key=lambda expert: expert.predicted.step_s)


def pinned(graph: Graph, cluster: Cluster, batch: int, expert: Expert) -> Plan | str:
    """The expert's configuration, or why it can't be had."""
    try:
        return plan_graph(graph, cluster, global_batch=batch, pin=expert.pins)
    except ShardwrightError as error:
        return str(error).split(". ")[0]


def compare(name: str, members: list[Row], graphs: RowGraphs, *, every: bool) -> list[float]:
    """Prints a group; the plan's step over that of the first expert that can be had, or of all."""
    ratios = []
    chosen = experts(members, graphs)
    if not chosen:
        print(f"skip  {name}: predict represents no row of it, or none fits", flush=True)
        return []
    wanted = read_configuration(chosen[0].row)
    graph, batch = graphs(chosen[0].row), wanted.global_batch
    free = plan_graph(graph, wanted.cluster, global_batch=batch)
    for expert in chosen:
        other = pinned(graph, wanted.cluster, batch, expert)
        if isinstance(other, str):
            print(f"skip  {expert.row['id']}: {other}", flush=True)
            continue
        ratio = free.prediction.step_s / other.prediction.step_s
        ratios.append(ratio)
        verdict = "SLOW" if ratio > 1 + GAP else "ok  "
        print(
            f"{verdict}  {ratio:.3f}  {expert.row['id']}  expert {_words(other)}  "
            f"plan {_words(free)}  bound {free.prediction.bound_s / free.prediction.step_s:.3f}",
            flush=True,
        )
        if not every:
            break
    return ratios


def _words(plan: Plan) -> str:
    mesh = plan.mesh
    sizes = f"p{mesh.pipeline} d{mesh.data} t{mesh.tensor} m{plan.micro_batches}"
    return f"{plan.prediction.step_s:.4g} s ({sizes} {plan.schedule} zero{plan.zero})"


def main() -> int:
    """Prints the comparison and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="groups or rows whose name has this text")
    parser.add_argument("--limit", type=int, help="at most so many groups")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first groups")
    parser.add_argument("--all", action="store_true", help="every configuration of a group")
    options = parser.parse_args()
    graphs, ratios = RowGraphs(), list[float]()
    chosen = list(groups(options.only))[options.skip :][: options.limit]
    for name, members in chosen:
        ratios += compare(name, members, graphs, every=options.all)
    slow = sum(ratio > 1 + GAP for ratio in ratios)
    worst = max(ratios, default=0.0)
    print(f"{len(chosen)} groups, {len(ratios)} compared, {slow} slower; worst {worst:.3f}")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
