"""`compile` and the command line take a model as it was when its plan was made."""

import pytest
import torch
from torch import nn

import shardwright as sw
from ir.errors import UsageError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 8), nn.Dropout(0.0)
        self.other = nn.Linear(6, 8)

    def forward(self, x, *, scale=1.0):
        return (self.drop(self.layer(x) + self.other(x)) * scale).square().mean()


BATCH = {"x": torch.randn(4, 6), "scale": 2.0}


def frozen(model):
    model.layer.weight.requires_grad_(False)


def dropping(model):
    model.drop.p = 0.5


def longer(model):
    model.more = nn.Linear(2, 2)


def tied(model):
    model.other.weight = model.layer.weight


CHANGES = {
    r"`other.weight: .* trained \(is layer.weight\)` is where `other.weight": tied,
    "in eval mode": lambda model: model.eval(),
    r"`layer.weight: \(8, 6\) torch.float32` is where": frozen,
    r"Dropout\(p=0.5, inplace=False\)` is where `drop: Dropout\(p=0.0": dropping,
    "`more: Linear.* is where nothing was": longer,
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_model_that_changed_since_its_plan_is_refused(said):
    model = Model()
    plan = sw.plan(model, "local:1", BATCH, global_batch=4)
    CHANGES[said](model)
    with pytest.raises(UsageError, match=f"changed since it was planned: .*{said}"):
        sw.compile(model, plan)


def test_what_is_no_plan_and_what_is_no_option_are_told():
    model = Model()
    with pytest.raises(UsageError, match="compile takes a plan, .* and not a str"):
        sw.compile(model, "plan.json")
    plan = sw.plan(model, "local:1", BATCH, global_batch=4)
    with pytest.raises(UsageError, match="no option 'optimizr': did you mean optimizer"):
        sw.compile(model, plan, optimizr="sgd")


def test_plain_arguments_are_kept_with_the_graph():
    graph = sw.plan(Model(), "local:1", BATCH, global_batch=4).graph
    assert graph.plain == (("[1]['scale']", "2.0"),)
