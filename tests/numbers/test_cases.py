"""Models that users of parallel training trip over: any mesh gives the plain model's numbers."""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from codegen import emit
from codegen.load import load
from ir.batch import flow, needs_whole_batch
from ir.cluster import Cluster
from ir.errors import CaptureError, ShardwrightError
from ir.graph import Graph
from ir.promote import promote
from ir.trace import trace
from planner import plan
from runtime.batch import tensor_leaves
from runtime.compare import (
    Run,
    Training,
    compare,
    run_plain,
    run_program,
    widened,
    widened_batch,
)

FOLDER = Path(__file__).parent.parent / "cases"
REFUSED = "011_data_dependent_branch"
CASES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != REFUSED)
DEEP = "030_deep_stack_odd_tiles"

PINS = (  # pipeline, data, tensor, micro-batches, schedule, recompute, ZeRO
    (1, 1, 1, 2, "1f1b", "none"), (2, 1, 1, 2, "gpipe", "full"), (1, 2, 1, 1, "1f1b", "none"),
    (1, 1, 2, 1, "1f1b", "selective"), (1, 1, 3, 1, "1f1b", "none"), (3, 1, 1, 1, "1f1b", "none"),
    (2, 1, 2, 2, "1f1b", "none"), (1, 2, 2, 1, "1f1b", "full"), (1, 1, 4, 1, "1f1b", "none"),
    (3, 1, 2, 1, "gpipe", "none"), (2, 2, 2, 1, "1f1b", "none"), (1, 2, 4, 1, "1f1b", "none"),
    (1, 2, 2, 1, "1f1b", "none", 1), (2, 2, 1, 2, "1f1b", "none", 2),
    (1, 2, 1, 2, "1f1b", "full", 3), (2, 2, 2, 1, "gpipe", "none", 3),
)  # fmt: skip
FEW = PINS[1:4] + PINS[6:7] + PINS[-2:-1]
KEYS = ("pipeline", "data", "tensor", "micro_batches", "schedule", "recompute", "zero")
Pin = tuple[int | str, ...]


def module_of(case: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"case_{case}", FOLDER / f"{case}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    """A traced case with its widened model and batch, and the numbers of the plain model."""

    graph: Graph
    model: Any
    args: Any
    kwargs: Any
    rows: int
    plain: Run

    def run(self, pin: Pin) -> Run:
        cluster = Cluster.local(pin[0] * pin[1] * pin[2])
        chosen = plan(
            self.graph, cluster, global_batch=self.rows, pin=dict(zip(KEYS, pin, strict=False))
        )
        program, layout = load(emit(self.graph, chosen))
        return run_program(program, layout, self.model, self.args, self.kwargs, Training())

    def allows(self, pin: Pin) -> bool:
        """Whether the batch divides, every stage has a call, and no step needs all rows."""
        pipeline, data, _, micro_batches = pin[:4]
        batched = any(item.batch_dim is not None for item in self.graph.inputs)
        splits = data * micro_batches == 1 or (batched and self.rows % (data * micro_batches) == 0)
        whole = micro_batches > 1 and needs_whole_batch(self.graph, flow(self.graph))
        return splits and not whole and pipeline <= len(self.graph.calls)


@lru_cache(maxsize=1)
def prepared(name: str) -> Case:
    module = module_of(name)
    model, args, kwargs = module.build()
    graph = promote(trace(model, args, kwargs, loss=module.loss))
    leaves = [tensor for _, tensor in tensor_leaves((args, kwargs))]
    batched = [leaves[item.index] for item in graph.inputs if item.batch_dim is not None]
    rows = (batched or leaves)[0].shape[0]
    wide = widened(model), widened_batch(args), widened_batch(kwargs)
    case = Case(graph, *wide, rows, Run((), {}, {}))
    draws = any(node.op == "dropout" for block in graph.blocks for node in block.nodes)
    one: Pin = (1, 1, 1, 1, "1f1b", "none")
    plain = case.run(one) if draws else run_plain(*wide, module.loss, Training())
    return Case(graph, *wide, rows, plain)


@pytest.mark.parametrize("name, pin", [
    (name, pin) for name in CASES for pin in (FEW if name == DEEP else PINS)
], ids=str)  # fmt: skip
def test_any_mesh_gives_the_numbers_of_the_plain_model(name: str, pin: Pin) -> None:
    case = prepared(name)
    if not case.allows(pin):
        with pytest.raises(ShardwrightError):
            case.run(pin)
        return
    found = compare(case.run(pin), case.plain)
    assert found.status == "ok", found


def test_a_branch_on_data_is_refused_with_module_and_line() -> None:
    module = module_of(REFUSED)
    model, args, kwargs = module.build()
    with pytest.raises(CaptureError, match=rf"module \(Brancher\), {REFUSED}\.py:\d+: `if x\.mean"):
        trace(model, args, kwargs, loss=module.loss)
