"""Names of emitted programs: what a `Namer` hands out stays different when it is written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from checking import check
from ir.names import LONGEST, Namer, identifier
from runtime.models import Loaded

SHORT = st.text(st.sampled_from("ab_.0x"), max_size=5)
TEXTS = st.builds(lambda n, end: "a" * n + end, st.integers(LONGEST - 4, LONGEST + 1), SHORT)


@given(st.lists(st.one_of(SHORT, TEXTS, st.text(), st.sampled_from(["x", "x_", "torch", "class"]))))
def test_written_names_are_as_many_as_were_handed_out(texts):
    namer = Namer()
    words = [namer(text) for text in texts]
    assert [identifier(word) for word in words] == words
    assert len(set(words)) == len(words)


LONG = "a_part_of_a_model_whose_name_says_all_that_there_is_to_say_about_it"


class Long(nn.Module):
    """Its parameters, of one shape, have names that are equal up to `LONGEST` and beyond."""

    def __init__(self):
        super().__init__()
        self.add_module(LONG, nn.LayerNorm(15))
        self.add_module(f"{LONG}_too", nn.LayerNorm(15))
        self.linear = nn.Linear(15, 15)

    def forward(self, x):
        for name in (LONG, f"{LONG}_too"):
            x = self.linear(getattr(self, name)(x)).tanh()
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.Sequential(*(Long() for _ in range(3))), Long()

    def forward(self, x):
        return self.last(self.layers(x)).square().mean()


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}])
def test_parameters_with_long_names_are_told_apart(pin):
    torch.manual_seed(0)
    model = Net()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    (found,) = check(Loaded(model, (torch.randn(12, 15),), {}, None, "long"), 2, pin=pin)
    assert found["status"] == "ok", found
