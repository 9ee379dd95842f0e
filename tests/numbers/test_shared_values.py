"""What every layer reads and nobody differentiates: it goes from rank to rank once, and stages of a
rank share it. The numbers stay those of one device, the planned peak that of the program."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from codegen import emit
from codegen.load import load
from ir.lower import Degrees
from ir.plan import Plan, spmd
from ir.promote import promote
from ir.trace import trace
from planner.timeline import simulate_plan
from runtime.compare import Training, compare, run_plain, run_program, widened, widened_batch
from tests.numbers.random_plans import random_plan
from tests.numbers.test_peak_memory import Subject, measured_bytes, planned_bytes

ROWS, WIDTH, WORDS, LAYERS, LENGTH = 12, 8, 30, 6, 9
TOLERANCE = 0.01


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, near: Tensor, turn: Tensor) -> Tensor:
        mixed = torch.where(near, x @ x.transpose(-1, -2), 0.0) @ x
        return x + self.down(functional.gelu(self.up(mixed * turn)))


class Masked(nn.Module):
    """A mask of the batch, larger than the activations, and a table that is no batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("speeds", torch.linspace(0.1, 1.0, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        near = ids.unsqueeze(-1) >= ids.unsqueeze(-2)
        turn = torch.cos(torch.arange(LENGTH).unsqueeze(-1) * self.speeds)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, near, turn)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def subject() -> Subject:
    torch.manual_seed(0)
    model, batch = Masked(), tuple(torch.randint(WORDS, (2, ROWS, LENGTH)).unbind())
    graph = promote(trace(model, batch))
    wide, rows = widened(model), widened_batch(batch)
    return Subject(graph, wide, rows, run_plain(wide, rows, {}, lambda out: out, Training()))


def drawn(number: int) -> Plan:
    random = Random(number)
    pipeline, virtual = random.choice([(2, 2), (2, 3), (2, 4), (3, 2), (3, 1), (4, 2)])
    order = ("interleaved", virtual) if virtual > 1 else (random.choice(["1f1b", "gpipe"]), 1)
    data = random.choice([1, 2]) if pipeline < 4 else 1
    micro = pipeline * (2 if ROWS % (2 * pipeline * data) == 0 else 1)
    degrees = Degrees(ROWS, data, random.choice([1, 2]) if pipeline * data < 4 else 1, micro)
    return random_plan(
        subject().graph, ROWS, random, mesh=(pipeline, degrees), zero=0, order=order,
        offload="none",
    )  # fmt: skip


@pytest.mark.parametrize("number", range(16))
def test_random_plans_are_right_and_need_what_is_planned(number: int) -> None:
    chosen, who = drawn(number), subject()
    found = run_program(*load(emit(who.graph, chosen)), who.model, who.batch, {}, Training())
    compared = compare(found, who.wanted)
    assert compared.status == "ok", compared
    priced = replace(chosen, prediction=simulate_plan(who.graph, chosen).prediction)
    assert planned_bytes(who.graph, priced) == pytest.approx(
        measured_bytes(who, chosen), rel=TOLERANCE
    )


def test_a_mask_reaches_every_rank_once() -> None:
    """The first stage of a rank that reads it hands it on to the others there."""
    graph = subject().graph
    plans = [plan for plan in map(drawn, range(16)) if plan.virtual_stages > 1]
    assert {plan.mesh.pipeline for plan in plans} >= {2, 3}
    for plan in plans:
        program, ranks = spmd(graph, plan), plan.mesh.pipeline
        (mask,) = (v for v in program.makers if program.local_type_of(v).dtype == "bool")
        readers = {program.stage_of[i] for i, call in enumerate(graph.calls)
                   if mask in call.arguments}  # fmt: skip
        sent = [m for m in program.messages if m.value == mask]
        assert {m.target for m in sent} == readers - {program.stage_of[program.makers[mask][0]]}
        coming = [m.target % ranks for m in sent if not program.is_near(m)]
        assert len(coming) == len(set(coming))
        assert all(m.source < m.target and m.gradient is None for m in sent)
