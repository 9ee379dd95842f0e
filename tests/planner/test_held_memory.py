"""What ranks hold between forward and backward, and between the halves of a split backward.

The emitted program's own tensors are measured, on threads, after every function that a rank runs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen import emit
from codegen.load import load
from ir.cluster import Cluster
from planner import plan
from runtime.compare import widened
from runtime.trainer import run_threads
from tests.numbers.schedule_model import ROWS, build, traced

SIZES = [
    ("gpipe", {"pipeline": 2}), ("1f1b", {"pipeline": 2}), ("1f1b", {"pipeline": 4}),
    ("zero-bubble", {"pipeline": 2}), ("zero-bubble", {"pipeline": 4}),
    ("interleaved", {"pipeline": 2, "virtual_stages": 2}),
]  # fmt: skip


def storages(tree: Any) -> dict[int, int]:
    """Bytes by address of the storages of all tensors in nested lists and tuples; the rows of the
    batch, which are indices, are there all step."""
    if isinstance(tree, torch.Tensor):
        if tree.dtype == torch.int64:
            return {}
        return {tree.untyped_storage().data_ptr(): tree.untyped_storage().nbytes()}
    found: dict[int, int] = {}
    for item in tree if isinstance(tree, (list, tuple)) else ():
        found |= storages(item)
    return found


class Watch:
    """A program whose stages tell what each rank holds, after every function."""

    def __init__(self, program: Any, ranks: int) -> None:
        self.held: list[dict[tuple[int, int], int]] = [{} for _ in range(ranks)]
        self.peak = [0] * ranks
        self.STAGES = tuple(self.watched(n, stage) for n, stage in enumerate(program.STAGES))

    def watched(self, number: int, stage: Any) -> Any:
        names = ("forward", "backward", "backward_input", "backward_weight")
        given = {name: getattr(stage, name) for name in names}
        return replace(stage, **{
            name: self.noting(number, function) for name, function in given.items() if function
        })  # fmt: skip

    def noting(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(ctx: Any, *rest: Any) -> Any:
            result = function(ctx, *rest)
            held = self.held[ctx.mesh.pipeline.index]
            held.pop((number, ctx.micro), None)
            if isinstance(result, tuple):  # what a later function of the micro-batch reads
                held[number, ctx.micro] = sum(storages(result[1]).values())
            rank = ctx.mesh.pipeline.index
            self.peak[rank] = max(self.peak[rank], sum(held.values()))
            return result

        return call


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("schedule", "pin"), SIZES, ids=str)
def test_what_a_rank_holds_is_what_the_plan_says(
    schedule: str, pin: dict[str, int], recompute: str
) -> None:
    graph, (model, args) = traced(), build()
    chosen = plan(
        graph, Cluster.local(pin["pipeline"]), global_batch=ROWS,
        pin={**pin, "schedule": schedule, "micro_batches": 4, "recompute": recompute},
    )  # fmt: skip
    program, layout = load(emit(graph, chosen))
    watch = Watch(program, chosen.mesh.pipeline)
    run_threads(
        layout, watch, widened(model), chosen.mesh.pipeline, lambda t: t.step(*args).item()
    )
    ranks = chosen.mesh.pipeline
    rows = [
        sum(args[item["index"]].nbytes for item in layout["inputs"] if item["name"] in read)
        for read in ({n for s in layout["stages"][r::ranks] for n in s["inputs"]}
                     for r in range(ranks))
    ]  # fmt: skip
    held = [peak + size for peak, size in zip(watch.peak, rows, strict=True)]
    assert held == [cost.saved_bytes for cost in chosen.prediction.stages]
