"""All ranks of a job make as many process groups, so that torch gives each one name on all members.

torch.distributed names a group that only its members make by its ranks and the number of groups
made before. Ranks that made fewer wait for ever, and threads don't show it: here every rank's
groups are listed without a connection.
"""

from itertools import product

import pytest
import torch

from codegen import emit
from codegen.load import load
from ir.graph import Graph
from ir.promote import promote
from ir.trace import trace
from runtime.collective_calls import collective_calls
from runtime.layout import Layout, parse_layout
from runtime.mail import Mail
from runtime.mesh import build_mesh
from runtime.state import sharing_groups
from tests.numbers.schedule_model import TIED_ROWS, build_tied, plan_of

CUTS = {3: (3, 6), 4: (2, 4, 6), 6: (1, 3, 4, 5, 6)}
CASES = [("1f1b", 3, 1), ("gpipe", 4, 1), ("zero-bubble", 3, 1), ("interleaved", 3, 2)]
Ranks = tuple[int, ...]


class Lister:
    """A transport that connects nothing and lists the ranks of each group that it makes."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.made: list[Ranks] = []

    def group(self, ranks: Ranks) -> "Member":
        self.made.append(tuple(sorted(ranks)))
        return Member(ranks.index(self.rank), len(ranks))

    def channel(self, source: int, target: int) -> None:
        self.group((source, target))

    def stand_by(self) -> None:
        self.made.append((self.rank,))


class Member:
    """A group that can do nothing."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


@pytest.fixture(scope="module")
def graph() -> Graph:
    return promote(trace(*build_tied()))


def layout_of(graph: Graph, schedule: str, ranks: int, virtual: int, data: int) -> Layout:
    plan = plan_of(
        graph, schedule, ranks=ranks, virtual=virtual, data=data, micro=6, rows=TIED_ROWS,
        cuts=CUTS[ranks * virtual],
    )  # fmt: skip
    _, layout = load(emit(graph, plan))
    return parse_layout(layout)


def assert_alike(listers: list[Lister]) -> None:
    """A group is the n-th of all its members, for one n; all have made as many."""
    assert len({len(lister.made) for lister in listers}) == 1
    for lister in listers:
        assert lister.made
        for number, group in enumerate(lister.made):
            for member in group:
                assert listers[member].made[number : number + 1] == [group]


@pytest.mark.parametrize(("case", "data"), list(product(CASES, (1, 2))))
def test_a_trainers_groups_are_the_same_on_all_their_members(graph, case, data):
    layout = layout_of(graph, *case, data)
    listers = [Lister(rank, layout.mesh.world_size) for rank in range(layout.mesh.world_size)]
    for lister in listers:
        mesh = build_mesh(layout.mesh, lister)
        before = len(lister.made)
        sharing_groups(layout, mesh, lister)
        assert len(lister.made) - before > 1  # several sets of stages share state
        Mail(layout, mesh, lister)
    assert_alike(listers)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_groups_that_are_measured_are_too(ranks):
    listers = [Lister(rank, ranks) for rank in range(ranks)]
    for lister in listers:
        list(collective_calls(lister, (64,)))
    assert_alike(listers)
