"""Sends of a stage by the blocks on it: values that skip blocks, and where to cut such models."""

from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from ir.cluster import Cluster
from ir.trace import trace
from planner import plan
from planner.cut_sends import Handed, are_alike, stage_sends


class Skips(nn.Module):
    """Every layer down is read again by one up."""

    def __init__(self, depth: int = 4, width: int = 10) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = nn.functional.silu(layer(torch.cat([x, kept.pop()], -1)))
        return self.out(x).square().mean()


def test_a_stage_sends_what_it_makes_and_takes_what_it_reads_once() -> None:
    """Against counting messages one by one, for every cut into three."""
    values = [
        Handed(0, (1, 5), 1.0, 2.0), Handed(1, (2, 3, 4), 3.0, 4.0), Handed(2, (5,), 5.0, 6.0),
        Handed(0, (1, 3, 5), 7.0, 8.0, is_passed_on=True),
    ]  # fmt: skip
    found = stage_sends(6, values)
    for inner in combinations(range(1, 6), 2):
        spans = list(zip((0, *inner), (*inner, 6), strict=True))
        stage_of = {block: s for s, (a, b) in enumerate(spans) for block in range(a, b)}
        seconds = [0.0, 0.0, 0.0]
        for value in values:
            home = stage_of[value.maker]
            others = {stage_of[reader] for reader in value.readers} - {home}
            senders = [home, *sorted(others)][: len(others)] if value.is_passed_on else [home]
            for stage in senders if others else ():
                seconds[stage] += value.sent_s
            for stage in others:
                seconds[stage] += value.taken_s
        assert np.allclose([found[a, b] for a, b in spans], seconds)


def test_what_crosses_everywhere_is_alike() -> None:
    chain = [Handed(n, (n + 1,), 1.0, 1.0) for n in range(4)]
    assert are_alike(5, chain)
    assert not are_alike(5, [*chain, Handed(0, (3,), 1.0, 1.0)])


def test_a_model_of_skips_is_cut_where_little_crosses() -> None:
    """Behind all skips one value crosses, in the middle five: on slow links that decides, and no
    pinned schedule's plan is much better."""
    graph = trace(Skips(), (torch.randn(24, 10),))
    found = plan(graph, Cluster.local(2), global_batch=24, pin={"pipeline": 2, "micro_batches": 6})
    first = found.stages[0]
    blocks = sum(placed.count for stage in found.stages for placed in stage)
    assert sum(placed.count for placed in first) == blocks - 1
