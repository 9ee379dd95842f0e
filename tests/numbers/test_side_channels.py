"""Layers that give and take more than arguments and results: attributes, lists, globals, hooks."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from checking import check
from ir.trace import trace
from runtime.models import Loaded

ROWS, WIDTH, DEPTH = 12, 15, 3

STASH: dict[str, object] = {}
"""What layers and their callers leave for one another in a global."""


class Layer(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear, self.own_forward = nn.Linear(WIDTH, WIDTH), forward

    def forward(self, x):
        return self.own_forward(self, x)


class Calls(Layer):
    """Does something in its call beside what its forward does."""

    def __call__(self, x):
        return 0.5 * super().__call__(1.5 * x)


class Net(nn.Module):
    def __init__(self, layer, forward, kind=Layer):
        super().__init__()
        self.layers = nn.ModuleList([kind(layer) for _ in range(DEPTH)])
        self.own_forward, self.kept = forward, []

    def forward(self, x):
        return self.own_forward(self, x)


def plain(layer, x):
    return x + torch.tanh(layer.linear(x))


def run(net, x):
    for layer in net.layers:
        x = layer(x)
    return x


def loss_of(x):
    return x.square().mean()


def leaving(put, collect):
    """Layers that `put` a part of the loss somewhere, which `collect` adds to the loss."""

    def layer(layer, x):
        y = layer.linear(x)
        put(layer, y.square().mean())
        return x + torch.tanh(y)

    return Net(layer, lambda net, x: loss_of(run(net, x)) + 0.1 * collect(net))


def in_attribute():
    return leaving(lambda layer, part: setattr(layer, "part", part),
                   lambda net: sum(layer.part for layer in net.layers))  # fmt: skip


def in_attribute_of_a_child():
    return leaving(lambda layer, part: setattr(layer.linear, "part", part),
                   lambda net: sum(layer.linear.part for layer in net.layers))  # fmt: skip


def in_last_attribute():
    return leaving(lambda layer, part: setattr(layer, "part", part),
                   lambda net: net.layers[-1].part)  # fmt: skip


def in_list():
    def layer(layer, x, parts):
        y = layer.linear(x)
        parts.append(y.square().mean())
        return x + torch.tanh(y)

    def forward(net, x):
        parts = []
        for each in net.layers:
            x = layer_call(each, x, parts)
        return loss_of(x) + 0.1 * sum(parts)

    def layer_call(each, x, parts):
        return nn.Module.__call__(each, (x, parts))

    return Net(lambda each, both: layer(each, *both), forward)


def collected(net):
    total = sum(net.kept)
    net.kept.clear()
    return total


def in_parent():
    net = leaving(lambda layer, part: layer.__dict__["parent"].kept.append(part), collected)
    for layer in net.layers:
        layer.__dict__["parent"] = net
    return net


def in_global():
    def put(layer, part):
        STASH["part"] = STASH.get("part", 0) + part

    return leaving(put, lambda net: STASH.pop("part"))


def told(tell, layer):
    """`tell(net, i, x)` is run before layer i."""

    def forward(net, x):
        for i, each in enumerate(net.layers):
            tell(net, i, x)
            x = each(x)
        return loss_of(x)

    return Net(layer, forward)


def scaled(read):
    return lambda layer, x: x + torch.tanh(layer.linear(x)) * read(layer)


def tell_number(net, i, x):
    net.layers[i].scale = i + 1.0


def tell_tensor(net, i, x):
    net.layers[i].scale = x.detach().mean() * (i + 1)


def tell_same_tensor(net, i, x):
    if i == 0:
        STASH["scale"] = x.square().mean()
    net.layers[i].scale = STASH["scale"]


def tell_global(net, i, x):
    STASH["scale"] = i + 1.0


def tell_global_tensor(net, i, x):
    STASH["scale"] = x.mean() * (i + 1)


def tell_list(net, i, x):
    net.layers[i].list = [i + 1.0]


def tell_child(net, i, x):
    net.layers[i].linear.scale = i + 1.0


def tell_all_once(net, i, x):
    if i == 0:
        for j, layer in enumerate(net.layers):
            layer.scale = 1.0 / (j + 1)


def tell_flag(net, i, x):
    net.layers[i].scale = 0.5 if i == DEPTH - 1 else 1.0


def tell_next(layer, x):
    """Each layer leaves for the next what it saw."""
    before = STASH.get("before", 0.0)
    y = layer.linear(x)
    STASH["before"] = y.mean()
    return x + torch.tanh(y) + before


def chained():
    def forward(net, x):
        STASH.clear()
        return loss_of(run(net, x))

    return Net(tell_next, forward)


def with_hooks(layer=None, before=None):
    net = Net(plain, lambda net, x: loss_of(run(net, x)))
    for each in net.layers:
        if layer is not None:
            each.register_forward_hook(layer)
        if before is not None:
            each.register_forward_pre_hook(before)
    return net


def hooked_parts():
    def keep(module, args, out):
        STASH["part"] = STASH.get("part", 0) + out.square().mean()

    net = Net(plain, lambda net, x: loss_of(run(net, x)) + 0.1 * STASH.pop("part"))
    for each in net.layers:
        each.register_forward_hook(keep)
    return net


def two_outputs(layer, after):
    def forward(net, x):
        total = 0.0
        for each in net.layers:
            x, other = each(x)
            total = total + after(other)
        return loss_of(x) + 0.1 * total

    return Net(layer, forward)


def detached(layer, x):
    y = plain(layer, x)
    return y, y.detach()


def doubled(layer, x):
    y = plain(layer, x)
    return y, y


class Metric(nn.Module):
    """The loss and the same without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        loss = loss_of(self.linear(x))
        return loss, loss.detach()


