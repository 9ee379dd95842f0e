"""Losses and layers of torch.nn: rows stay cut, and the numbers are the model's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from checking import check
from ir.batch import flow, needs_whole_batch
from ir.errors import CaptureError
from ir.trace import trace
from runtime.models import Loaded

ROWS, SIZE = 8, 12
IMAGE = (4, 6, SIZE)
LOSSES = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "bce with logits": functional.binary_cross_entropy_with_logits,
    "bce with logits, weights": lambda x, y, **to: functional.binary_cross_entropy_with_logits(
        x, y, weight=y + 1, pos_weight=torch.full((SIZE,), 2.0), **to
    ),
    "bce": lambda x, y, **to: functional.binary_cross_entropy(x.sigmoid(), y, **to),
    "bce, weights": lambda x, y, **to: functional.binary_cross_entropy(
        x.sigmoid(), y, weight=y + 1, **to
    ),
    "kl": lambda x, y, **to: functional.kl_div(x.log_softmax(-1), y, **to),
    "soft margin": lambda x, y, **to: functional.soft_margin_loss(x, y.round() * 2 - 1, **to),
    "cosine": lambda x, y, **to: functional.cosine_embedding_loss(
        x, y, y[:, 0].round() * 2 - 1, **to
    ),
    "ranking": lambda x, y, **to: functional.margin_ranking_loss(
        x, x * 2, y.round() * 2 - 1, margin=0.1, **to
    ),
    "hinge": lambda x, y, **to: functional.hinge_embedding_loss(x, y.round() * 2 - 1, **to),
    "triplet": lambda x, y, **to: functional.triplet_margin_loss(x, y, y * 2, **to),
    "poisson": functional.poisson_nll_loss,
    "multi margin": lambda x, y, **to: functional.multi_margin_loss(x, classes(y), **to),
    "multi margin, weights": lambda x, y, **to: functional.multi_margin_loss(
        x, classes(y), p=2, margin=0.7, weight=torch.arange(1.0, SIZE + 1), **to
    ),
    "multilabel margin": lambda x, y, **to: functional.multilabel_margin_loss(
        x, (y * (SIZE + 1)).long() - 1, **to
    ),
    "labels": functional.multilabel_soft_margin_loss,
    "nll": lambda x, y, **to: functional.nll_loss(x.log_softmax(-1), classes(y), **to),
    "nll, weights, some ignored": lambda x, y, **to: functional.nll_loss(
        x.log_softmax(-1), classes(y), weight=torch.arange(1.0, SIZE + 1), ignore_index=2, **to
    ),
    "nll of images": lambda x, y, **to: functional.nll_loss(
        x.reshape(-1, 3, 2, 2).log_softmax(1), classes(y)[:, None, None].expand(-1, 2, 2) % 3, **to
    ),
    "cross entropy, weights": lambda x, y, **to: functional.cross_entropy(
        x, classes(y), weight=torch.arange(1.0, SIZE + 1), **to
    ),
    "cross entropy, smoothed": lambda x, y, **to: functional.cross_entropy(
        x, classes(y), label_smoothing=0.1, ignore_index=2, **to
    ),
}
LAYERS = {
    "dropout in place": ((SIZE,), nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.3, True))),
    "dropout 1d": ((4, SIZE), nn.Dropout1d(0.3)),
    "dropout 2d": (IMAGE, nn.Dropout2d(0.3)),
    "dropout 3d": ((4, 3, 6, SIZE), nn.Dropout3d(0.3)),
    "alpha dropout": ((SIZE,), nn.AlphaDropout(0.3)),
    "feature alpha dropout": (IMAGE, nn.FeatureAlphaDropout(0.3)),
    "rrelu, evaluated": ((SIZE,), nn.RReLU().eval()),
    "prelu": (IMAGE, nn.PReLU(4)),
    "glu": ((SIZE,), nn.GLU()),
    "hardswish": ((SIZE,), nn.Hardswish()),
    "hardshrink": ((SIZE,), nn.Hardshrink()),
    "softshrink": ((SIZE,), nn.Softshrink()),
    "nearest": (IMAGE, nn.Upsample(scale_factor=2)),
    "nearest 1d": ((4, SIZE), nn.Upsample(scale_factor=1.5)),
    "linear": ((4, SIZE), nn.Upsample(size=5, mode="linear")),
    "bilinear": (IMAGE, nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=True)),
    "bicubic": (IMAGE, nn.Upsample(size=(5, 20), mode="bicubic")),
    "trilinear": ((4, 3, 4, SIZE), nn.Upsample(scale_factor=2, mode="trilinear")),
    "pixel shuffle": (IMAGE, nn.PixelShuffle(2)),
    "pixel unshuffle": (IMAGE, nn.PixelUnshuffle(2)),
    "channel shuffle": (IMAGE, nn.ChannelShuffle(2)),
    "circular padding": (IMAGE, nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    "adaptive max": (IMAGE, nn.AdaptiveMaxPool2d(2)),
    "reflection": ((4, SIZE), nn.ReflectionPad1d(1)),
    "weight norm": ((SIZE,), nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))),
}
FUNCTIONS = {
    "gather": lambda h: h.gather(-1, torch.zeros_like(h, dtype=torch.long)),
    "sort": lambda h: h.sort(-1).values,
    "topk": lambda h: h.topk(3, -1).values,
    "var and mean": lambda h: sum(torch.var_mean(h, -1)),
    "sum without nan": lambda h: h.nansum(-1),
    "repeat": lambda h: h.repeat(1, 2),
    "bilinear": lambda h: functional.bilinear(h, h, torch.ones(3, SIZE, SIZE)),
    "in place": lambda h: (h * 2).clamp_min_(0.1).mul_(h),
    "index select": lambda h: h.index_select(-1, torch.tensor([0, 2, 1])),
    "take along": lambda h: torch.take_along_dim(h, h.argsort(-1)[:, :3], -1),
    "take along, repeated": lambda h: torch.take_along_dim(
        h.unsqueeze(1), torch.arange(2).view(1, 2, 1), -1
    ),
    "take along, all": lambda h: torch.take_along_dim(h.unsqueeze(-1), h.argsort(-1)[..., None], 1),
    "windows": lambda h: h.unfold(1, 3, 2),
    "columns": lambda h: functional.unfold(h.view(-1, 2, 2, 3), (2, 1)).flatten(1),
    "columns, padded": lambda h: functional.unfold(
        h.view(-1, 1, 3, 4), 2, dilation=(1, 2), padding=(1, 0), stride=2
    ).flatten(1),
    "distances of rows": lambda h: torch.cdist(h, torch.arange(5 * SIZE).view(5, SIZE).to(h.dtype)),
    "distances in a row": lambda h: torch.cdist(h.view(-1, 3, 4), h.view(-1, 3, 4) + 1, p=1.0),
    "a grid": lambda h: torch.linspace(0, 1, SIZE) * h,
}
WHOLE = {
    "amax": lambda h: h.amax(0).square(),
    "norm": lambda h: h.norm().square(),
    "square": lambda h: h.mean((0, 1)).square(),
}
REFUSED = {
    "nn.RReLU in training draws": nn.RReLU(),
    "scale_grad_by_freq=True": nn.Embedding(5, SIZE, scale_grad_by_freq=True),
    "max_norm writes into its own table": nn.Embedding(5, SIZE, max_norm=1.0),
    "fused recurrent layer": nn.LSTM(SIZE, SIZE),
}


def classes(y):
    return (y[:, 0] * SIZE).long()


class Loss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(SIZE, SIZE), loss

    def forward(self, x, y):
        return self.loss(self.layer(x), y)


class Layer(nn.Module):
    """A layer between a product and a loss that is not alike for all of its results."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Linear(SIZE, SIZE), layer

    def forward(self, x):
        y = self.layer(self.first(x) if x.is_floating_point() else x)
        y = y[0] if isinstance(y, tuple) else y
        weights = torch.arange(1.0, (y.shape[-1] if y.dim() > 1 else 1) + 1, dtype=y.dtype)
        return (y.square() * weights).mean()


