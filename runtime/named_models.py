"""The models that `hf:NAME` knows: the sizes of published configs, no weights.

A new name is a new row of `NAMED`: the config class of transformers, the dtype in which the
parameters were published (or trained, where they were not published), and the config's fields.
"""

from typing import Any

import torch


def _gpt2(hidden: int, layers: int, heads: int, context: int = 1024, **more: Any) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
    return {"vocab_size": 50257, **sizes, **more}


def _decoder(
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    theta: float,
    eps: float = 1e-5,
    **more: Any,
) -> dict[str, Any]:
    """Llama and its kin: rotary positions, gated MLP, grouped-query attention."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **more.pop("rope", {})},
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        **more,
    }


# The long-context stretch of Llama 3.1 and 3.2, as published in their configs.
_LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_32 = _LLAMA_31 | {"factor": 32.0}
_BF16, _FP32 = torch.bfloat16, torch.float32

# name -> (config class of transformers, dtype of the parameters, fields of the published config).
# fmt: off
NAMED: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", _FP32, _gpt2(768, 12, 12)),
    "gpt2-medium": ("GPT2Config", _FP32, _gpt2(1024, 24, 16)),
    "gpt2-large": ("GPT2Config", _FP32, _gpt2(1280, 36, 20)),
    "gpt2-xl": ("GPT2Config", _FP32, _gpt2(1600, 48, 25)),
    "gpt3-2.7b": ("GPT2Config", _BF16, _gpt2(2560, 32, 32, 2048)),
    "gpt3-6.7b": ("GPT2Config", _BF16, _gpt2(4096, 32, 32, 2048)),
    "gpt3-175b": ("GPT2Config", _BF16, _gpt2(12288, 96, 96, 2048)),
    "gpt-neox-20b": ("GPTNeoXConfig", _BF16, {
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "max_position_embeddings": 2048}),
    "llama-2-7b": ("LlamaConfig", _BF16, _decoder(32000, 4096, 11008, 32, 32, 32, 4096, 1e4)),
    "llama-2-13b": ("LlamaConfig", _BF16, _decoder(32000, 5120, 13824, 40, 40, 40, 4096, 1e4)),
    "llama-2-70b": ("LlamaConfig", _BF16, _decoder(32000, 8192, 28672, 80, 64, 8, 4096, 1e4)),
    "llama-3-8b": ("LlamaConfig", _BF16, _decoder(128256, 4096, 14336, 32, 32, 8, 8192, 5e5)),
    "llama-3-70b": ("LlamaConfig", _BF16, _decoder(128256, 8192, 28672, 80, 64, 8, 8192, 5e5)),
    "llama-3-405b": ("LlamaConfig", _BF16, _decoder(  # released as Llama 3.1
        128256, 16384, 53248, 126, 128, 8, 131072, 5e5, rope=_LLAMA_31)),
    "llama-3.2-1b": ("LlamaConfig", _BF16, _decoder(
        128256, 2048, 8192, 16, 32, 8, 131072, 5e5, rope=_LLAMA_32, tie_word_embeddings=True)),
    "llama-3.2-3b": ("LlamaConfig", _BF16, _decoder(
        128256, 3072, 8192, 28, 24, 8, 131072, 5e5, rope=_LLAMA_32, tie_word_embeddings=True)),
    "mistral-7b": ("MistralConfig", _BF16, _decoder(  # v0.3: no sliding window
        32768, 4096, 14336, 32, 32, 8, 32768, 1e6, sliding_window=None)),
    "mixtral-8x7b": ("MixtralConfig", _BF16, _decoder(
        32000, 4096, 14336, 32, 32, 8, 32768, 1e6, num_local_experts=8, num_experts_per_tok=2)),
    "mixtral-8x22b": ("MixtralConfig", _BF16, _decoder(
        32000, 6144, 16384, 56, 48, 8, 65536, 1e6, num_local_experts=8, num_experts_per_tok=2)),
    "qwen2-7b": ("Qwen2Config", _BF16, _decoder(152064, 3584, 18944, 28, 28, 4, 131072, 1e6, 1e-6)),
    "qwen2-72b": ("Qwen2Config", _BF16, _decoder(152064, 8192, 29568, 80, 64, 8, 131072, 1e6)),
    "qwen2.5-0.5b": ("Qwen2Config", _BF16, _decoder(
        151936, 896, 4864, 24, 14, 2, 32768, 1e6, 1e-6, tie_word_embeddings=True)),
    "qwen2.5-7b": ("Qwen2Config", _BF16, _decoder(
        152064, 3584, 18944, 28, 28, 4, 131072, 1e6, 1e-6)),
    "qwen2.5-14b": ("Qwen2Config", _BF16, _decoder(152064, 5120, 13824, 48, 40, 8, 131072, 1e6)),
    "qwen2.5-32b": ("Qwen2Config", _BF16, _decoder(152064, 5120, 27648, 64, 40, 8, 131072, 1e6)),
    "qwen3-8b": ("Qwen3Config", _BF16, _decoder(
        151936, 4096, 12288, 36, 32, 8, 40960, 1e6, 1e-6, head_dim=128)),
}
# fmt: on
