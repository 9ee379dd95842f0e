"""Repeated layers are captured once, and only if they compute the same thing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.errors import CaptureError
from ir.graph import Graph
from ir.trace import trace


class Layer(nn.Module):
    """A residual layer; `extra` changes it in a way of the caller's choice."""

    runs = 0

    def __init__(self, extra: Callable[["Layer", Tensor], Tensor] | None = None):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.extra = extra

    def forward(self, x):
        type(self).runs += 1
        y = torch.tanh(self.linear(x))
        return x + (y if self.extra is None else self.extra(self, y))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def traced(layers: list[nn.Module]) -> Graph:
    return trace(Stack(layers), (torch.randn(5, 6),))


def layer_blocks(graph: Graph) -> list[int]:
    """The block of each layer, the first layer left out: its input needs no gradient."""
    return [call.block for call in graph.calls if call.path.startswith("layers.")][1:]


def test_equal_layers_share_one_block() -> None:
    graph = traced([Layer() for _ in range(6)])
    blocks = layer_blocks(graph)
    assert len(blocks) == 5 and len(set(blocks)) == 1


def test_the_capture_of_a_layer_does_not_grow_with_their_number(monkeypatch) -> None:
    """Beyond one dry run of each layer, only one of them is captured and one more compared."""
    monkeypatch.setattr("ir.workers.can_fork", lambda: False)  # a copy's runs are not seen here
    counts = []
    for layers in (4, 12):
        Layer.runs = 0
        traced([Layer() for _ in range(layers)])
        counts.append(Layer.runs - layers)
    assert counts[0] == counts[1]


def test_a_process_runs_one_layer_of_those_alike_and_a_copy_of_it_all() -> None:
    counts = []
    for layers in (4, 12):
        Layer.runs = 0
        traced([Layer() for _ in range(layers)])
        counts.append(Layer.runs)
    assert counts[0] == counts[1]


def test_each_call_keeps_its_own_parameters() -> None:
    graph = traced([Layer() for _ in range(4)])
    names = {state.name: state.names[0] for state in graph.state}
    for number, call in enumerate(c for c in graph.calls if c.path.startswith("layers.")):
        read = {names[a] for a in call.arguments if a in names}
        assert read == {f"layers.{number}.linear.weight", f"layers.{number}.linear.bias"}


def test_alternating_layers_fold_into_two_families() -> None:
    double, plain = (lambda layer, y: y * 2), None
    blocks = layer_blocks(traced([Layer(extra) for extra in (plain, double) * 3]))
    assert blocks[0] == blocks[2] == blocks[4] != blocks[1] == blocks[3]


class Dilated(nn.Module):
    def __init__(self, dilation: int):
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=dilation, dilation=dilation)

    def forward(self, x):
        return x + self.conv(x)


def test_a_tuple_that_differs_in_the_middle_is_seen() -> None:
    graph = trace(Stack([Dilated(d) for d in (1, 1, 2, 1)]), (torch.randn(5, 6, 9),))
    dilations = [
        node.args[5] for call in graph.calls for node in graph.blocks[call.block].forward
        if node.op == "convolution.default"
    ]  # fmt: skip
    assert dilations == [(1,), (1,), (2,), (1,)]


def from_a_dict(layer: Layer, y: Tensor) -> Tensor:
    return y * layer.settings["scale"]  # type: ignore[index, operator]


def from_a_private_attribute(layer: Layer, y: Tensor) -> Tensor:
    return y * layer._scale  # type: ignore[operator]


def from_its_index(layer: Layer, y: Tensor) -> Tensor:
    return y * 2 if layer.index == 2 else y


def from_the_order_of_operands(layer: Layer, y: Tensor) -> Tensor:
    return y - y.exp() if layer.index == 2 else y.exp() - y


def from_a_constant(layer: Layer, y: Tensor) -> Tensor:
    return y * torch.tensor(2.0 if layer.index == 2 else 1.0)


EXTRAS = (from_a_dict, from_a_private_attribute, from_its_index, from_the_order_of_operands,
          from_a_constant)  # fmt: skip


