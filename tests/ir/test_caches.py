"""Tensors that a model keeps for its next call: a training step has none."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from checking import check
from ir.cluster import Cluster
from ir.errors import CaptureError
from ir.trace import trace
from planner import plan
from runtime.models import Loaded

IDS = torch.randint(64, (4, 8))


def llama(layers: int, *, use_cache: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, use_cache=use_cache,
    ))  # fmt: skip


def operations(block):
    return [node.op for node in block.nodes]


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_that_caches_is_traced_as_one_that_does_not(layers) -> None:
    model = llama(layers, use_cache=True)
    batch = {"input_ids": IDS, "labels": IDS}
    graph = trace(model, (), batch)
    other = trace(llama(layers, use_cache=False), (), batch)
    assert [operations(block) for block in graph.blocks] == list(map(operations, other.blocks))
    assert model.config.use_cache is True
    plan(graph, Cluster.local(2), global_batch=4)


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}])
def test_a_cache_that_is_asked_for_changes_nothing(pin) -> None:
    """Each layer puts its own keys and values into it, so layers are traced one by one."""
    batch = {"input_ids": IDS, "labels": IDS, "use_cache": True}
    (found,) = check(Loaded(llama(3, use_cache=True), (), batch, None, "llama"), 2, pin=pin)
    assert found["status"] == "ok", found


class Grows(nn.Module):
    """Appends to an empty list of rows, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cat([torch.tensor([]), self.linear(x)], dim=-2).square().mean()


def test_an_empty_tensor_of_one_dim_adds_nothing_to_others() -> None:
    plan(trace(Grows(), (torch.randn(4, 3, 8),)), Cluster.local(2), global_batch=4)


class Objects(nn.Module):
    """Says what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        raise ValueError(f"no use for {self.linear(x)}")


def test_the_user_reads_of_tensors_only() -> None:
    with pytest.raises(CaptureError, match=r"no use for Tensor\(") as refused:
        trace(Objects(), (torch.randn(4, 8),))
    assert "Fake" not in str(refused.value)