def assert_equal_to_one_device(model, *batch):
    """On two data ranks with two micro-batches, and on two tensor ranks."""
    graph = trace(model, batch)
    assert graph.inputs[0].batch_dim == 0 and needs_whole_batch(graph, flow(graph)) is None
    loaded = Loaded(model, batch, {}, None, "layer")
    for pin in ({"data": 2, "micro_batches": 2}, {"tensor": 2}):
        (found,) = check(loaded, 2, pin=pin, steps=1)
        assert found["status"] == "ok", found


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_its_rows_cut(name, reduction):
    torch.manual_seed(0)
    loss = LOSSES[name]
    model = Loss(lambda x, y: loss(x, y, reduction=reduction).sum())
    assert_equal_to_one_device(model, torch.randn(ROWS, SIZE), torch.rand(ROWS, SIZE))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_its_rows_cut(name):
    torch.manual_seed(0)
    shape, layer = LAYERS[name]
    assert_equal_to_one_device(Layer(layer), torch.randn(ROWS, *shape))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_keeps_its_rows_cut(name):
    torch.manual_seed(0)
    assert_equal_to_one_device(Layer(FUNCTIONS[name]), torch.randn(ROWS, SIZE))


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_all_rows_is_named_and_right(name):
    torch.manual_seed(0)
    model, batch = Layer(WHOLE[name]), (torch.randn(ROWS, SIZE),)
    graph = trace(model, batch)
    assert f"): {name} needs all rows" in (needs_whole_batch(graph, flow(graph)) or "")
    for pin in ({"data": 2}, {"tensor": 2}):
        (found,) = check(Loaded(model, batch, {}, None, "layer"), 2, pin=pin, steps=1)
        assert found["status"] == "ok", found


