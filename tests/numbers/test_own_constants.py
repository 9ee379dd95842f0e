"""Models that take constants from their dtype: another model in float64, and no mismatch."""

import pytest
import torch
from function_model import OneFunction
from torch.nn import functional

import ir.trace.joint
from checking import check
from ir.errors import Different
from runtime.models import Loaded

OTHER_IN_FLOAT64 = {
    "rms_norm without eps": lambda h: functional.rms_norm(h * 1e-3, (8,)),
    "rms_norm as torch's own": lambda h: torch.rms_norm(h * 1e-3, (8,)),
    "eps of the dtype": lambda h: h / (h.abs().sum(1, keepdim=True) + torch.finfo(h.dtype).eps),
    "a new tensor of the dtype": lambda h: h * h.new_tensor([0.1]),
    "filled like": lambda h: h * torch.full_like(h, 0.1),
}
SAME_IN_FLOAT64 = {
    "a constant of float32": lambda h: h * torch.tensor(0.1),
    "clamped by a constant": lambda h: torch.clamp(h, max=torch.tensor(0.1)),
    "a constant eps": lambda h: functional.rms_norm(h, (8,), eps=1e-6),
}


def loaded(function):
    torch.manual_seed(0)
    return Loaded(OneFunction(function), (torch.randn(8, 8),), {}, None, "model")


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}], ids=["data", "tensor"])
@pytest.mark.parametrize("name", OTHER_IN_FLOAT64)
def test_constants_of_the_dtype_are_no_mismatch_and_are_told(name, pin):
    (found,) = check(loaded(OTHER_IN_FLOAT64[name]), 2, pin=pin, steps=1)
    assert found["status"] == "ok", found
    assert "constants of the model depend on its dtype" in found["reason"]


@pytest.mark.parametrize("name", SAME_IN_FLOAT64)
def test_constants_that_stay_are_compared_with_the_model_itself(name):
    (found,) = check(loaded(SAME_IN_FLOAT64[name]), 2, pin={"data": 2}, steps=1)
    assert found["status"] == "ok" and found["reason"] is None, found


def test_a_lost_gradient_is_found_also_beside_such_constants(monkeypatch):
    monkeypatch.setattr(ir.trace.joint, "_without_writes", lambda joint, *_: joint)
    lost = loaded(lambda h: torch.fft.rfft(h.new_tensor([0.1]) * h).abs())
    with pytest.raises(Different, match="differs from the model at the model's own precision"):
        check(lost, 1)
