"""Offload changes no number: with every ZeRO stage, schedule and kept set; and the device holds
what the planner says, without what lies on the host."""

from functools import cache
from itertools import product
from random import Random

import pytest

from codegen import emit
from codegen.load import load
from ir.lower import Degrees
from ir.offload import OFFLOADS
from runtime.compare import compare, run_program
from runtime.host import Hosted
from runtime.trainer import run_threads
from tests.numbers.random_plans import random_plan
from tests.numbers.test_zero_numbers import ROWS, TRAININGS, prepared, wanted

MESHES = {  # pipeline, data, tensor, micro-batches
    "alone": (1, 1, 1, 2), "data": (1, 3, 1, 2), "all": (2, 2, 2, 2), "deep": (3, 2, 1, 3),
}  # fmt: skip
CASES = [
    (name, offload, mesh, zero, training)
    for name, offload, mesh, zero in product(
        ("special", "dropped"), OFFLOADS[1:], MESHES, (0, 1, 2, 3)
    )
    for training in (["adamw", "momentum"] if name == "special" else ["adamw"])
    if (name, mesh) in (("special", mesh), ("dropped", "all"))
]


@cache
def planned(name, offload, mesh, zero, seed):
    graph, _, _ = prepared(name)
    pipeline, data, tensor, micro = MESHES[mesh]
    shape = pipeline, Degrees(ROWS, data, tensor, micro)
    plan = random_plan(graph, ROWS, Random(seed), mesh=shape, zero=zero, offload=offload)
    return plan, *load(emit(graph, plan))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_devices_give_the_numbers_of_one(case):
    name, offload, mesh, zero, training = case
    _, module, layout = planned(name, offload, mesh, zero, CASES.index(case))
    _, model, batch = prepared(name)
    found = run_program(module, layout, model, batch, {}, TRAININGS[training])
    assert compare(found, wanted(name, training), update=0.0).status == "ok", found
    assert found.optimizer_state.keys() == wanted(name, training).optimizer_state.keys()


def test_the_draws_have_every_schedule():
    plans = [planned(*case[:4], number)[0] for number, case in enumerate(CASES)]
    assert {p.schedule for p in plans} == {"1f1b", "gpipe", "interleaved", "zero-bubble"}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_lies_on_the_host_between_steps(name):
    plan, module, layout = planned("special", "optimizer", "all", 1, 0)
    _, model, batch = prepared("special")
    options = {"lr": 0.1, **({"momentum": 0.9} if name == "sgd" else {})}

    def fn(trainer):
        trainer.step(*batch)
        return [
            tensor
            for slots in trainer.optimizer.local_state().values()
            for slot, tensor in slots.items() if slot != "step"
        ]  # fmt: skip

    found = run_threads(
        layout, module, model, plan.mesh.size, fn, optimizer=name, optimizer_options=options
    )
    for held in found:
        assert held and all(isinstance(tensor, Hosted) for tensor in held)
