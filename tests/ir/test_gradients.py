"""Blocks that a copy of the process differentiates are those that this one would make."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import ir.trace.gradients as gradients
import ir.workers
from torch import nn
from ir.trace import trace

def traced():
    parts = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 7)]
    return trace(nn.Sequential(*parts), (torch.ones(4, 6),), loss=lambda y: y.square().mean())

here, differentiate = [], gradients.differentiate
gradients.differentiate = lambda *arguments: here.append(1) or differentiate(*arguments)
copied = str(traced())
print(len(here), end=" ")
ir.workers.can_fork = lambda: False
here.clear()
alone = str(traced())
print(len(here), copied == alone)
"""


def test_a_copy_makes_some_blocks_and_all_are_as_without_it() -> None:
    """In a process of its own: autograd works in a copy only before it was used here."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=root
    )
    with_copy, without, same = done.stdout.split()
    assert 0 < int(with_copy) < int(without) and same == "True"
