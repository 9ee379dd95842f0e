"""Any legal plan of any model gives the numbers of the plain model."""

from random import Random

import pytest
from torch import nn

from codegen import emit
from codegen.load import load
from ir.batch import flow, needs_whole_batch
from ir.errors import Refused
from ir.promote import promote
from ir.trace import trace
from runtime.compare import Training, compare, run_plain, run_program, widened, widened_batch
from tests.numbers.random_models import ROWS, random_case
from tests.numbers.random_plans import random_plan

MODELS = 24
PLANS = 9


@pytest.mark.parametrize("seed", range(MODELS))
def test_random_plans_equal_the_plain_model(seed: int) -> None:
    case = random_case(seed)
    graph = promote(trace(case.model, case.args, loss=case.loss))
    model, args = widened(case.model), widened_batch(case.args)
    training = Training()
    plain = run_plain(model, args, {}, case.loss, training)
    needs_all_rows = needs_whole_batch(graph, flow(graph))
    random = Random(1000 + seed)
    executed = 0
    while executed < PLANS:
        try:
            plan = random_plan(graph, ROWS, random)
        except Refused as error:
            assert needs_all_rows and "plan with micro_batches=1" in str(error)
            continue
        program, layout = load(emit(graph, plan))
        found = compare(run_program(program, layout, model, args, {}, training), plain)
        assert found.status == "ok", (plan.mesh, plan.degrees, plan.stages, found)
        executed += 1


def test_most_models_allow_micro_batches() -> None:
    """Refusals are the exception: they come from batch statistics alone."""
    batch_norms = [
        any(isinstance(part, nn.BatchNorm1d) for part in random_case(seed).model.modules())
        for seed in range(MODELS)
    ]
    assert 0 < sum(batch_norms) < MODELS / 4
