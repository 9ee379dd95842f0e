"""How long it takes to price one pinned plan of an already traced model.

    python benchmarks/pricing.py [--repeats 15]

Out: milliseconds per plan, the least and the median, of processor time (and elapsed, which other
processes lengthen). Nothing that depends on shapes is remembered from one plan to the next, and
each has another micro-batch size. "priced": sharding known, as for a plan; "with sharding": the
integer program of the tensor axis is built and solved as well.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import statistics
import time

import ir.graph
import planner
from ir.graph import Graph
from planner.predict import Predictor
from planner.rows import read_configuration
from prediction import RowGraphs

_COMMON = {
    "attention_flash": 1, "devices_per_node": 8, "precision": "bf16", "sequence_parallel": 1,
    "virtual_stages": 1, "framework": "megatron-core", "recompute": "none", "zero_stage": 1,
}  # fmt: skip
_LLAMA = {"family": "llama", "gated_mlp": 1, "kv_heads": 8, "vocab": 128256, "seq_len": 8192}
MODELS = {
    "Llama-3-8B, tensor 8": _COMMON | _LLAMA | {
        "layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 14336, "device": "H100-SXM",
        "tp": 8, "pp": 1, "dp": 4,
    },
    "GPT-3 175B, tensor 8, pipeline 8": _COMMON | {
        "family": "gpt", "layers": 96, "hidden": 12288, "heads": 96, "ffn_hidden": 49152,
        "vocab": 51200, "seq_len": 2048, "tied_embeddings": 1, "device": "A100-80GB",
        "tp": 8, "pp": 8, "dp": 2, "recompute": "selective",
    },
    "Llama-3-70B, ZeRO-3 over 64": _COMMON | _LLAMA | {
        "layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28672, "device": "H100-SXM",
        "tp": 1, "pp": 1, "dp": 64, "zero_stage": 3, "recompute": "full",
        "framework": "torchtitan (FSDP2)",
    },
}  # fmt: skip
MICRO_BATCHES = 16
Row = dict[str, str]


def forget_shapes() -> None:
    """Empties the caches of all functions whose results depend on shapes."""
    names = [f"planner.{item.name}" for item in pkgutil.iter_modules(planner.__path__)]
    for module in [ir.graph, *map(importlib.import_module, names)]:
        for value in vars(module).values():
            is_own = getattr(value, "__module__", "") == module.__name__
            if is_own and callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def configuration(model: dict[str, object], rows: int) -> Row:
    """The model with `rows` sequences per micro-batch."""
    batch = rows * int(str(model["dp"])) * MICRO_BATCHES
    sizes = {"micro_batch": rows, "global_batch": batch}
    return {key: str(value) for key, value in (model | sizes).items()}


def milliseconds(
    graph: Graph, model: dict[str, object], repeats: int, *, keep_sharding: bool
) -> list[tuple[float, float]]:
    """Processor and elapsed time of one plan after the other, each with other shapes."""
    predictor = Predictor()
    predictor.predict(graph, read_configuration(configuration(model, repeats + 1)))
    spent = []
    for rows in range(1, repeats + 1):
        wanted = read_configuration(configuration(model, rows))
        if keep_sharding:
            predictor.predict(graph, wanted)
        forget_shapes()
        start = time.process_time(), time.perf_counter()
        predictor.predict(graph, wanted)
        end = time.process_time(), time.perf_counter()
        spent.append(((end[0] - start[0]) * 1e3, (end[1] - start[1]) * 1e3))
    return spent


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="plans of each model")
    options = parser.parse_args()
    graphs = RowGraphs()
    heads = "least ms | median | elapsed"
    print(f"| plan | priced: {heads} | with sharding: {heads} |")
    print("|---" * 7 + "|")
    for name, model in MODELS.items():
        graph = graphs(configuration(model, 1))
        cells = []
        for keep in (True, False):
            spent = milliseconds(graph, model, options.repeats, keep_sharding=keep)
            busy, elapsed = zip(*spent, strict=True)
            cells += [min(busy), statistics.median(busy), statistics.median(elapsed)]
        print(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
