"""Layers that stand in several places, and buffers of layers that others read or change as well."""

import pytest
import torch
from torch import nn

from checking import check
from ir.trace import trace
from runtime.models import Loaded

ROWS, WIDTH = 12, 15


class Layer(nn.Module):
    """`norm` may be another layer's; `kind` says what its own buffer does."""

    def __init__(self, norm=None, kind="norm"):
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.norm = norm or nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.kind == "counts":
            self.mean += 1
            return self.linear(x) * self.mean.mean()
        if self.kind == "averages":
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            return self.linear(x) - self.mean
        if self.kind == "reads":
            return self.linear(x) - self.norm.mean
        if self.kind == "writes":
            self.mean.copy_(x.detach().mean(0))
            return self.linear(x)
        return x + self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    def __init__(self, layers, after=None, before=None):
        super().__init__()
        self.layers, self.after, self.before = nn.ModuleList(layers), after, before

    def forward(self, x):
        if self.before is not None:
            x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return (x if self.after is None else self.after(self, x)).square().mean()


def twice(**options):
    one, two = Layer(**options), Layer(**options)
    return Net([one, two, one, two])


def with_one_norm(*, before=False):
    norm = nn.BatchNorm1d(WIDTH)
    return Net([Layer(norm) for _ in range(3)], before=norm if before else None)


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x


def with_statistics(*, after=False):
    """That all layers read and the model changes."""
    kept = Statistics()
    layers = [Layer(kept, "reads") for _ in range(3)]
    return Net(layers, lambda net, x: net.layers[0].norm(x)) if after else Net(layers, None, kept)


def written_on_top():
    def after(net, x):
        net.layers[0].mean.copy_(2 * x.detach().mean(0))
        return x

    return Net([Layer(kind="writes") for _ in range(3)], after)


def with_nested_layers():
    return Net([nn.Sequential(Layer(), Layer(kind="averages")) for _ in range(3)])


def of_layers(after):
    return Net([Layer() for _ in range(3)], after)


class Reader(nn.Module):
    """Calls a module that is not its own: `given`, or one that it `knows` in a way that no module's
    list of children has."""

    def __init__(self):
        super().__init__()
        self.linear, self.knows = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x, given=None):
        shared = given or (self.knows[0] if self.knows else self.__dict__["parent"].shared)
        return x + shared(torch.tanh(self.linear(x)))


class WithReaders(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.shared = way, nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Reader() for _ in range(3)])
        if way == "list":
            for layer in self.layers:
                layer.knows.append(self.shared)
        if way == "parent":
            for layer in self.layers:
                layer.__dict__["parent"] = self

    def forward(self, x):
        for layer in self.layers:
            match self.way:
                case "argument":
                    x = layer(x, self.shared)
                case "keyword":
                    x = layer(x, given=self.shared)
                case "function":
                    x = layer(x, lambda h: torch.nn.functional.linear(h, self.shared.weight))
                case _:
                    x = layer(x)
        return x.square().mean()


NETS = {
    **{f"a shared module as {way}": lambda way=way: WithReaders(way)
       for way in ("argument", "keyword", "function", "list", "parent")},
    "two layers twice": twice,
    "two layers that count, twice": lambda: twice(kind="counts"),
    "two layers that average, twice": lambda: twice(kind="averages"),
    "one norm in all layers": with_one_norm,
    "one norm in all layers and before them": lambda: with_one_norm(before=True),
    "statistics before layers that read them": with_statistics,
    "statistics after layers that read them": lambda: with_statistics(after=True),
    "a layer's buffer written again": written_on_top,
    "a written buffer read": lambda: Net(
        [Layer(kind="writes") for _ in range(3)], lambda net, x: x - net.layers[1].mean
    ),
    "layers in layers": with_nested_layers,
    "statistics of a layer read after it":
        lambda: of_layers(lambda net, x: x - net.layers[0].norm.running_mean),
    "all buffers read":
        lambda: of_layers(lambda net, x: x + sum(b.double().mean() for b in net.buffers())),
    "all parameters read":
        lambda: of_layers(lambda net, x: x + sum(p.square().mean() for p in net.parameters())),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_shared_layers_train_as_on_one_device(name):
    torch.manual_seed(0)
    loaded = Loaded(NETS[name](), (torch.randn(ROWS, WIDTH),), {}, None, "shared")
    for pin in ({"data": 2, "micro_batches": 1}, {"tensor": 2}):
        (found,) = check(loaded, 2, pin=pin, steps=3)
        assert found["status"] == "ok", found


@pytest.mark.parametrize("name", NETS)
def test_a_traced_model_keeps_its_own_tensors(name):
    model = NETS[name]()
    before = [*model.parameters(), *model.buffers()]
    trace(model, (torch.randn(ROWS, WIDTH),))
    after = [*model.parameters(), *model.buffers()]
    assert len(before) == len(after)
    assert all(x is y for x, y in zip(before, after, strict=True))


def test_layers_whose_buffers_only_they_change_stay_folded():
    graph = trace(Net([Layer() for _ in range(5)]), (torch.randn(ROWS, WIDTH),))
    blocks = [call.block for call in graph.calls if call.path.startswith("layers.")][1:]
    assert len(blocks) == 4 and len(set(blocks)) == 1
