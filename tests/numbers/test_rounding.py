"""Gradients that are zero but for rounding: no mismatch; differences that are none: one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from checking import check
from runtime.compare import (
    Training,
    compare,
    run_plain,
    widened,
    widened_batch,
)
from runtime.models import Loaded
from runtime.own_precision import own_precision_error
from runtime.rounding import MOST_WIDER, NUDGES, nudged, scale_of

TRAINING = Training(2)


class Cancelling(nn.Module):
    """Two convolutions whose biases the batch norms take out again."""

    def __init__(self):
        super().__init__()
        self.down, self.down_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.up_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.down_norm(self.down(x)))
        x = torch.relu(self.up_norm(self.up(x)))
        return self.out(x.mean((2, 3))).square().mean()


def case():
    torch.manual_seed(0)
    return Cancelling(), (torch.randn(8, 3, 16, 16),)


def identity(loss):
    return loss


@pytest.fixture(scope="module")
def runs():
    model, batch = case()
    wide, wide_batch = widened(model), widened_batch(batch)
    models = [wide, *(nudged(wide, n) for n in range(NUDGES))]
    first, *others = (run_plain(m, wide_batch, {}, identity, TRAINING) for m in models)
    return first, others


def test_the_bias_before_a_batch_norm_is_no_mismatch():
    model, batch = case()
    loaded = Loaded(model, batch, {}, None, "cancelling")
    for result in check(loaded, 2):
        assert result["status"] == "ok", result


class Constant(nn.Module):
    """Its loss is the number of rows, whatever the parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).softmax(-1).sum()


def test_gradients_that_are_all_zero_in_truth_are_no_mismatch():
    torch.manual_seed(0)
    loaded = Loaded(Constant(), (torch.randn(12, 16),), {}, None, "constant")
    for pin in ({"data": 2}, {"tensor": 2}):
        (found,) = check(loaded, 2, pin=pin)
        assert found["status"] == "ok", found


class Shifted(nn.Module):
    """All that is trained is a shift, which the norm takes out again."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 32), nn.LayerNorm(32, elementwise_affine=False)
        self.layer.requires_grad_(False)
        self.shift = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x):
        return self.norm(self.layer(x) + self.shift).pow(3).mean()


def shifted(seed=0):
    torch.manual_seed(seed)
    return Shifted(), (torch.randn(8, 16),)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_whose_only_gradient_is_zero_in_truth_is_no_defect(seed):
    """Neither at its own precision nor in float64."""
    model, batch = shifted(seed)
    (found,) = check(Loaded(model, batch, {}, None, "shifted"), 2, pin={"data": 2})
    assert found["status"] == "ok", found


def own_runs(model, batch):
    """At the model's own precision, of it and of copies that differ in a last bit."""
    models = [model, *(nudged(model, n) for n in range(NUDGES))]
    first, *others = (
        run_plain(m, batch, {}, identity, Training(1), promote=False) for m in models
    )
    return first, others


def test_at_its_own_precision_noise_is_measured_by_what_a_last_bit_moves():
    model, batch = shifted()
    first, others = own_runs(model, batch)
    (noise,) = first.gradients.values()
    assert 0 < float(noise.abs()) < 1e-5

    def error(gradient, copies):
        found = replace(first, gradients={"shift": torch.full((1,), gradient)})
        return own_precision_error(found, first, model, copies)

    moved = max(float((run.gradients["shift"] - noise).abs()) for run in others)
    assert error(-float(noise), ()) > 1 and error(-float(noise), others) < 1
    assert error(float(noise) + 40 * moved, others) > 1
    assert error(1e-3, others) > 100


@pytest.mark.parametrize("change", ["one tensor", "all", "none of it"])
def test_at_its_own_precision_a_real_gradient_is_not_compared_with_noise(change):
    """With the copies about the same error as without: how much a last bit moves differs from one
    processor to the next."""
    model, batch = case()
    first, others = own_runs(model, batch)
    off = {
        "one tensor": first.gradients | {"out.weight": first.gradients["out.weight"] * 1.001},
        "all": {name: gradient * 1.001 for name, gradient in first.gradients.items()},
        "none of it": {},
    }[change]
    found = replace(first, gradients=off)
    assert own_precision_error(first, first, model, others) == 0
    error, alone = (own_precision_error(found, first, model, copies) for copies in (others, ()))
    assert error > 40 and 0.5 * alone < error <= alone


class Centred(nn.Module):
    """Small differences of large values, divided by their size."""

    def __init__(self):
        super().__init__()
        self.first, self.bilinear = nn.Linear(15, 15), nn.Bilinear(15, 5, 6)

    def forward(self, x, weights):
        h = torch.cumsum(self.first(x) + 10, 1)
        z = self.bilinear(h, weights)
        z = z - z.mean(0, keepdim=True)
        return torch.linalg.vector_norm(z / (z.std(0) + 1e-3)) + z.topk(2, dim=1).values.mean()


def test_a_right_program_of_an_ill_conditioned_model_is_no_defect():
    torch.manual_seed(0)
    batch = torch.randn(12, 15), 100 + torch.rand(12, 5) / 10
    (found,) = check(Loaded(Centred(), batch, {}, None, "centred"), 2, pin={"data": 2}, steps=1)
    assert found["status"] == "ok", found


def test_at_its_own_precision_a_gradient_that_is_no_number_is_a_difference():
    """But not from a model whose own is none."""
    model, batch = shifted()
    first, _ = own_runs(model, batch)
    nan = replace(first, gradients={"shift": torch.full((1,), float("nan"))})
    assert own_precision_error(nan, first, model) == float("inf")
    assert own_precision_error(nan, nan, model) == own_precision_error(first, nan, model) == 0


class Balanced(nn.Module):
    """The batch norm's bias starts where the loss has its minimum in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_what_rounding_alone_trains_is_no_mismatch():
    torch.manual_seed(0)
    loaded = Loaded(Balanced(), (torch.randn(6, 6, 8, 8),), {}, None, "balanced")
    results = [result for devices in (1, 2) for result in check(loaded, devices)]
    refused = {"pipeline=2 data=1 tensor=1"}  # one block
    assert {r["plan"] for r in results if r["status"] != "ok"} <= refused, results


def status(runs, **changed):
    plain, others = runs
    found = replace(plain, **changed)
    return compare(found, plain, update=TRAINING.lr, nudged=others).status


@pytest.mark.parametrize("relative", [1e-6, 1e-8])
@pytest.mark.parametrize("name", ["down.weight", "up_norm.bias", "out.weight"])
def test_a_gradient_that_is_off_is_caught(runs, name, relative):
    gradients, tensors = runs[0].gradients, runs[0].tensors
    off = gradients | {name: gradients[name] * (1 + relative)}
    assert status(runs, gradients=off) == "mismatch"
    assert status(runs, tensors=tensors | {name: tensors[name] * (1 + relative)}) == "mismatch"
    assert status(runs) == "ok"


def test_a_gradient_that_should_be_zero_and_is_not_is_caught(runs):
    gradients = runs[0].gradients
    largest = max(float(g.abs().max()) for g in gradients.values())
    off = gradients | {"up.bias": gradients["up.bias"] + 1e-12 * largest}
    assert status(runs, gradients=off) == "mismatch"


def test_a_model_that_jumps_is_compared_all_the_same():
    assert scale_of(2.0, 1e-16, 1e-9) == 2.0
    assert scale_of(2.0, 1e-3, 1e-9) == 2.0 * MOST_WIDER
    assert scale_of(2.0, float("inf"), 1e-9) == scale_of(2.0, float("nan"), 1e-9) == 2.0