@pytest.mark.parametrize("reason", REFUSED)
def test_a_layer_that_no_layout_can_run_is_refused_with_its_line(reason):
    layer = REFUSED[reason]
    x = torch.zeros(4, 3, dtype=torch.long) if isinstance(layer, nn.Embedding) else None
    with pytest.raises(CaptureError, match=rf"layer \(test_layers.py:\d+\): .*{reason}"):
        trace(Layer(layer), (torch.randn(4, SIZE) if x is None else x,))


def test_the_line_that_fixes_the_batch_is_named():
    model = Layer(lambda h: h.view(4, -1))
    why = trace(model, (torch.ones(4, SIZE),)).fixed_batch
    assert "h.view(4, -1)" in why and "fixes the number of rows to 4" in why


BAGS = {
    "mean": {}, "sum": {"mode": "sum"}, "max": {"mode": "max"},
    "mean, padded": {"padding_idx": 2}, "max, padded": {"mode": "max", "padding_idx": -1},
}  # fmt: skip


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.weighs = nn.EmbeddingBag(5, SIZE, **options), options.get("mode") == "sum"

    def forward(self, ids, x):
        found = self.bag(ids, per_sample_weights=x if self.weighs else None)
        return (found * torch.arange(SIZE)).square().mean()


@pytest.mark.parametrize("name", BAGS)
def test_bags_of_one_size_keep_their_rows_cut(name):
    torch.manual_seed(0)
    ids, x = torch.randint(5, (ROWS, 3)), torch.rand(ROWS, 3)
    ids[1] = BAGS[name].get("padding_idx", 0) % 5
    assert_equal_to_one_device(Bag(**BAGS[name]), ids, x)


def test_attention_that_returns_its_weights_is_captured():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(SIZE, 3, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0].square().mean()

    assert trace(Attention(), (torch.randn(ROWS, 5, SIZE),)).inputs[0].batch_dim == 0
