"""A two-layer Llama with grouped-query attention: small enough for `shardwright check`.

`shardwright check examples/tiny_llama.py:build --devices 4` compares every split of it with the
plain model.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(seq: int = 24, batch: int = 24) -> tuple[torch.nn.Module, tuple[()], dict[str, Any]]:
    """Random weights and random tokens, the same on every call."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        max_position_embeddings=seq,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, seq))
    return model, (), {"input_ids": ids, "labels": ids}


def loss(output: Any) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats."""
    return output.loss
