"""Optimizers on shards give exactly what torch.optim gives on the whole parameter."""

from dataclasses import replace

import pytest
import tiny_program as tiny
import torch

from runtime.host import Hosted
from runtime.layout import parse_layout
from runtime.optimizers import LocalOptimizer, implementation
from runtime.state import State

CASES = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adamw", {"lr": 0.01}),
    ("adamw", {"lr": 0.01, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
]


def entry(name):
    table = tiny.layout()
    table["state"][1]["names"] = [name]
    return parse_layout(table).state[1]


def drawn(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def torchs(name, parameter, options):
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]([parameter], **options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_shards_are_updated_as_the_whole(name, options):
    whole = torch.nn.Parameter(drawn(8, 6))
    oracle = torchs(name, whole, options)
    parts, frozen = [drawn(8, 6)[:4].clone(), drawn(8, 6)[4:].clone()], torch.ones(2)
    entries = (entry("top"), entry("bottom"), entry("frozen"))
    accumulators = (torch.zeros_like(parts[0]), torch.zeros_like(parts[1]), None)
    ours = LocalOptimizer(name, State(entries, (*parts, frozen), accumulators), options)
    for gradient in drawn(5, 8, 6):
        whole.grad = gradient.clone()
        oracle.step()
        ours.step((gradient[:4], gradient[4:], None))
    torch.testing.assert_close(torch.cat(parts), whole.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(frozen, torch.ones(2))
    for slot, values in ours.local_state().get("top", {}).items():
        rows = oracle.state[whole][slot]
        rows = rows if slot == "step" else rows[:4]
        torch.testing.assert_close(values, rows, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_narrow_dtype_is_kept(name, options):
    whole = torch.nn.Parameter(drawn(8, 6, dtype=torch.bfloat16))
    oracle, x = torchs(name, whole, options), whole.detach().clone()
    ours = LocalOptimizer(name, State((entry("x"),), (x,), (torch.zeros_like(x),)), options)
    for gradient in drawn(5, 8, 6, dtype=torch.bfloat16):
        whole.grad = gradient.clone()
        oracle.step()
        ours.step((gradient,))
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, whole.detach())


def test_a_parameter_without_a_gradient_stays_as_it_is():
    x = torch.ones(3)
    options = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = LocalOptimizer("adamw", State((entry("x"),), (x,), (torch.zeros(3),)), options)
    optimizer.step((None,))
    assert torch.equal(x, torch.ones(3))


def test_the_learning_rate_can_change():
    x = torch.ones(3)
    state = State((entry("x"),), (x,), (torch.zeros(3),))
    optimizer = LocalOptimizer("sgd", state, {"lr": 0.1})
    optimizer.set_learning_rate(1.0)
    optimizer.step((torch.ones(3),))
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_state_on_the_host_gives_the_same_bits(name, options):
    near, far = ([drawn(8, 6), drawn(3)] for _ in range(2))
    accumulators = tuple(torch.zeros_like(x) for x in near)
    entries = (entry("x"), entry("y"))
    hosted = tuple(replace(e, hosted=True) for e in entries)
    ours = LocalOptimizer(name, State(entries, tuple(near), accumulators), options)
    theirs = LocalOptimizer(name, State(hosted, tuple(far), accumulators), options)
    for gradient, other in zip(drawn(4, 8, 6), drawn(4, 3), strict=True):
        for optimizer in (ours, theirs):
            optimizer.step((gradient, other))
    assert all(map(torch.equal, near, far))
    for slots in theirs.local_state().values():
        assert all(isinstance(held, Hosted) for slot, held in slots.items() if slot != "step")


def test_the_implementation_is_the_one_that_plans_count():
    class OnGpu(torch.Tensor):
        is_cuda = True

    real, gpu = torch.ones(2), torch.ones(2).as_subclass(OnGpu)
    assert implementation([real]) == implementation([gpu, real]) == {"foreach": False}
    assert implementation([gpu]) == {"fused": True}
    assert implementation([gpu.to(torch.complex64)]) == {"foreach": False}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_fused_updates_are_the_same(name, options, monkeypatch):
    entries, options = (entry("x"),), dict(options)
    found = []
    for chosen in ({"foreach": False}, {"fused": True}):
        monkeypatch.setattr("runtime.optimizers.implementation", lambda group, c=chosen: c)
        x = drawn(8, 6)
        state = State((replace(entries[0], hosted=name == "adamw"),), (x,), (torch.zeros_like(x),))
        ours = LocalOptimizer(name, state, options)
        for gradient in drawn(5, 8, 6):
            ours.step((gradient,))
        found.append(x)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
