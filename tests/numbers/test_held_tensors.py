"""Models that hold tensors in other places than parameters and buffers; batches of all kinds."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from checking import check
from ir.trace import trace
from runtime.compare import widened_batch
from runtime.models import Loaded


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).pow(2).mean()


class Listed(Model):
    """A factor in a list, which is in no state of the model."""

    def __init__(self):
        super().__init__()
        self.factors = [0.1 * torch.eye(8)]

    def forward(self, x):
        return (self.layer(x) @ self.factors[0]).pow(2).mean()


class Keeping(Model):
    """Keeps what it computed last, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.last, self.calls = None, 0

    def forward(self, x):
        self.last, self.calls = self.layer(x), self.calls + 1
        return self.last.pow(2).mean()


def pruned():
    model = Model()
    prune.l1_unstructured(model.layer, "weight", amount=0.3)
    return model


@pytest.mark.parametrize("make", [Listed, Keeping, pruned])
def test_a_model_that_holds_tensors_elsewhere_can_be_compared(make):
    torch.manual_seed(0)
    (found,) = check(Loaded(make(), (torch.randn(8, 8),), {}, None, "model"), 2, pin={"data": 2})
    assert found["status"] == "ok", found


def test_tracing_leaves_a_model_as_it_was():
    model = Keeping()
    trace(model, (torch.randn(4, 8),))
    assert model.last is None and model.calls == 0


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Added(Model):
    def forward(self, pair):
        return super().forward(pair.left + pair.right)


def test_a_batch_may_be_a_named_tuple():
    batch = Pair(torch.randn(8, 8), torch.randn(8, 8))
    (found,) = check(Loaded(Added(), (batch,), {}, None, "added"), 2, pin={"data": 2})
    assert found["status"] == "ok", found


@dataclass
class Sample:
    values: Tensor
    ids: Tensor


def test_a_batch_is_widened_in_all_of_its_containers():
    x, ids = torch.randn(2), torch.arange(2)
    pair, sample = widened_batch((Pair(x, ids), Sample(x, ids)))
    assert pair.left.dtype == sample.values.dtype == torch.float64
    assert pair.right.dtype == sample.ids.dtype == torch.int64
