"""Golden text of plans. To rewrite it: `python tests/planner/test_plan_text.py`."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import chain, products
from torch import nn

from ir.cluster import Cluster
from ir.plan import Plan
from ir.quantities import duration, size
from ir.trace import trace
from planner import plan
from planner.describe import common_path, escaped
from runtime.models import load_model

GOLDEN = Path(__file__).parent.parent / "golden"


def _chain() -> Plan:
    pin = {"pipeline": 2, "tensor": 2, "micro_batches": 2, "schedule": "1f1b"}
    graph = chain(width=128, hidden=512, seq=32)
    return plan(graph, Cluster.local(4, memory_GiB=1), global_batch=8, pin=pin)


def _products() -> Plan:
    graph = products(3, 4096, folded=True)
    return plan(graph, Cluster.parse("2x2xH100-SXM"), global_batch=4096)


def _zero() -> Plan:
    pin = {"data": 2, "pipeline": 2, "micro_batches": 2, "zero": 3}
    graph = chain(width=64, hidden=256)
    return plan(graph, Cluster.local(4, memory_GiB=1), global_batch=8, pin=pin)


PLANS: dict[str, Callable[[], Plan]] = {
    "plan_chain": _chain, "plan_products": _products, "plan_zero": _zero,
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_text_of_a_plan(name: str) -> None:
    assert PLANS[name]().text + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_the_text_has_no_address_and_no_trailing_space() -> None:
    text = _chain().text
    assert "0x" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


class Turned(nn.Module):
    """Its transposed product is written anew to be viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        turned = self.up(x).tanh().transpose(1, 2).reshape(x.shape[0], -1, 64)
        return self.down(turned).square().mean()


SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def seconds(line: str) -> float:
    """All durations of a line."""
    return sum(float(n) * SECONDS[unit] for n, unit in re.findall(r"([\d.]+) (s|ms|µs)\b", line))


def test_the_lines_of_a_block_add_up_to_it() -> None:
    graph = trace(Turned(), (torch.randn(8, 32, 64),))
    text = plan(graph, Cluster.local(2), global_batch=8, pin={"data": 2}).text
    assert "elementwise" in text and "1 copying view" in text
    for block in text.split("  ×1 ")[1:]:
        head, menu, *lines = block.partition("\n\n")[0].splitlines()
        at = next(n for n, line in enumerate(lines) if "backward: " in line)
        forward, backward = (sum(map(seconds, part)) for part in (lines[:at], lines[at:]))
        assert forward == pytest.approx(seconds(head), rel=0.02)
        assert backward == pytest.approx(seconds(menu), rel=0.02)


def test_a_stage_that_makes_values_again_while_it_would_wait_is_told() -> None:
    loaded = load_model("examples/tiny_llama.py:build", device="cpu")
    graph = trace(loaded.model, loaded.args, loaded.kwargs, loss=loaded.loss)
    made = plan(graph, Cluster.local(4, memory_GiB=4), global_batch=8, pin={"pipeline": 2})
    busy_s = [cost.forward_s + cost.backward_s for cost in made.prediction.stages]
    again = [line for line in made.text.splitlines() if " again  saved" in line]
    assert busy_s[0] < busy_s[1] and len(again) == 1
    assert again[0].endswith("; stage 0 would else wait for stage 1")


def test_a_stage_that_makes_values_again_for_want_of_room_is_told_what_all_takes() -> None:
    loaded = load_model("examples/tiny_llama.py:build", device="cpu")
    graph = trace(loaded.model, loaded.args, loaded.kwargs, loss=loaded.loss)
    cluster = Cluster.local(1, memory_GiB=0.0087)
    text = plan(graph, cluster, global_batch=64, pin={"micro_batches": 1}).text
    again = [line for line in text.splitlines() if " again  saved" in line]
    assert again
    for line in again:
        assert re.search(r"; all takes about .* more on stage 0, which has .* free, and", line)


def test_units() -> None:
    assert [duration(s) for s in (1.5, 0.0123, 1.5e-6)] == ["1.500 s", "12.3 ms", "1.5 µs"]
    assert [size(b) for b in (1024, 3 * 2**20, 2**31)] == ["1.0 KiB", "3.0 MiB", "2.0 GiB"]
    assert [size(b) for b in (0, 7, 1023, -(2**31))] == ["0 B", "7 B", "1023 B", "-2.0 GiB"]


def test_paths_of_a_repeated_block_share_a_pattern() -> None:
    assert common_path(["model.layers.0", "model.layers.11"]) == "model.layers.*"
    assert common_path(["head"]) == "head"
    assert common_path(["a.left", "a.right"]) == "a.left …"


def test_names_from_a_model_are_escaped() -> None:
    assert escaped("a\nb\x1b[0m") == "a\\nb\\x1b[0m"


if __name__ == "__main__":
    for name, make in PLANS.items():
        (GOLDEN / f"{name}.txt").write_text(make().text + "\n")
