"""What tracing finds out about a model, and what it refuses with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ir.errors import CaptureError
from ir.graph import BATCH, Graph, Node, State
from ir.ops import op_def
from ir.trace import trace

ROWS, SIZE, SEQ = 5, 6, 7


class Model(nn.Module):
    """Runs `function(self, *args)` on a model with one tensor of each kind."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))
        self.frozen = nn.Parameter(torch.ones(SIZE), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.register_buffer("seen", torch.zeros(SIZE))

    def forward(self, *args):
        return self.function(self, *args)


def traced(function, *args, **options) -> Graph:
    return trace(Model(function), args or (torch.randn(ROWS, SIZE),), **options)


def named(graph: Graph, name: str) -> State:
    return next(state for state in graph.state if name in state.names)


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for block in graph.blocks for node in block.nodes if node.op == op]


def product(model, x):
    return (x @ model.weight * model.frozen).square().mean()


# state


def test_tied_parameters_are_one_entry() -> None:
    assert named(traced(product), "weight").names == ("weight", "tied")


def test_only_parameters_that_receive_a_gradient_are_trained() -> None:
    graph = traced(product)
    trained = {name: named(graph, name).trainable for name in ("weight", "frozen", "unused")}
    assert trained == {"weight": True, "frozen": False, "unused": False}


def test_a_frozen_parameter_gets_no_gradient() -> None:
    graph = traced(product)
    given = {
        value for call in graph.calls for name, _ in graph.blocks[call.block].gradients
        for inner, value in zip(graph.blocks[call.block].inputs, call.arguments, strict=True)
        if inner == name
    }  # fmt: skip
    assert named(graph, "weight").name in given
    assert named(graph, "frozen").name not in given


def test_a_buffer_that_changes_is_an_output() -> None:
    def function(model, x):
        model.seen.mul_(0.5).add_(x.detach().mean(0))
        return (x @ model.weight + model.seen).square().mean()

    graph = traced(function)
    update = named(graph, "seen").update
    assert update in {result for call in graph.calls for result in call.results}
    assert named(traced(product), "weight").update is None


def test_nothing_flows_back_through_a_no_grad_region() -> None:
    def function(model, x):
        with torch.no_grad():
            scale = (x @ model.weight).abs().mean()
        return (x @ model.weight / scale).square().mean()

    graph = traced(function)
    assert len(nodes(graph, "einsum")) == 3  # two forward, one gradient


def test_metrics_are_the_other_scalars() -> None:
    def function(model, x):
        y = x @ model.weight
        return {"loss": y.square().mean(), "largest": y.abs().amax(), "y": y}

    assert [name for name, _ in traced(function).metrics] == ["largest"]


# the batch


def batch_dims(graph: Graph) -> list[int | None]:
    return [item.batch_dim for item in graph.inputs]


def test_sizes_are_expressions_of_the_batch() -> None:
    graph = traced(product)
    assert graph.inputs[0].type.shape == (BATCH, SIZE)
    assert batch_dims(graph) == [0]


def test_a_table_as_long_as_the_batch_is_not_batched() -> None:
    """It is multiplied by, so another batch size would not fit it."""

    def function(model, x, table):
        return (x @ model.weight @ table).square().mean()

    graph = traced(function, torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE))
    assert batch_dims(graph) == [0, None]


def test_convolutions_do_not_bound_the_batch() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3))
    graph = trace(model, (torch.randn(ROWS, 1, 9, 9),), loss=lambda y: y.square().mean())
    assert batch_dims(graph) == [0] and graph.guards == ()


def test_other_tensors_with_the_rows_of_the_first_are_batched() -> None:
    def function(model, x, weight, scale):
        return ((x @ model.weight).sum(-1) * weight * scale).mean()

    args = torch.randn(ROWS, SIZE), torch.rand(ROWS), torch.rand(())
    assert batch_dims(traced(function, *args)) == [0, 0, None]


def test_a_model_that_fixes_its_batch_is_traced_at_that_size() -> None:
    def function(model, x):
        return (x @ model.weight * torch.arange(ROWS)[:, None]).square().mean()

    graph = traced(function)
    assert batch_dims(graph) == [None]
    assert graph.inputs[0].type.shape == (ROWS, SIZE)