NETS = {
    "parts of the loss in an attribute": in_attribute,
    "parts of the loss in an attribute of a child": in_attribute_of_a_child,
    "the last part of the loss in an attribute": in_last_attribute,
    "parts of the loss in a list": in_list,
    "parts of the loss in the parent": in_parent,
    "parts of the loss in a global": in_global,
    "a number set before the call": lambda: told(tell_number, scaled(lambda a: a.scale)),
    "a tensor set before the call": lambda: told(tell_tensor, scaled(lambda a: a.scale)),
    "one tensor set before each call": lambda: told(tell_same_tensor, scaled(lambda a: a.scale)),
    "a global number": lambda: told(tell_global, scaled(lambda a: STASH["scale"])),
    "a global tensor": lambda: told(tell_global_tensor, scaled(lambda a: STASH["scale"])),
    "a list set before the call": lambda: told(tell_list, scaled(lambda a: a.list[0])),
    "a number in a child": lambda: told(tell_child, scaled(lambda a: a.linear.scale)),
    "numbers set before all calls": lambda: told(tell_all_once, scaled(lambda a: a.scale)),
    "another number in the last layer": lambda: told(tell_flag, scaled(lambda a: a.scale)),
    "each layer leaves something for the next": chained,
    "hooks that change results": lambda: with_hooks(lambda module, args, out: out * 1.5 + 0.1),
    "hooks that change arguments": lambda: with_hooks(before=lambda module, args: (args[0] * 0.5,)),
    "hooks that do both": lambda: with_hooks(
        lambda module, args, out: out + args[0], lambda module, args: (args[0] * 0.5,)),
    "hooks that keep parts of the loss": hooked_parts,
    "calls that do more than forward": lambda: Net(
        plain, lambda net, x: loss_of(run(net, x)), Calls),
    "a result that is given detached too": lambda: two_outputs(detached, lambda y: y.abs().mean()),
    "a result that is given twice": lambda: two_outputs(doubled, lambda y: y.abs().mean()),
    "the loss that is given detached too": Metric,
}  # fmt: skip


def loaded(name):
    torch.manual_seed(0)
    STASH.clear()
    first = (lambda output: output[0]) if name.startswith("the loss") else None
    return Loaded(NETS[name](), (torch.randn(ROWS, WIDTH),), {}, first, "sides")


@pytest.mark.parametrize("name", NETS)
def test_what_goes_beside_arguments_trains_as_on_one_device(name):
    for pin in ({"data": 2, "micro_batches": 1}, {"tensor": 2}):
        (found,) = check(loaded(name), 2, pin=pin, steps=2)
        assert found["status"] == "ok", found


@pytest.mark.parametrize("kind", [Layer, nn.Linear])
def test_hooks_of_all_modules_run_once(kind):
    def change(module, args, out):
        return out * 1.5 + args[0] if isinstance(module, kind) else None

    hook = register_module_forward_hook(change)
    try:
        (found,) = check(loaded("parts of the loss in an attribute"), 2, pin={"data": 2})
        (folded,) = check(loaded("hooks that do both"), 2, pin={"data": 2})
    finally:
        hook.remove()
    assert found["status"] == folded["status"] == "ok", (found, folded)


@pytest.mark.parametrize(
    "name", ["parts of the loss in an attribute", "a tensor set before the call"]
)
def test_a_traced_model_keeps_no_made_up_tensors(name):
    model = loaded(name).model
    trace(model, (torch.randn(ROWS, WIDTH),))
    assert not any("part" in vars(layer) or "scale" in vars(layer) for layer in model.layers)


@pytest.mark.parametrize("net", [
    lambda: Net(plain, lambda net, x: loss_of(run(net, x))),
    NETS["hooks that do both"], NETS["a result that is given detached too"],
])  # fmt: skip
def test_layers_that_go_by_their_arguments_stay_folded(net):
    graph = trace(net(), (torch.randn(ROWS, WIDTH),))
    calls = Counter(call.block for call in graph.calls)
    assert max(calls.values()) == DEPTH - 1  # the first needs no gradient of its argument
