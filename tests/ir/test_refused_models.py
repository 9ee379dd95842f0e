"""Models and batches that are refused before they are traced, each with what is in the way."""

import pytest
import torch
from torch import nn

from ir.errors import CaptureError
from ir.trace import trace


class Model(nn.Module):
    def __init__(self, loss=torch.mean):
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 8), loss

    def forward(self, x):
        return self.loss(self.layer(x))


def hooked(register):
    model = Model()
    register(model.layer)
    return model


def double(*args):
    return None


HOOKED = {
    "layer.weight": lambda layer: layer.weight.register_hook(lambda gradient: 2 * gradient),
    "layer.bias": lambda layer: layer.bias.register_post_accumulate_grad_hook(double),
    "the module layer": lambda layer: layer.register_full_backward_hook(double),
}


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_on_a_gradient_would_not_be_called(name):
    with pytest.raises(CaptureError, match=f"^{name} has a hook on its gradient"):
        trace(hooked(HOOKED[name]), (torch.randn(4, 8),))


def test_a_hook_on_a_value_is_part_of_the_model():
    model = Model()
    model.layer.register_forward_hook(lambda module, args, output: 2 * output)
    ops = [node.op for block in trace(model, (torch.randn(4, 8),)).blocks for node in block.nodes]
    assert "mul.Tensor" in ops


class Lazy(Model):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(8)


NO_MODELS = {
    "a torch.nn.Module, not function": double,
    "a ScriptModule": torch.jit.script(nn.Linear(8, 1)),
    "layer.weight has no shape yet": Lazy(),
}


@pytest.mark.parametrize("why", NO_MODELS)
def test_what_is_no_model_to_trace_is_told(why):
    with pytest.raises(CaptureError, match=why):
        trace(NO_MODELS[why], (torch.randn(4, 8),))


BATCHES = {
    "`x` is a sparse tensor": torch.eye(8).to_sparse(),
    "no rows": torch.randn(0, 8),
    r"a product of torch.float\d+ and torch.float\d+": torch.randn(4, 8, dtype=torch.float64),
}


@pytest.mark.parametrize("why", BATCHES)
def test_a_batch_that_can_not_be_is_told(why):
    with pytest.raises(CaptureError, match=why):
        trace(Model(), (BATCHES[why],))


LOSSES = {
    "torch.int64": torch.argmax,
    "torch.bool": lambda h: h.sum() > 0,
    "torch.complex64": lambda h: h.sum() * 1j,
}


@pytest.mark.parametrize("dtype", LOSSES)
def test_a_loss_without_a_gradient_is_told(dtype):
    with pytest.raises(CaptureError, match=f"the loss is {dtype}, which has no gradient"):
        trace(Model(LOSSES[dtype]), (torch.randn(4, 8),))
