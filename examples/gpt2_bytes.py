"""A byte-level GPT-2 and the text it learns: the source code of Python's own standard library.

`shardwright plan examples/gpt2_bytes.py:build --cluster local:4 --global-batch 16` plans it;
`examples/demo.py` trains it.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SEED = 0


def build(seq: int = 128, batch: int = 16) -> tuple[torch.nn.Module, tuple[()], dict[str, Any]]:
    """0.8 million random weights, the same on every call, and one batch of text."""
    config = GPT2Config(
        vocab_size=256,  # one token per byte
        n_positions=seq,
        n_embd=128,
        n_layer=4,
        n_head=4,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers guesses it from the class name, and warns
    args, kwargs = next(batches(seq=seq, batch=batch))
    return model, args, kwargs


def loss(output: Any) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return output.loss


def batches(seq: int = 128, batch: int = 16) -> Iterator[tuple[tuple[()], dict[str, Any]]]:
    """Endless (args, kwargs) with random pieces of the text; the same sequence on every call."""
    text = corpus()
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
        ids = text[starts + torch.arange(seq)].long()
        yield (), {"input_ids": ids, "labels": ids}


@cache
def corpus() -> torch.Tensor:
    """The standard library's top-level modules, in order of name, as one row of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
