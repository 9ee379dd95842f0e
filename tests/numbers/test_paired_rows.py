"""Models whose rows belong together in pairs: no micro-batch parts them."""

import pytest
import torch
from torch import nn

from checking import check
from ir.errors import Refused
from ir.trace import trace
from planner.planning import plan
from runtime.models import Loaded


class Pairs(nn.Module):
    """Compares every two rows, as a model of rewards does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x):
        pairs = self.layer(x).view(x.shape[0] // 2, 2, 6)
        return (pairs[:, 0] - pairs[:, 1]).square().mean()


def loaded(rows):
    torch.manual_seed(0)
    return Loaded(Pairs(), (torch.randn(rows, 8),), {}, None, "pairs")


@pytest.mark.parametrize("pin", [{"data": 2}, {"data": 2, "micro_batches": 3}, {"tensor": 2}])
def test_pairs_are_compared_as_on_one_device(pin):
    (found,) = check(loaded(12), 2, pin=pin, steps=2)
    assert found["status"] == "ok", found


@pytest.mark.parametrize("pin", [{"data": 2, "micro_batches": 2}, {"data": 2, "micro_batches": 6}])
def test_three_rows_or_one_are_no_pairs(pin):
    graph = trace(Pairs(), (torch.randn(12, 8),))
    with pytest.raises(Refused, match=r"find no sizes.* rows .* can have 2, 4, 6, 12\."):
        plan(graph, "local:2", global_batch=12, pin=pin)


def test_the_planner_keeps_pairs_together():
    found = plan(trace(Pairs(), (torch.randn(12, 8),)), "2x3xH100-SXM", global_batch=24)
    assert 24 // found.mesh.data // found.micro_batches % 2 == 0
