"""Linear algebra and transforms, whose derivatives torch writes in place, or by how a matrix lies
in memory, and whose rules for shapes take symbols in Python only."""

import pytest
import torch
from torch import nn

import ir.trace.joint
from checking import check
from ir.errors import Different
from runtime.models import Loaded

ROWS, SIZE = 12, 6
CUT = {
    "det": lambda h, m: torch.linalg.det(m).pow(2),
    "det of transposed": lambda h, m: torch.linalg.det(m.mT).pow(2),
    "slogdet": lambda h, m: torch.linalg.slogdet(m).logabsdet,
    "solve": lambda h, m: torch.linalg.solve(m + 3 * torch.eye(2), h[:, 4:]).pow(2),
    "solve, transposed": lambda h, m: torch.linalg.solve(m.mT + 3 * torch.eye(2), m).pow(2),
    "solve triangular": lambda h, m: torch.linalg.solve_triangular(
        torch.eye(2).expand_as(m), m, upper=True).pow(2),
    "cholesky": lambda h, m: torch.linalg.cholesky(m @ m.mT + torch.eye(2)).pow(2),
    "cholesky solve": lambda h, m: torch.cholesky_solve(m, 2 * torch.eye(2)[None]).pow(2),
    "qr": lambda h, m: torch.linalg.qr(m).R.pow(2),
    "lu": lambda h, m: torch.linalg.lu(m)[2].pow(2),
    "lerp": lambda h, m: torch.lerp(h, 2 * h, torch.tensor(0.1)).pow(2),
    "lerp in place": lambda h, m: (1 * h).lerp_(2 * h, 0.3).pow(2),
    "quantile": lambda h, m: torch.quantile(h, 0.25, dim=1).pow(2),
    "shape in place": lambda h, m: (1 * h).unsqueeze_(1).squeeze_(1).pow(2),
    "strided": lambda h, m: torch.as_strided(h, (ROWS, 3), (SIZE, 2)).pow(2),
    "pinv": lambda h, m: torch.linalg.pinv(m).pow(2),
    "rfft": lambda h, m: torch.fft.rfft(h).abs(),
    "rfft2": lambda h, m: torch.fft.rfft2(h.view(-1, 2, 3)).abs(),
    "fft over rows": lambda h, m: torch.fft.fft(h, dim=0).abs(),
    "there and back": lambda h, m: torch.fft.irfft(2 * torch.fft.rfft(h)).pow(2),
    "short times": lambda h, m: torch.stft(
        h, 4, window=torch.hann_window(4), return_complex=True).abs(),
    "short times back": lambda h, m: torch.istft(
        torch.complex(h, 2 * h).view(-1, 3, 2), 4, hop_length=1, window=torch.ones(4)).pow(2),
}
MADE = {
    "eye": lambda h, m: h @ torch.eye(SIZE),
    "linspace": lambda h, m: h @ torch.linspace(0, 1, SIZE),
    "window": lambda h, m: h @ torch.hann_window(SIZE),
}
class Model(nn.Module):
    """The matrices are a part of a product's rows, so they do not lie one after the other."""

    def __init__(self, function, dropout=0.0):
        super().__init__()
        self.layer, self.drop, self.function = nn.Linear(15, SIZE), nn.Dropout(dropout), function

    def forward(self, x):
        h = self.layer(x)
        h = self.drop(h) if self.drop.p else h
        return self.function(h, h[:, :4].reshape(-1, 2, 2)).mean()


def loaded(function, **options):
    torch.manual_seed(0)
    return Loaded(Model(function, **options), (torch.randn(ROWS, 15),), {}, None, "model")


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}], ids=["data", "tensor"])
@pytest.mark.parametrize("name", CUT)
def test_rows_are_cut_and_the_gradient_is_the_same(name, pin):
    (found,) = check(loaded(CUT[name]), 2, pin=pin, steps=1)
    assert found["status"] == "ok", found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_lost_gradient_is_found_also_in_a_model_that_drops_out(monkeypatch, dropout):
    monkeypatch.setattr(ir.trace.joint, "_without_writes", lambda joint, *_: joint)
    with pytest.raises(Different, match="differs from the model at the model's own precision"):
        check(loaded(CUT["rfft"], dropout=dropout), 1)


@pytest.mark.parametrize("name", MADE)
def test_a_factor_that_is_made_in_the_model_is_promoted_with_it(name):
    (found,) = check(loaded(MADE[name]), 2, pin={"data": 2}, steps=1)
    assert found["status"] == "ok" and found["reason"] is None, found
