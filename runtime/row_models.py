"""Transformers built from the columns of a table of measured runs, without weights.

Input: a `RowShape` (or a row, a mapping of the column names `hidden`, `heads`, `ffn_hidden`, ... to
text or numbers). Output: `(model, args, kwargs)` on the meta device; the model returns its loss.
Layers are equal children of one list, so that they are traced once. Sources: GPT-2 (Radford et
al. 2019), MPT (MosaicML 2023: no biases, positions inside attention), Llama (Touvron et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FAMILIES = ("gpt", "mpt", "llama", "other")
ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class RowShape:
    """Sizes of a decoder. `family` "other": a gpt without biases, with rotary positions.

    `kv_heads`: key and value heads, each shared by heads / kv_heads query heads; `dtype`: of the
    parameters and of all compute; `wide_logits`: logits are copied to float32 for the loss.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    gated_mlp: bool
    vocab: int
    seq_len: int
    tied_embeddings: bool
    dtype: str = "bfloat16"
    wide_logits: bool = True

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown family {self.family!r}; known: {', '.join(FAMILIES)}")
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim,
               self.ffn_hidden, self.vocab, self.seq_len) < 1:  # fmt: skip
            raise ValueError("every size must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} can't share kv_heads={self.kv_heads} evenly")
        if self.has_rotary and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even one")

    @property
    def has_bias(self) -> bool:
        return self.family == "gpt"

    @property
    def has_positions(self) -> bool:
        """Whether a learned vector per position is added to the embedding."""
        return self.family == "gpt"

    @property
    def has_rotary(self) -> bool:
        return self.family in ("llama", "other")

    @property
    def parameters(self) -> int:
        """All parameters, a tied output layer once."""
        h, qkv = self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim
        matrices = (3 if self.gated_mlp else 2) * h * self.ffn_hidden
        matrices += h * qkv + self.heads * self.head_dim * h
        norm = h if self.family == "llama" or not self.has_bias else 2 * h
        layer = matrices + 2 * norm
        if self.has_bias:
            layer += qkv + h + h + self.ffn_hidden * (2 if self.gated_mlp else 1)
        positions = self.seq_len * h if self.has_positions else 0
        return self.layers * layer + norm + positions + self.vocab * h * (2 - self.tied_embeddings)


class Norm(nn.Module):
    """RMSNorm for llama, LayerNorm for the others."""

    def __init__(self, shape: RowShape):
        super().__init__()
        self.is_rms = shape.family == "llama"
        self.weight = nn.Parameter(torch.empty(shape.hidden))
        self.bias = nn.Parameter(torch.empty(shape.hidden)) if shape.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_rms:
            return F.rms_norm(x, (x.shape[-1],), self.weight)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)


class Attention(nn.Module):
    """Causal attention; one product makes q, k and v where all have as many heads."""

    def __init__(self, shape: RowShape):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.has_rotary = shape.has_rotary
        self.is_fused = shape.heads == shape.kv_heads
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = shape.has_bias
        if self.is_fused:
            self.qkv = nn.Linear(shape.hidden, 3 * queries, bias=bias)
        else:
            self.q = nn.Linear(shape.hidden, queries, bias=bias)
            self.k = nn.Linear(shape.hidden, keys, bias=bias)
            self.v = nn.Linear(shape.hidden, keys, bias=bias)
        self.out = nn.Linear(queries, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        if self.is_fused:
            parts = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        else:
            parts = (
                self.q(x).unflatten(-1, (self.heads, self.head_dim)),
                self.k(x).unflatten(-1, (self.kv_heads, self.head_dim)),
                self.v(x).unflatten(-1, (self.kv_heads, self.head_dim)),
            )
        q, k, v = (part.transpose(1, 2) for part in parts)
        if cos is not None and sin is not None:
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.is_fused)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Mlp(nn.Module):
    """Up, activation, down; gated with three matrices."""

    def __init__(self, shape: RowShape):
        super().__init__()
        bias = shape.has_bias
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias) if shape.gated_mlp else None
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Norms before attention and MLP, residuals around both."""

    def __init__(self, shape: RowShape):
        super().__init__()
        self.norm_1, self.attention = Norm(shape), Attention(shape)
        self.norm_2, self.mlp = Norm(shape), Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Embedding, layers, norm, output layer and the loss over all tokens."""

    def __init__(self, shape: RowShape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = (
            nn.Parameter(torch.empty(shape.seq_len, shape.hidden)) if shape.has_positions else None
        )
        if shape.has_rotary:
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.empty(shape.seq_len, shape.head_dim))
        else:
            self.cos = self.sin = None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm, self.has_wide_logits = Norm(shape), shape.wide_logits
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).flatten(0, 1)
        logits = logits.float() if self.has_wide_logits else logits
        return F.cross_entropy(logits, labels.flatten())


