"""Losses that every data rank holds whole: their gradient counts once, not once per rank."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from codegen import emit
from codegen.load import load
from ir.cluster import Cluster
from ir.errors import CaptureError
from ir.promote import promote
from ir.trace import trace
from planner import plan
from runtime.compare import Training, compare, run_plain, run_program, widened, widened_batch

ROWS, SIZE = 24, 12
LOSSES = {
    "a number added": lambda h, layer: h.pow(2).mean() + 3.0,
    "a statistic of the whole batch": lambda h, layer: h.std(),
    "a square of a mean": lambda h, layer: h.mean().pow(2) + h.mean().exp(),
    "a sum over rows, squared": lambda h, layer: h.sum(0).pow(2).sum(),
    "every second row": lambda h, layer: h[::2].pow(2).mean(),
    "parameters alone": lambda h, layer: layer.weight.pow(2).sum(),
    "a log-likelihood": lambda h, layer: functional.nll_loss(
        functional.log_softmax(h, -1), torch.arange(h.shape[0]) % SIZE
    ),
}


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(SIZE, SIZE), loss

    def forward(self, x):
        return self.loss(self.layer(x), self.layer)


def identity(loss):
    return loss


@pytest.mark.parametrize("name", LOSSES)
def test_a_whole_loss_gives_the_plain_gradient_on_data_ranks(name):
    torch.manual_seed(0)
    model, batch = Model(LOSSES[name]), (torch.randn(ROWS, SIZE),)
    graph = promote(trace(model, batch))
    if graph.inputs[0].batch_dim is None:
        pytest.fail("the batch must stay free")
    wide, wide_batch, training = widened(model), widened_batch(batch), Training(2)
    plain = run_plain(wide, wide_batch, {}, identity, training)
    for pin in ({"data": 2, "tensor": 1, "pipeline": 1}, {"data": 1, "tensor": 2, "pipeline": 1}):
        chosen = plan(graph, Cluster.local(2), global_batch=ROWS, pin=pin)
        found = run_program(*load(emit(graph, chosen)), wide, wide_batch, {}, training)
        assert compare(found, plain, update=training.lr).status == "ok", (name, pin)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


stored = Scaled.apply

REFUSED = {
    "torch.autograd.Function": lambda h, layer: Scaled.apply(h).sum(),
    "Scaled is a torch.autograd.Function": lambda h, layer: stored(h).sum(),
    "draws random numbers": lambda h, layer: (h + torch.randn_like(h)).square().mean(),
    "nothing to train": lambda h, layer: h.detach().sum(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_layout_independent_meaning_is_refused(reason):
    with pytest.raises(CaptureError, match=reason):
        trace(Model(REFUSED[reason]), (torch.randn(4, SIZE),))


def test_a_recurrent_cell_is_refused():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(SIZE, SIZE)

        def forward(self, x):
            return self.cell(x).square().mean()

    with pytest.raises(CaptureError, match="fused recurrent layer"):
        trace(Cell(), (torch.randn(4, SIZE),))
