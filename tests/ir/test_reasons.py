"""What torch says of a model that it can't trace, in the user's words."""

import re

import pytest
import torch
from function_model import OneFunction

from ir.errors import CaptureError
from ir.trace import trace
from ir.trace.reasons import chain, reason_of, said_by


def test_a_place_in_torchs_sources_is_left_out():
    error = RuntimeError("/__w/aten/Register.cpp:4963: a FakeTensor is too large\nat more places")
    assert said_by(error) == "a Tensor is too large"
    assert reason_of(error) == "torch.export says: RuntimeError: a Tensor is too large"


def test_what_led_to_a_strange_error_is_its_meaning():
    error = TypeError("'SymFloat' object is not subscriptable")
    error.__context__ = ValueError("Pending unbacked symbols: PendingUnbackedSymbolNotFound")
    assert reason_of(error).startswith("It depends on the value of a tensor")


def test_errors_in_a_circle_end():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert [*chain(first)] == [first, second]


@pytest.mark.parametrize(("function", "why"), [
    (lambda h: h * h.sum().item(), "It depends on the value of a tensor"),
    (lambda h: h * float(h.detach().numpy().sum()), r"It leaves torch with \.numpy\(\)"),
    (lambda h: h[h > 0], "It depends on the value of a tensor"),
])  # fmt: skip
def test_a_refusal_says_what_to_try(function, why):
    with pytest.raises(CaptureError, match=why):
        trace(OneFunction(function), (torch.randn(4, 8),))


@pytest.mark.parametrize(("function", "why"), [
    (lambda h: torch.kron(h, torch.ones(1, 2)),
     r"test_reasons.py:\d+.*torch.kron fixes the number of rows to 4"),
    (lambda h: h @ h.T - torch.eye(len(h)),
     r"test_reasons.py:\d+.*len\(...\) of a tensor is a number: use its shape\[0\]"),
    (lambda h: h * torch.ones(4, 8), r"with twice the rows .*test_reasons.py:\d+.* fails: "),
])  # fmt: skip
def test_a_batch_that_stays_is_told_with_the_operation(function, why):
    graph = trace(OneFunction(lambda h: function(h).abs()), (torch.randn(4, 8),))
    assert graph.fixed_batch and re.search(why, graph.fixed_batch)
