"""What a plan simplifies is told with its reason."""

import torch
from torch import nn

from ir.cluster import Cluster
from ir.trace import trace
from planner import plan


class Net(nn.Module):
    """Three columns of the last product can be cut into three; nothing of the first can."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 9)

    def forward(self, x):
        return self.head(self.up(x)).square().mean()


def test_work_that_no_rank_can_take_a_part_of_is_told_with_its_sizes() -> None:
    graph = trace(Net(), (torch.randn(4, 8),))
    chosen = plan(graph, Cluster.local(3), global_batch=4, pin={"tensor": 3, "data": 1})
    notes = [note for note in chosen.approximations if "in full" in note]
    assert notes[0].endswith(
        "'up' is done in full by every rank of the tensor axis: 3 divides none of its sizes 8, 16. "
        "Pin a tensor degree that does"
    )
