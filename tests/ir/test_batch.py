"""How the rows of the batch flow: cut, whole or partial, and what needs them all at once."""

import torch
from torch import nn
from torch.nn import functional

from ir.batch import dual, flow, needs_whole_batch
from ir.graph import Graph
from ir.layout import PARTIAL, REPLICATE, Placement, Shard
from ir.trace import trace

ROWS, SEQ, SIZE = 6, 5, 4


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))
        self.register_buffer("seen", torch.zeros(SIZE))
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, *args):
        return self.function(self, *args)


def traced(function, *args) -> Graph:
    return trace(Model(function), args or (torch.randn(ROWS, SEQ, SIZE),))


def place_of(graph: Graph, value: str) -> Placement:
    return flow(graph).values[value]


def gradient_places(graph: Graph, name: str) -> set[Placement]:
    """Batch placements of the gradients of a state tensor."""
    word = next(state.name for state in graph.state if name in state.names)
    found, batch_flow = set(), flow(graph)
    for index, call in enumerate(graph.calls):
        block = graph.blocks[call.block]
        values = dict(zip(block.inputs, call.arguments, strict=True))
        spread = batch_flow.spread_of(graph, index)
        found |= {spread.place[g] for value, g in block.gradients if values[value] == word}
    return found


def mean_square(model, x):
    return (x @ model.weight).square().mean()


def test_inputs_are_cut_and_state_is_whole() -> None:
    graph = traced(mean_square)
    assert place_of(graph, graph.inputs[0].name) == Shard(0)
    assert {place_of(graph, state.name) for state in graph.state} == {REPLICATE}


def test_a_mean_over_rows_is_a_partial_sum_and_so_is_a_gradient() -> None:
    graph = traced(mean_square)
    assert place_of(graph, graph.loss) == PARTIAL
    assert gradient_places(graph, "weight") == {PARTIAL}
    assert needs_whole_batch(graph, flow(graph)) is None


def test_the_gradient_of_a_placement_is_its_dual() -> None:
    assert dual(REPLICATE) == PARTIAL
    assert dual(PARTIAL) == REPLICATE
    assert dual(Shard(1, 2)) == Shard(1, 2)


def test_rows_flattened_with_the_sequence_stay_cut() -> None:
    def function(model, x):
        target = torch.zeros(x.shape[0] * SEQ, dtype=torch.long)
        return functional.cross_entropy((x @ model.weight).flatten(0, 1), target)

    graph = traced(function)
    assert place_of(graph, graph.loss) == PARTIAL
    assert needs_whole_batch(graph, flow(graph)) is None


def test_rows_behind_another_dim_are_cut_with_an_outer() -> None:
    def function(model, x):
        return (x.transpose(0, 1).flatten(0, 1) @ model.weight).square().mean()

    graph = traced(function)
    spreads = [flow(graph).spread_of(graph, index) for index in range(len(graph.calls))]
    places = {place for spread in spreads for place in spread.place.values()}
    assert Shard(0, SEQ) in places


def test_batch_statistics_need_all_rows() -> None:
    def function(model, x):
        return model.norm((x @ model.weight).transpose(1, 2)).square().mean()

    graph = traced(function)
    reason = needs_whole_batch(graph, flow(graph))
    assert reason and "needs all rows of the batch at once" in reason
    assert reason.startswith("norm (") and "): batch_norm in training mode needs" in reason


def test_what_needs_all_rows_has_its_name_in_the_model() -> None:
    for name, function in {
        "std": lambda model, x: ((x @ model.weight) / (x @ model.weight).std(0)).square().mean(),
        "normalize": lambda model, x: functional.normalize(x @ model.weight, dim=0).sum().exp(),
        "softmax": lambda model, x: (x @ model.weight).softmax(0).square().mean(),
    }.items():
        graph = traced(function)
        reason = needs_whole_batch(graph, flow(graph))
        assert reason and f"): {name} needs all rows of the batch at once" in reason


def test_what_depends_on_inputs_alone_may_be_computed_early() -> None:
    """The number of rows that count, over the whole batch, divides the loss."""

    def function(model, x, keep):
        losses = (x @ model.weight).square().mean((1, 2))
        return (losses * keep).sum() / keep.sum()

    graph = traced(function, torch.randn(ROWS, SEQ, SIZE), torch.rand(ROWS))
    batch_flow = flow(graph)
    gathered = [
        place for index, call in enumerate(graph.calls)
        for place in batch_flow.spread_of(graph, index).gathers(graph.blocks[call.block])
    ]  # fmt: skip
    assert gathered and needs_whole_batch(graph, batch_flow) is None


def test_a_mean_of_means_is_not_taken_for_a_mean() -> None:
    """Dividing by a mean of computed values needs their mean over all rows."""

    def function(model, x):
        y = (x @ model.weight).square()
        return (y / y.mean().sqrt()).mean()

    graph = traced(function)
    assert needs_whole_batch(graph, flow(graph))
