"""Torch's own transformers with masks, which look whether those are causal."""

import pytest
import torch
from torch import nn

from checking import check
from ir.trace import trace
from runtime.models import Loaded

ROWS, LENGTH, WIDTH = 12, 5, 16
OPTIONS = {"dim_feedforward": 24, "dropout": 0.0}


class Whole(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.inner = nn.Transformer(WIDTH, 4, 2, 2, batch_first=batch_first, **OPTIONS)

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.inner(x, x, tgt_mask=mask).square().mean()


class Encoder(nn.Module):
    def __init__(self, mask):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, **OPTIONS)
        self.inner = nn.TransformerEncoder(layer, 3)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.inner(x, mask=self.mask).square().mean()


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
MODELS = {
    "a causal mask": lambda: Encoder(CAUSAL),
    "a causal mask of truth values": lambda: Encoder(CAUSAL != 0),
    "another mask": lambda: Encoder(CAUSAL.T.contiguous()),
    "encoder and decoder": lambda: Whole(True),
    "encoder and decoder, rows second": lambda: Whole(False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_masked_transformers_train_as_on_one_device(name):
    torch.manual_seed(0)
    loaded = Loaded(MODELS[name](), (torch.randn(ROWS, LENGTH, WIDTH),), {}, None, "masked")
    for pin in ({"data": 2}, {"tensor": 2}):
        (found,) = check(loaded, 2, pin=pin | {"micro_batches": 1}, steps=2)
        assert found["status"] == "ok", found


def test_masked_layers_stay_folded():
    graph = trace(MODELS["a causal mask"](), (torch.randn(ROWS, LENGTH, WIDTH),))
    blocks = [call.block for call in graph.calls if call.path.startswith("inner.layers.")]
    assert len(blocks) == 3 and len(set(blocks[1:])) == 1
