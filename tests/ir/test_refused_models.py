"""Models and batches that are refused before they are traced, each with what is in the way."""

import pytest
import torch
from torch import nn

from ir.errors import CaptureError
from ir.trace import trace


class Model(nn.Module):
    def __init__(self, loss=torch.mean):
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 8), loss

    def forward(self, x):
        return self.loss(self.layer(x))


def hooked(register):
    model = Model()
    register(model.layer)
    return model


def double(*args):
    return None


HOOKED = {
    "layer.weight": lambda layer: layer.weight.register_hook(lambda gradient: 2 * gradient),
    "layer.bias": lambda layer: layer.bias.register_post_accumulate_grad_hook(double),
    "the module layer": lambda layer: layer.register_full_backward_hook(double),
}


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_on_a_gradient_would_not_be_called(name):
    with pytest.raises(CaptureError, match=f"^{name} has a hook on its gradient"):
        trace(hooked(HOOKED[name]), (torch.randn(4, 8),))


def test_a_hook_on_a_value_is_part_of_the_model():
    model = Model()
    model.layer.register_forward_hook(lambda module, args, output: 2 * output)
    ops = [node.op for block in trace(model, (torch.randn(4, 8),)).blocks for node in block.nodes]
    assert "mul.Tensor" in ops


class Lazy(Model):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(8)


NO_MODELS = {
    "a torch.nn.Module, not function": double,
    "a ScriptModule": torch.jit.script(nn.Linear(8, 1)),
    "layer.weight has no shape yet": Lazy(),
}


@pytest.mark.parametrize("why", NO_MODELS)
def test_what_is_no_model_to_trace_is_told(why):
    with pytest.raises(CaptureError, match=why):
        trace(NO_MODELS[why], (torch.randn(4, 8),))


BATCHES = {
    "`x` is a sparse tensor": torch.eye(8).to_sparse(),
    "no rows": torch.randn(0, 8),
    r"a product of torch.float\d+ and torch.float\d+": torch.randn(4, 8, dtype=torch.float64),
}


@pytest.mark.parametrize("why", BATCHES)
def test_a_batch_that_can_not_be_is_told(why):
    with pytest.raises(CaptureError, match=why):
        trace(Model(), (BATCHES[why],))


LOSSES = {
    "torch.int64": torch.argmax,
    "torch.bool": lambda h: h.sum() > 0,
    "torch.complex64": lambda h: h.sum() * 1j,
}


@pytest.mark.parametrize("dtype", LOSSES)
def test_a_loss_without_a_gradient_is_told(dtype):
    with pytest.raises(CaptureError, match=f"the loss is {dtype}, which has no gradient"):
        trace(Model(LOSSES[dtype]), (torch.randn(4, 8),))


# what goes from one call of forward to the next


class Changing(nn.Module):
    """Keeps something from call to call, as `kind` says, in itself or in its layers."""

    def __init__(self, kind, layers=0):
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Changing(kind) for _ in range(layers))
        self.register_buffer("mean", torch.zeros(8))
        self.plain, self.queue, self.calls, self.table = torch.zeros(8), [], 0, None

    def forward(self, x):
        if not self.layers:
            return getattr(self, self.kind)(x * self.weight)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def assigned_buffer(self, x):
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return x - self.mean

    def assigned_parameter(self, x):
        self.weight = nn.Parameter(self.weight.detach() * 2)
        return x

    def frozen(self, x):
        self.weight.requires_grad_(False)
        return x

    def average(self, x):
        self.plain = 0.9 * self.plain + x.detach().mean(0)
        return x - self.plain

    def in_place(self, x):
        with torch.no_grad():
            self.plain.add_(1.0)
        return x - self.plain

    def queued(self, x):
        self.queue.append(x.detach().mean(0))
        return x - sum(self.queue)

    def counted(self, x):
        self.calls += 1
        return x * self.calls

    def hooked(self, x):
        x = x * 2
        if x.requires_grad:
            x.register_hook(lambda gradient: -gradient)
        return x

    def buffer_in_place(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        return x - self.mean

    def kept(self, x):
        self.calls, self.plain = self.calls + 1, x
        self.queue.append(x)
        return x

    def tabled(self, x):
        if self.table is None:
            self.table = torch.arange(8.0)
        return x + self.table


REFUSED = {
    "assigned_buffer": "mean is assigned in forward, not changed in place",
    "assigned_parameter": "weight is assigned in forward, not changed in place",
    "frozen": "weight begins or ends to require a gradient",
    "average": "plain is no buffer, but carries a tensor from call to call",
    "in_place": "writes in place into .*plain, which is neither a parameter nor a buffer",
    "queued": "queue is no buffer, but carries a tensor from call to call",
    "counted": "calls .*differs from call to call, and so does what forward computes",
    "hooked": "hooks the gradient of a tensor in its forward",
}


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_changes_from_call_to_call_is_no_part_of_a_program(kind, layers):
    with pytest.raises(CaptureError, match=REFUSED[kind]):
        trace(Loss(Changing(kind, layers)), (torch.randn(6, 8),))


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("kind", ["buffer_in_place", "kept", "tabled"])
def test_what_no_later_call_reads_otherwise_does_no_harm(kind, layers):
    model = Changing(kind, layers)
    graph = trace(Loss(model), (torch.randn(6, 8),))
    assert any(state.update for state in graph.state) == (kind == "buffer_in_place")
    for module in model.modules():
        if isinstance(module, Changing):
            assert (module.queue, module.calls, module.table) == ([], 0, None)
            assert torch.equal(module.plain, torch.zeros(8))


class Sharing(Model):
    """Two tensors of one memory; `of`: how the second is made of the first."""

    def __init__(self, of, begin=0):
        super().__init__()
        self.other = of(self.layer.weight.data.view(-1)[begin:])

    def forward(self, x):
        return self.layer(x).mean() + self.other.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("of", [nn.Parameter, nn.Buffer])
def test_two_tensors_of_one_memory_are_not_parted(of, device):
    with torch.device(device), pytest.raises(
        CaptureError, match="(layer.weight and other|other and layer.weight) lie in the same memory"
    ):
        trace(Sharing(of, 60), (torch.randn(4, 8),))


def test_pieces_of_one_memory_are_two_tensors():
    model = Model()
    flat = torch.randn(72)
    model.layer.weight = nn.Parameter(flat[:64].view(8, 8))
    model.layer.bias = nn.Parameter(flat[64:])
    assert len(trace(model, (torch.randn(4, 8),)).state) == 2


class TwoBuffers(nn.Module):
    def __init__(self, changes):
        super().__init__()
        self.weight, self.changes = nn.Parameter(torch.ones(8)), changes
        self.register_buffer("one", torch.zeros(8))
        self.register_buffer("other", self.one[:4])

    def forward(self, x):
        if self.changes:
            self.one.add_(1)
        return (x * self.weight - self.one).sum() + self.other.sum()


def test_buffers_of_one_memory_may_not_change():
    assert trace(TwoBuffers(False), (torch.randn(4, 8),))
    with pytest.raises(CaptureError, match="one and other lie in the same memory"):
        trace(TwoBuffers(True), (torch.randn(4, 8),))


@pytest.mark.parametrize("args", [torch.randn(4, 8), {"x": torch.randn(4, 8)}, None])
def test_arguments_that_are_no_tuple_are_refused(args):
    with pytest.raises(CaptureError, match=r"come as a tuple, not as .*trace\(model, \(x,\)\)"):
        trace(Model(), args)