@pytest.mark.parametrize("function", [
    lambda model, x: functional.pad(x @ model.weight, (1, 0)).square().mean(),
    lambda model, x: functional.rms_norm(x @ model.weight, (SIZE,)).square().mean(),
    lambda model, x: (x @ model.weight).std(-1).sum() / (x @ model.weight).var(-1).sum(),
    lambda model, x: functional.normalize(x @ model.weight, dim=-1).sum(),
])  # fmt: skip
def test_common_operations_keep_the_batch_free_and_known(function) -> None:
    graph = traced(function)
    assert batch_dims(graph) == [0]
    assert all(op_def(node.op).known for block in graph.blocks for node in block.nodes)


def test_writes_in_place_become_new_values() -> None:
    """The derivative of a norm fills zeros into the tensor that it has just computed."""
    graph = traced(lambda model, x: (x @ model.weight).norm(dim=-1).sum())
    ops = {node.op for block in graph.blocks for node in block.nodes}
    assert "masked_fill.Scalar" in ops
    assert not [op for op in ops if op.partition(".")[0].endswith("_")]


# attention masks


def attends(mask_of):
    def function(model, x):
        q = (x @ model.weight)[:, None]
        return functional.scaled_dot_product_attention(q, q, q, mask_of()).square().mean()

    return nodes(traced(function, torch.randn(ROWS, SEQ, SIZE)), "attention")[0].args[3:5]


def positions():
    row = torch.arange(SEQ)
    return row[:, None], row


def test_a_causal_mask_is_recognised() -> None:
    assert attends(lambda: torch.ones(SEQ, SEQ).tril().bool()) == (None, True)
    assert attends(lambda: positions()[0] >= positions()[1]) == (None, True)


def test_a_mask_that_lets_everything_through_disappears() -> None:
    assert attends(lambda: positions()[0] > -1) == (None, False)


def test_a_mask_put_together_from_nothing_is_recognised() -> None:
    def begun(*parts):
        mask = torch.ones((), dtype=torch.bool)
        for part in parts:
            query, key = positions()
            mask = mask & part(query, key)
        return mask

    assert attends(lambda: begun(torch.ge)) == (None, True)
    assert attends(lambda: begun(torch.ge, lambda query, key: query + key > -1)) == (None, True)
    assert attends(lambda: begun(lambda query, key: query + key > -1)) == (None, False)


@pytest.mark.parametrize(
    "mask_of",
    [lambda query, key: (query >= key) & (query - key < 3), lambda query, key: query <= key],
    ids=["sliding window", "the future"],
)
def test_any_other_mask_stays(mask_of) -> None:
    mask, causal = attends(lambda: mask_of(*positions()))
    assert mask is not None and not causal


def test_a_mask_from_data_stays_a_mask() -> None:
    def function(model, x, keep):
        q = (x @ model.weight)[:, None]
        mask = keep[:, None, None, :].expand(-1, 1, SEQ, -1)
        return functional.scaled_dot_product_attention(q, q, q, mask).square().mean()

    graph = traced(function, torch.randn(ROWS, SEQ, SIZE), torch.ones(ROWS, SEQ, dtype=torch.bool))
    assert nodes(graph, "attention")[0].args[3] is not None


# refusals


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x).mean()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        if x.sum() > 0:
            return x * self.weight
        return x


def test_a_branch_on_data_names_module_line_and_way_out() -> None:
    with pytest.raises(CaptureError) as caught:
        trace(Branching(), (torch.randn(ROWS, SIZE),))
    text = str(caught.value)
    assert "module 'inner' (Inner)" in text
    assert "test_trace.py" in text and "`if x.sum() > 0:`" in text
    assert "torch.where" in text


def test_a_hidden_write_under_no_grad_is_refused() -> None:
    def function(model, x):
        y = x @ model.weight
        with torch.no_grad():
            y.mul_(2)
        return y.square().mean()

    with pytest.raises(CaptureError, match=r"test_trace\.py.* writes in place under torch.no_grad"):
        traced(function)


@pytest.mark.parametrize("function, reason", [
    (lambda model, x: x @ model.weight, "no loss was found"),
    (lambda model, x: {"logits": x @ model.weight}, "no loss was found"),
])  # fmt: skip
def test_a_model_without_a_loss_says_how_to_give_one(function, reason) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        traced(function)
    assert "loss(output)" in str(caught.value)


def test_a_loss_with_dims_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"no dims, got shape"):
        traced(lambda model, x: x @ model.weight, loss=lambda output: output)
