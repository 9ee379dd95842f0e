"""Products of complex tensors, whose gradients are conjugate."""

import pytest
import torch
from torch import nn

from checking import check
from runtime.models import Loaded

WIDTH = 8


class Complex(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.blocks = nn.Parameter(torch.randn(2, 4, 4, dtype=torch.complex64))

    def forward(self, x):
        x = torch.complex(x, x.flip(1))
        match self.way:
            case "matmul":
                x = (x @ self.weight) @ self.weight.conj().T
            case "linear":
                x = nn.functional.linear(x, self.weight)
            case "einsum":
                x = torch.einsum("nbi,bij->nbj", x.reshape(-1, 2, 4), self.blocks)
        return x.abs().square().mean() + (x * x.conj() + x).real.sum(-1).mean()


@pytest.mark.parametrize("way", ["matmul", "linear", "einsum"])
@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}])
def test_complex_products_train_as_on_one_device(way, pin):
    torch.manual_seed(0)
    (found,) = check(Loaded(Complex(way), (torch.randn(8, WIDTH),), {}, None, way), 2, pin=pin)
    assert found["status"] == "ok", found
