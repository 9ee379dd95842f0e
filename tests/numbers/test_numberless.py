"""Models that give NaN or infinity by themselves: told as that, not as a mismatch."""

from math import inf, nan

import pytest
import torch
from torch import nn

from checking import check
from ir.errors import ShardwrightError
from runtime.errors import Refused
from runtime.models import Loaded
from runtime.numberless import check_losses, difference, largest, numberless, relative


class Model(nn.Module):
    def __init__(self, function, dropout=0.0):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
        self.function, self.drop = function, nn.Dropout(dropout)

    def forward(self, x):
        return self.function(self.drop(self.layer(x)), self.scale).pow(2).mean()


def loaded(function, **options):
    torch.manual_seed(0)
    return Loaded(Model(function, **options), (torch.randn(8, 8),), {}, None, "model")


OWN = {
    "infinite": lambda h, scale: h + scale.sqrt(),
    "NaN": lambda h, scale: h + (scale * 0).sqrt(),
}


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}], ids=["data", "tensor"])
@pytest.mark.parametrize("kind", OWN)
def test_a_gradient_that_is_no_number_is_the_models_own(kind, pin):
    (found,) = check(loaded(OWN[kind]), 2, pin=pin, steps=2)
    assert found["status"] == "ok", found
    said = f"the plain model's own gradient of scale is {kind} in 8 of 8 entries"
    assert said in found["reason"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_loss_that_is_no_number_leaves_nothing_to_compare(dropout):
    model = loaded(lambda h, scale: h + (scale - 1).log(), dropout=dropout)
    with pytest.raises((Refused, ShardwrightError), match="own loss is nan in step 1"):
        check(model, 2, pin={"data": 2})


def test_only_a_number_beside_none_is_a_difference():
    a = torch.tensor([1.0, nan, inf, -inf])
    assert difference(a, a) == difference(a, torch.tensor([1.0, inf, nan, inf])) == 0
    assert difference(a, torch.tensor([1.0, 0.0, inf, inf])) == inf
    assert difference(a, torch.tensor([3.0, nan, inf, inf])) == 2
    assert relative(nan, inf) == 0 and relative(nan, 1.0) == relative(1.0, nan) == inf
    assert largest(a) == 1 and largest(torch.tensor([nan])) == 0


def test_the_first_gradient_without_numbers_is_named():
    good, bad = torch.ones(3), torch.tensor([1.0, nan, inf])
    assert numberless({"a": good}) == ""
    assert "gradient of b is NaN in 2 of 3 entries (as for c)" in numberless(
        {"a": good, "b": bad, "c": bad}
    )


def test_a_later_loss_follows_from_the_first_gradient():
    check_losses([1.0, nan], {"a": torch.tensor([nan])})
    with pytest.raises(Refused, match="nan in step 2"):
        check_losses([1.0, nan], {"a": torch.ones(1)})
