"""The columns of a table of training runs: their names, and what a cell of each may hold.

Input: a row (column name -> text). Output: numbers and words; a cell that can't be one, or a
column that is not known, is a `UsageError` that names it and says what it may be.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from math import isfinite

from ir.errors import UsageError

COUNTS = {
    "layers": (1, 2_000), "hidden": (1, 1_000_000), "heads": (1, 100_000),
    "head_dim": (1, 100_000), "kv_heads": (1, 100_000), "ffn_hidden": (1, 10_000_000),
    "vocab": (1, 100_000_000), "seq_len": (1, 100_000_000), "experts": (0, 100_000),
    "moe_topk": (0, 100_000), "moe_ffn_hidden": (0, 10_000_000), "dense_layers": (0, 2_000),
    "shared_experts": (0, 100_000), "lora_rank": (0, 1_000_000), "nodes": (1, 100_000),
    "devices_per_node": (1, 1024), "nvlink_domain": (1, 100_000), "n_devices": (1, 100_000),
    "tp": (1, 100_000), "pp": (1, 100_000), "cp": (1, 100_000), "dp": (1, 100_000),
    "ep": (1, 100_000), "virtual_stages": (0, 2_000), "shard_group": (0, 100_000),
    "micro_batch": (1, 1_000_000), "global_batch": (1, 1_000_000_000),
}  # fmt: skip
"""Whole numbers: the least and the most. The most is far beyond any run: more is a slip."""
NUMBERS = {"inter_node_GBps_per_device": 1e6}
"""Positive numbers, and the most."""
FLAGS = (
    "gated_mlp", "tied_embeddings", "attention_flash", "sequence_parallel", "overlap_grad",
    "tp_overlap", "cuda_graph", "compile",
)  # fmt: skip
"""0 or 1."""
WORDS = {
    "family": ("gpt", "mpt", "llama", "other"), "zero_stage": ("0", "1", "2", "3"),
    "recompute": ("none", "selective", "full"),
    "recompute_modules": ("core_attn", "op", "every-2nd-layer"), "optimizer": ("adam", "adamw"),
    "precision": ("bf16", "fp16", "fp8", "mxfp8", "nvfp4"), "grads_dtype": ("fp32", "bf16", "fp16"),
}  # fmt: skip
"""One of these."""
TEXTS = (
    "id", "source", "group", "device", "framework", "release", "step_s", "peak_GiB", "mem_rank",
    "mem_kind", "mem_unit_printed", "oom", "quality", "dup_of", "implied_mfu_pct", "filled", "note",
)  # fmt: skip
"""Names, and what was measured: not read as numbers."""
KNOWN = (*COUNTS, *NUMBERS, *FLAGS, *WORDS, *TEXTS)

BEYOND_HEADER = "beyond the header"
"""Where a row's cells without a column are kept; no table has a column of this name."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_LONGEST = 40
"""Characters of a cell that a message shows."""


def text_of(row: Mapping[str, str], column: str) -> str:
    """A cell without the space around it; "" where the row has none."""
    return str(row.get(column) or "").strip()


def check_columns(row: Mapping[str, str]) -> None:
    """Raises `UsageError` for a filled cell of a column that is not known, with the nearest one."""
    if more := text_of(row, BEYOND_HEADER):
        raise UsageError(f"more cells than the header has columns: {shown(more)}")
    for column in row:
        if column not in KNOWN and text_of(row, column):
            raise UsageError(f"unknown column {shown(column)}{nearest(column, KNOWN)}")


def check_cells(row: Mapping[str, str]) -> None:
    """Raises `UsageError` for the first filled cell that its column can't hold."""
    for column in COUNTS:
        count_of(row, column, 0)
    for column in NUMBERS:
        if text_of(row, column):
            number_of(row, column)
    for column in FLAGS:
        flag_of(row, column)
    for column in WORDS:
        word_of(row, column)


def count_of(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    """A whole number; `default` where the cell is empty, which is an error without one."""
    text = text_of(row, column)
    if not text and default is not None:
        return default
    value, (least, most) = _number(text, column), COUNTS[column]
    if value != int(value) or not least <= value <= most:
        raise UsageError(f"{column}={text}: it is a whole number from {least} to {most}")
    return int(value)


def number_of(row: Mapping[str, str], column: str) -> float:
    """A positive number."""
    text, most = text_of(row, column), NUMBERS[column]
    value = _number(text, column)
    if not 0 < value <= most:
        raise UsageError(f"{column}={text}: it is a number above 0, up to {most:g}")
    return value


def flag_of(row: Mapping[str, str], column: str) -> bool | None:
    """0 or 1; None where the cell is empty."""
    text = text_of(row, column)
    if text not in ("", "0", "1"):
        raise UsageError(f"{column}={shown(text)}: it is 0, 1 or empty")
    return text == "1" if text else None


def word_of(row: Mapping[str, str], column: str) -> str | None:
    """One of the column's words; None where the cell is empty."""
    text, known = text_of(row, column), WORDS[column]
    if text and text not in known:
        near = nearest(text, known) if len(text) < _LONGEST else ""
        raise UsageError(f"{column}={shown(text)}: it is one of {', '.join(known)}, or empty{near}")
    return text or None


def nearest(word: str, known: Collection[str]) -> str:
    """`: did you mean micro_batch?`, if some known word is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def shown(text: str) -> str:
    """A cell in a message: quoted, escaped and no longer than a line takes."""
    return ascii(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")


def _number(text: str, column: str) -> float:
    if not text:
        raise UsageError(f"{column} is missing")
    if len(text) > _LONGEST or not _NUMBER.fullmatch(text):
        raise UsageError(f"{column}={shown(text)} is not a number")
    value = float(text)
    if not isfinite(value):
        raise UsageError(f"{column}={text} is out of range")
    return value
