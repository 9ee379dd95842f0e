"""Every dropout is off while the model is compared with its program at its own precision."""

import pytest
import torch
from function_model import OneFunction
from torch import nn
from torch.nn import functional

import ir.trace.joint
from checking import check
from ir.errors import Different
from ir.trace import trace
from runtime.models import Loaded
from runtime.undropped import NothingDropped


def attended(h, *args, **kwargs):
    heads = h.view(-1, 1, 2, 4)
    return functional.scaled_dot_product_attention(heads, heads, heads, *args, **kwargs)


DROPPING = {
    "dropout": lambda h: functional.dropout(h, 0.1),
    "dropout in place": lambda h: functional.dropout(h * 1, p=0.1, inplace=True),
    "torch's own": lambda h: torch.dropout(h, 0.1, True),
    "features": lambda h: functional.dropout2d(h.view(-1, 2, 4, 1), 0.3),
    "alpha": lambda h: functional.alpha_dropout(h, 0.1, True),
    "alpha features": lambda h: functional.feature_alpha_dropout(h.view(-1, 2, 4), 0.1, True),
    "attention": lambda h: attended(h, None, 0.1),
    "attention by name": lambda h: attended(h, dropout_p=0.1, is_causal=True),
}


class Encoder(nn.Module):
    """Modules with probabilities of their own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.out, self.alpha = nn.Linear(8, 8), nn.AlphaDropout(0.2)

    def forward(self, x):
        return self.alpha(self.out(self.layer(x))).pow(2).mean()


def drops_out(model, x):
    graph = trace(model, (x,))
    return any(node.op == "dropout" for block in graph.blocks for node in block.nodes)


@pytest.mark.parametrize("name", DROPPING)
def test_a_probability_in_a_call_is_switched_off(name):
    model, x = OneFunction(DROPPING[name]), torch.randn(8, 8)
    assert drops_out(model, x)
    with NothingDropped():
        assert not drops_out(model, x)
        assert torch.equal(model(x), model(x))


def test_the_probabilities_of_modules_are_switched_off():
    model, x = Encoder(), torch.randn(4, 3, 8)
    assert drops_out(model, x)
    with NothingDropped():
        assert not drops_out(model, x)
        assert torch.equal(model(x), model(x))


def test_a_lost_gradient_is_found_beside_a_probability_in_a_call(monkeypatch):
    monkeypatch.setattr(ir.trace.joint, "_without_writes", lambda joint, *_: joint)
    model = OneFunction(lambda h: functional.dropout(torch.fft.rfft(h).abs(), 0.1))
    with pytest.raises(Different, match="differs from the model at the model's own precision"):
        check(Loaded(model, (torch.randn(12, 8),), {}, None, "model"), 1)


def test_a_dropout_that_stays_is_told():
    model = OneFunction(lambda h: torch.ops.aten.dropout(h, 0.2, True))
    (found,) = check(Loaded(model, (torch.randn(8, 8),), {}, None, "model"), 1)
    assert found["status"] == "ok" and "can't be switched off" in found["reason"]