def build_row_model(config: RowShape | Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...],
                                                                  dict[str, Any]]:  # fmt: skip
    """The model and an example batch of one row, all on meta; `ValueError` for bad sizes."""
    shape = config if isinstance(config, RowShape) else row_shape(config)
    with torch.device("meta"):
        model = Decoder(shape).to(getattr(torch, shape.dtype))
        ids = torch.empty((1, shape.seq_len), dtype=torch.int64)
    return model, (), {"ids": ids, "labels": ids.clone()}


_PROBE = RowShape("gpt", 2, 1301, 143, 143, 74, 3001, False, 7919, 523, False)
"""Sizes that no other number in a model equals: traced at these, a graph can be resized."""
_FEWER_KV_HEADS = 11


def probe_of(shape: RowShape) -> RowShape:
    """The shape of the same structure at probe sizes: equal for rows that differ in sizes only."""
    kv_heads = _PROBE.heads if shape.kv_heads == shape.heads else _FEWER_KV_HEADS
    return replace(
        _PROBE, family=shape.family, kv_heads=kv_heads, gated_mlp=shape.gated_mlp,
        tied_embeddings=shape.tied_embeddings, dtype=shape.dtype, wide_logits=shape.wide_logits,
    )  # fmt: skip


def size_changes(probe: RowShape, shape: RowShape) -> dict[int | float, int | float]:
    """What every number in the trace of `probe` is in that of `shape`."""
    return dict(zip(_numbers(probe), _numbers(shape), strict=True))


def _numbers(shape: RowShape) -> tuple[int | float, ...]:
    queries = shape.heads * shape.head_dim
    return (
        shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim // 2,
        shape.ffn_hidden, shape.vocab, shape.seq_len, queries, 3 * queries,
        shape.kv_heads * shape.head_dim, shape.head_dim**-0.5,
    )  # fmt: skip


def row_shape(row: Mapping[str, Any]) -> RowShape:
    """The shape that a row states; kv_heads and head_dim default as usual. `ValueError` if not."""

    def number(key: str, default: int | None = None) -> int:
        text = str(row.get(key) or "").strip()
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{key} is missing" if not text else f"{key}={text!r}") from None
        if value != int(value):
            raise ValueError(f"{key}={text}: not a whole number")
        return int(value)

    hidden, heads = number("hidden"), number("heads")
    if not str(row.get("head_dim") or "") and hidden % max(heads, 1):
        raise ValueError(f"hidden={hidden} can't be divided by heads={heads}")
    return RowShape(
        str(row.get("family") or "gpt"), number("layers"), hidden, heads,
        number("kv_heads", heads), number("head_dim", hidden // max(heads, 1)),
        number("ffn_hidden"), bool(number("gated_mlp", 0)), number("vocab"), number("seq_len"),
        bool(number("tied_embeddings", 0)),
        "float16" if row.get("precision") == "fp16" else "bfloat16",
    )  # fmt: skip
