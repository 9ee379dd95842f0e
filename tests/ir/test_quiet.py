"""A refusal says what failed; torch's own log and warnings of it are off, for that long."""

import logging
import warnings

import pytest
import torch
from torch import nn

import shardwright as sw
from ir.errors import CaptureError
from ir.trace.quiet import quiet_torch

LOGGER = logging.getLogger("torch")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.cells = nn.Linear(8, 8), nn.LSTM(8, 8)

    def forward(self, x):
        h, _ = self.cells(self.layer(x))
        return h.sum() if h.sum() > 0 else -h.sum()


@pytest.mark.parametrize("start", ["trace", "plan"])
def test_beside_a_refusal_from_python_torch_says_nothing(start, capfd, recwarn):
    calls = {
        "trace": lambda: sw.trace(Branching(), (torch.randn(8, 8),)),
        "plan": lambda: sw.plan(Branching(), "local:2", torch.randn(8, 8), global_batch=8),
    }
    with pytest.raises(CaptureError):
        calls[start]()
    assert capfd.readouterr().err == "" and not recwarn.list


def test_the_users_settings_are_restored_also_after_an_error():
    before = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    filters = list(warnings.filters)
    try:
        with pytest.raises(ZeroDivisionError), quiet_torch():
            assert not LOGGER.isEnabledFor(logging.ERROR)
            raise ZeroDivisionError
        assert LOGGER.level == logging.INFO and warnings.filters == filters
    finally:
        LOGGER.setLevel(before)


def test_the_users_own_warnings_stay():
    with pytest.warns(UserWarning, match="mine"), quiet_torch():
        warnings.warn("mine", stacklevel=1)
