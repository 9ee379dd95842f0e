"""Refusals in the user's own words: what to change, no name of ours or of torch's insides."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import shardwright
from ir.cluster import Cluster
from ir.errors import CaptureError
from ir.errors import Refused as PlanRefused
from ir.trace import trace
from ir.trace.source import source_of
from planner import plan
from runtime.compare import Training, run_plain
from runtime.errors import Refused


class Averaged(nn.Module):
    """A running average of all batches, not an exponential one."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.norm(x)).square().mean()


class Chosen(nn.Module):
    """A size from data, or a branch on it, in a part that is called `model`, as ours is."""

    def __init__(self, part):
        super().__init__()
        self.model = nn.Module()
        self.model.linear = part(8, 8)

    def forward(self, x):
        return self.model.linear(x).square().mean()


class Positive(nn.Linear):
    def forward(self, x):
        return super().forward(x)[x[:, 0].nonzero().squeeze(-1)]


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def mixtral(**options):
    return MixtralForCausalLM(MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, num_local_experts=4, **options,
    ))  # fmt: skip


IDS = torch.randint(64, (4, 8))
TOKENS = {"input_ids": IDS, "labels": IDS}


def test_a_batch_norm_without_momentum_is_told_to_have_one():
    with pytest.raises(CaptureError, match=r"BatchNorm1d with momentum=None .* such as 0\.1\.$"):
        trace(Averaged(), (torch.randn(4, 8),))


def test_a_size_from_data_is_told_as_one_at_its_module():
    with pytest.raises(CaptureError, match="It depends on the value of a tensor"):
        trace(Chosen(Positive), (torch.randn(4, 8),))
    with pytest.raises(CaptureError, match=r"module 'model\.linear' .*depends on the value of a"):
        trace(Chosen(Branching), (torch.randn(4, 8),))


def test_grouped_products_say_which_dtype_they_take():
    with pytest.raises(CaptureError, match="in bfloat16 only: make the model with dtype=torch"):
        trace(mixtral(), (), TOKENS)


def test_what_does_not_fit_says_why_fewer_rows_were_not_tried():
    graph = trace(mixtral().bfloat16(), (), TOKENS)
    with pytest.raises(PlanRefused, match="Fewer rows at once .*: sort needs all"):
        plan(graph, Cluster.local(2, memory_GiB=0.0001), global_batch=4)


def test_a_model_without_float64_says_that_it_was_asked_for_it():
    class Narrow(nn.Linear):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("Expected Float32, got Double")
            return super().forward(x).square().mean()

    model, batch = Narrow(8, 8).double(), torch.randn(4, 8).double()
    with pytest.raises(Refused, match=r"in float64, .*: RuntimeError: Expected .*Double\. There"):
        run_plain(model, (batch,), {}, lambda loss: loss, Training(1))


def test_a_source_without_a_line_is_a_file():
    class Node:
        meta = {"stack_trace": '  File "/home/me/bin.py", line None, in forward'}

    assert source_of(Node()).line == "bin.py"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["hf:"], "hf: names no model"),
        (["{file}:None"], "'None' can't be a function's name: write {file}:build."),
        (["{file}:build", "--pin", ","], "--pin ',' names no decision"),
    ],
)
def test_what_stands_for_nothing_is_said_to(tmp_path, capsys, words, reason):
    file = tmp_path / "net.py"
    file.write_text("def build(): pass\n")
    words = [word.format(file=file) for word in words]
    assert shardwright.main(["plan", *words, "--cluster", "local:2", "--global-batch", "2"]) == 2
    assert reason.format(file=file) in capsys.readouterr().err
