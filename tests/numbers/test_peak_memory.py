"""The planned peak of every rank is the peak of the emitted program, and its numbers are right.

Random plans over all schedules, ZeRO stages, splits, kept values and what lies on the host. A plan
speaks of pipeline ranks: each is compared with the fullest of its devices.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from codegen import emit
from codegen.load import load
from ir.cluster import Cluster
from ir.graph import Graph
from ir.lower import Degrees
from ir.offload import OFFLOADS
from ir.plan import Plan, spmd
from ir.promote import promote
from ir.trace import trace
from planner import plan
from planner.stage_bytes import batch_bytes
from planner.timeline import simulate_plan
from runtime.compare import Run, Training, compare, run_plain, run_program, widened, widened_batch
from tests.hand_plan import HOST
from tests.numbers.live_memory import measured
from tests.numbers.random_models import random_case
from tests.numbers.random_plans import random_plan

ROWS, WIDTH, WORDS, LAYERS = 12, 32, 60, 4
TOLERANCE = 0.01


class Layer(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tied ends, a skip over all layers, an odd matrix, an unread and a frozen parameter."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.layers[2].up.weight.requires_grad_(False)
        self.odd = nn.Linear(WIDTH, 7)
        self.back = nn.Linear(7, WIDTH, bias=False)
        self.unread = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = x + self.back(torch.relu(self.odd(x))) + first
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Subject:
    """A model as it is run: its graph, itself and its batch, widened, and what it gives."""

    graph: Graph
    model: nn.Module
    batch: tuple[Any, ...]
    wanted: Run


@cache
def subject(name: str) -> Subject:
    """A plain net, one with dropout (whose masks are the one-device program's), a random chain."""
    torch.manual_seed(0)
    loss: Any = lambda output: output  # noqa: E731
    if name.startswith("random"):
        case = random_case(int(name.split()[1]))
        model, batch, loss = case.model, case.args, case.loss
    else:
        model = Net(0.25 if name == "dropped" else 0.0)
        batch = tuple(torch.randint(WORDS, (2, ROWS, 6)).unbind())
    graph = promote(trace(model, batch, loss=loss))
    wide, rows = widened(model), widened_batch(batch)
    if name != "dropped":
        return Subject(graph, wide, rows, run_plain(wide, rows, {}, loss, Training()))
    alone = random_plan(graph, ROWS, Random(0), mesh=(1, Degrees(ROWS, 1, 1, 1)), zero=0)
    found = run_program(*load(emit(graph, alone)), wide, rows, {}, Training())
    return Subject(graph, wide, rows, found)


NAMES = ("tied", "dropped", "random 4", "random 9")
ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]
DRAWS = [
    pair for pair in product(ORDERS, range(4)) if pair[0][0] != "zero-bubble" or pair[1] < 2
]  # zero-bubble goes with ZeRO 0 and 1


def drawn(number: int) -> tuple[str, Plan]:
    """Every schedule with every ZeRO stage in turn, on a random mesh where both have a meaning."""
    random, ((schedule, virtual), zero) = Random(number), DRAWS[number % len(DRAWS)]
    name = NAMES[number % len(NAMES)]
    data = random.choice([2, 3]) if zero else 1
    tensor = 1 if data == 3 else random.choice([1, 2])
    pipeline = 2 if virtual > 1 else random.choice([1, 2])
    micro = 2 if virtual > 1 else random.choice([1, 2])
    degrees = Degrees(ROWS, data, tensor, micro)
    return name, random_plan(
        subject(name).graph, ROWS, random, mesh=(pipeline, degrees), zero=zero,
        order=(schedule, virtual), offload=OFFLOADS[number // len(DRAWS)],
    )  # fmt: skip


def planned_bytes(graph: Graph, chosen: Plan) -> list[int]:
    """By pipeline rank, without the batch, which emitted programs find outside on a CPU."""
    program, ranks = spmd(graph, chosen), chosen.mesh.pipeline
    return [
        cost.peak_bytes - batch_bytes(program, range(rank, len(program.stages), ranks))
        for rank, cost in enumerate(chosen.prediction.stages)
    ]


def measured_bytes(who: Subject, chosen: Plan) -> list[int]:
    program, layout = load(emit(who.graph, chosen))
    mesh = chosen.mesh
    peaks = measured(program, layout, who.model, who.batch, mesh.size).peak
    devices = mesh.data * mesh.tensor
    return [max(peaks[rank * devices : (rank + 1) * devices]) for rank in range(mesh.pipeline)]


@pytest.mark.parametrize("number", range(len(OFFLOADS) * len(DRAWS)))
def test_random_plans_need_what_is_planned(number: int) -> None:
    name, chosen = drawn(number)
    who = subject(name)
    prediction = simulate_plan(who.graph, chosen).prediction
    loaded = load(emit(who.graph, chosen))
    found = run_program(*loaded, who.model, who.batch, {}, Training())
    compared = compare(found, who.wanted)
    assert compared.status == "ok", compared
    priced = planned_bytes(who.graph, replace(chosen, prediction=prediction))
    assert priced == pytest.approx(measured_bytes(who, chosen), rel=TOLERANCE)



@pytest.mark.parametrize(
    "pin",
    [
        {"pipeline": 2, "recompute": "full", "schedule": "1f1b"},
        {"pipeline": 2, "recompute": "selective", "schedule": "zero-bubble"},
        {"data": 2, "recompute": "none", "zero": 3},
    ],
    ids=str,
)
def test_the_planner_tells_what_its_plans_need(pin: dict[str, Any]) -> None:
    who = subject("tied")
    chosen = plan(who.graph, Cluster.local(2), global_batch=ROWS, pin={**pin, "micro_batches": 2})
    planned = planned_bytes(who.graph, chosen)
    assert planned == pytest.approx(measured_bytes(who, chosen), rel=TOLERANCE)


SHORTER = (0.95, 0.85, 0.75, 0.65, 0.55)
"""Of what a plan with room takes: where other cuts do not help any more the host does."""


@pytest.mark.parametrize("offload", OFFLOADS[1:])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_and_what_those_need_that_fit_only_with_the_host(schedule: str, offload: str) -> None:
    who = subject("tied")
    pin = {"pipeline": 2, "micro_batches": 2, "schedule": schedule, "recompute": "none"}

    def best(memory_GiB: float, offload: str) -> Plan:
        near = replace(Cluster.local(2, memory_GiB=memory_GiB), own_host=HOST)
        return plan(who.graph, near, global_batch=ROWS, pin={**pin, "offload": offload})

    roomy_GiB = best(1, offload.replace("all", "optimizer")).prediction.peak_bytes / 2**30
    rooms = [1.0] if offload == "optimizer" else [share * roomy_GiB for share in SHORTER]
    plans = (best(room_GiB, offload) for room_GiB in rooms)
    chosen = next(found for found in plans if found.offload == offload)
    planned = planned_bytes(who.graph, chosen)
    assert planned == pytest.approx(measured_bytes(who, chosen), rel=TOLERANCE)