@pytest.mark.parametrize("can_fork", [True, False])
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_middle_layer_that_differs_is_not_folded(extra, can_fork, monkeypatch) -> None:
    """The first and the last are alike: comparing these two would not be enough."""
    monkeypatch.setattr("ir.workers.can_fork", lambda: can_fork)
    layers = [Layer(extra) for _ in range(5)]
    for index, layer in enumerate(layers):
        layer.index = index
        layer.settings = {"scale": 2.0 if index == 2 and extra is from_a_dict else 1.0}
        layer._scale = 2.0 if index == 2 and extra is from_a_private_attribute else 1.0
    graph = traced(layers)
    found = [_layer_text(graph, number) for number in range(1, 5)]
    assert found[0] == found[2] == found[3] != found[1]


def _layer_text(graph: Graph, number: int) -> str:
    """The forward of a layer with the constants that it reads."""
    calls = [call for call in graph.calls if call.path.startswith(f"layers.{number}")]
    data = {state.name: state.data for state in graph.state}
    constants = [data[a].tolist() for c in calls for a in c.arguments if data.get(a) is not None]
    nodes = [str(node) for c in calls for node in graph.blocks[c.block].forward]
    return f"{nodes} {constants}"


def test_constants_that_are_equal_do_not_part_layers() -> None:
    def extra(layer: Layer, y: Tensor) -> Tensor:
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    assert len(set(layer_blocks(traced([Layer(extra) for _ in range(4)])))) == 1


def is_exported(x: Tensor) -> bool:
    """Export has symbols for sizes, the runs before it have none."""
    return x.fake_mode.shape_env is not None


def only_when_captured(layer: Layer, y: Tensor) -> Tensor:
    return y * (layer.index + 1) if is_exported(y) else y


def test_a_difference_that_only_the_capture_shows_is_refused() -> None:
    layers = [Layer(only_when_captured) for _ in range(3)]
    for index, layer in enumerate(layers):
        layer.index = index
    with pytest.raises(CaptureError, match=r"layers\.0 and layers\.2 look alike but compute"):
        traced(layers)


def shorter(layer: Layer, y: Tensor) -> Tensor:
    return y if layer.index != 2 else y[:, :3]


def test_the_first_to_fail_is_named_though_equal_calls_are_not_all_run_here() -> None:
    layers = [Layer(shorter) for _ in range(4)]
    for index, layer in enumerate(layers):
        layer.index = index
    with pytest.raises(CaptureError, match=r"module 'layers\.2'"):
        traced(layers)


class Reader(Stack):
    """Reads a layer's weight outside of the layer, as `how` says."""

    def __init__(self, how: str):
        super().__init__([Layer() for _ in range(4)])
        self.how = how
        if how == "tied":
            self.out = nn.Linear(6, 6)
            self.out.weight = self.layers[2].linear.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        weight = self.layers[2].linear.weight
        if self.how == "reads" or (self.how == "at export" and is_exported(x)):
            x = x @ weight
        elif self.how == "asks":
            x = x.to(weight.dtype) / sum(p.numel() for p in self.parameters())
        elif self.how == "tied":
            x = self.out(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("how", "is_read"), [("reads", True), ("at export", True), ("tied", True), ("asks", False)]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_whose_weight_others_read_is_no_constant(how, is_read, device) -> None:
    with torch.device(device):
        graph = trace(Reader(how), (torch.randn(5, 6),))
    assert {state.kind for state in graph.state} == {"parameter"}
    weight = next(s.name for s in graph.state if "layers.2.linear.weight" in s.names)
    others = [call.arguments for call in graph.calls if not call.path.startswith("layers.")]
    assert any(weight in arguments for arguments in others) == is_read


def test_what_export_sees_does_not_grow_with_the_layers(monkeypatch) -> None:
    seen = []

    def export(module, *args, **options):
        seen.append(len([*module.parameters()]))
        return exported(module, *args, **options)

    exported = torch.export.export
    monkeypatch.setattr(torch.export, "export", export)
    for layers in (4, 12):
        assert len(traced([Layer() for _ in range(layers)]).state) == 2 * layers
    assert seen[0] == seen[2] == 0
