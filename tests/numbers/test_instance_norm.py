"""Instance norms: each row by itself, so rows stay cut, and the numbers are the model's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from codegen import emit, load
from ir.batch import flow, needs_whole_batch
from ir.cluster import Cluster
from ir.promote import promote
from ir.trace import trace
from planner import plan
from runtime.compare import Training, compare, run_plain, run_program, widened, widened_batch

ROWS, CHANNELS, SIZE = 8, 4, 5
KINDS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class Merged(nn.Module):
    """By hand: a batch norm over a view in which rows are channels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(CHANNELS))

    def forward(self, x):
        merged, weight = x.reshape(1, -1, *x.shape[2:]), self.weight.repeat(x.shape[0])
        y = functional.batch_norm(merged, None, None, weight, None, training=True)
        return y.reshape(x.shape)


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))

    def forward(self, x):
        return torch.relu(self.norm(x @ self.weight) @ self.weight).square().mean()


def norms():
    for dims, kind in KINDS.items():
        yield f"{dims}d", dims, kind(CHANNELS)
        yield f"{dims}d affine", dims, kind(CHANNELS, affine=True)
        tracked = kind(CHANNELS, affine=True, track_running_stats=True)
        yield f"{dims}d tracked", dims, tracked
    yield "evaluated", 2, nn.InstanceNorm2d(CHANNELS, track_running_stats=True).eval()
    yield "by hand", 2, Merged()


CASES = {name: (dims, norm) for name, dims, norm in norms()}


@pytest.mark.parametrize("name", CASES)
def test_rows_stay_cut_and_the_numbers_are_the_models(name):
    torch.manual_seed(0)
    dims, norm = CASES[name]
    model, batch = Model(norm), (torch.randn(ROWS, CHANNELS, *[SIZE] * dims),)
    graph = promote(trace(model, batch))
    assert needs_whole_batch(graph, flow(graph)) is None
    wide, wide_batch, training = widened(model), widened_batch(batch), Training(2)
    plain = run_plain(wide, wide_batch, {}, lambda out: out, training)
    pin = {"data": 2, "micro_batches": 2}
    chosen = plan(graph, Cluster.local(2), global_batch=ROWS, pin=pin)
    found = run_program(*load(emit(graph, chosen)), wide, wide_batch, {}, training)
    assert compare(found, plain, update=training.lr).status == "ok"
