"""ZeRO changes no number: every stage, on every kind of mesh, with everything that is special.

Random plans (`random_plans`) cut the tensor axis, so that gradients are summed, scattered, gathered
and turned over it before the data axis divides them.
"""

from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

from codegen import emit
from codegen.load import load
from ir.graph import Graph
from ir.lower import Degrees
from ir.offload import OFFLOADS
from ir.plan import spmd
from ir.promote import promote
from ir.trace import trace
from planner.cost import Roofline
from planner.zero import held_cost
from runtime.compare import Run, Training, compare, run_plain, run_program, widened, widened_batch
from runtime.host import Hosted
from runtime.trainer import run_threads
from tests.numbers.random_plans import random_plan

ROWS, WIDTH, WORDS = 12, 12, 24


class Layer(nn.Module):
    """A frozen product with a low-rank addition, as LoRA has it, and a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.tanh(self.base(h) + self.high(self.low(h)))


class Special(nn.Module):
    """Tied ends, a layer used twice, a scalar, sizes that no degree divides, unread parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, 7)
        self.back = nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.one, self.none = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(0))
        self.unread = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, target):
        x = self.shared(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        x = self.back(torch.relu(self.odd(x))) * self.scale + self.shared(x) + self.one
        x = x + self.none.sum()
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Buffers(nn.Module):
    """Batch statistics, and buffers that follow the activations; one micro-batch only."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear, self.head = nn.Linear(WIDTH, 9), nn.Linear(9, WORDS)
        self.register_buffer("seen", torch.zeros(9))

    def forward(self, ids, target):
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        h = torch.tanh(self.linear(x))
        self.seen.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return functional.cross_entropy(self.head(h).flatten(0, 1), target.flatten())


class Dropped(nn.Module):
    """Dropout in repeated layers; its masks are the one-device program's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, target):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


MODELS = {"special": Special, "buffers": Buffers, "dropped": Dropped}
TRAININGS = {
    "adamw": Training(steps=3, clip_norm=0.05),
    "momentum": Training(steps=3, lr=0.1, clip_norm=0.05, optimizer="sgd", momentum=0.9),
    "sgd": Training(steps=2, lr=0.1, clip_norm=None, optimizer="sgd"),
}
PARTS = ("parameter", "gradient", "optimizer")
MICRO_BATCHES = {"buffers": 1, "dropped": 2}
MESHES = {  # pipeline, tensor
    "data only": (1, 1), "tensor": (1, 2), "pipeline": (2, 1), "both": (2, 2), "deep": (3, 1),
}  # fmt: skip


@cache
def prepared(name: str) -> tuple[Graph, nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, batch = MODELS[name](), tuple(torch.randint(WORDS, (2, ROWS, 5)).unbind())
    return promote(trace(model, batch)), widened(model), widened_batch(batch)


@cache
def wanted(name: str, training: str) -> Run:
    graph, model, batch = prepared(name)
    if name == "dropped":
        return run(name, training, (1, Degrees(ROWS, 1, 1, 1)), 0)
    return run_plain(model, batch, {}, lambda loss: loss, TRAININGS[training])


def run(name: str, training: str, mesh: tuple[int, Degrees], zero: int, seed: int = 0) -> Run:
    graph, model, batch = prepared(name)
    plan = random_plan(graph, ROWS, Random(seed), mesh=mesh, zero=zero)
    return run_program(*load(emit(graph, plan)), model, batch, {}, TRAININGS[training])


CASES = [
    (name, zero, data, mesh, micro, training)
    for name, zero, data, mesh, micro in product(MODELS, (1, 2, 3), (2, 3), MESHES, (1, 2))
    for training in (["adamw", "momentum"] if name == "special" else ["adamw"])
    if name == "special" or (mesh in ("tensor", "pipeline") and micro == MICRO_BATCHES[name])
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_devices_give_the_numbers_of_one(case):
    name, zero, data, mesh, micro, training = case
    pipeline, tensor = MESHES[mesh]
    degrees = Degrees(ROWS, data, tensor, micro)
    found = run(name, training, (pipeline, degrees), zero, seed=CASES.index(case))
    assert compare(found, wanted(name, training), update=0.0).status == "ok", found
    assert found.optimizer_state.keys() == wanted(name, training).optimizer_state.keys()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_without_clipping_and_state(zero):
    found = run("special", "sgd", (2, Degrees(ROWS, 3, 1, 2)), zero)
    assert compare(found, wanted("special", "sgd")).status == "ok"


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_hold_the_bytes_that_the_planner_counts(zero, offload):
    """Of parameters and buffers, of gradients and of the optimizer, on every rank of two stages."""
    graph, model, batch = prepared("special")
    mesh = (2, Degrees(ROWS, 3, 2, 1))
    plan = random_plan(graph, ROWS, Random(7), mesh=mesh, zero=zero, offload=offload)
    program, cost = spmd(graph, plan), Roofline(plan.cluster, plan.mesh)

    def fn(trainer):
        trainer.step(*batch)
        slots = trainer.optimizer.local_state().values()
        slots = [t for held in slots for name, t in held.items() if name != "step"]
        slots = [t for t in slots if not isinstance(t, Hosted)]
        held = trainer.state.tensors, trainer.state.accumulators, slots
        return [sum(t.numel() * t.element_size() for t in ts if t is not None) for ts in held]

    module, layout = load(emit(graph, plan))
    found = run_threads(layout, module, model, plan.mesh.size, fn)
    for rank, held in enumerate(found):
        stage = rank // (plan.mesh.data * plan.mesh.tensor)
        names = [s.name for s in graph.state if stage in program.stages_of_state(s.name)]
        costs = [held_cost(program, name, cost, "adamw") for name in names]
        planned = [sum(getattr(c, f"{part}_bytes") for c in costs) for part in PARTS]
        assert held == planned, rank


def test_one_data_rank_has_nothing_to_divide():
    graph, _, _ = prepared("special")
    plans = [
        random_plan(graph, ROWS, Random(0), mesh=(2, Degrees(ROWS, 1, 2, 1)), zero=zero)
        for zero in (0, 3)
    ]
    texts = [emit(graph, plan).files["program.py"].replace(plan.hash, "") for plan in plans]
    assert texts[0] == texts[1]
