"""Identifiers made from a user's names: text from outside never becomes code.

Input: any string. Output: an ASCII Python identifier that is no keyword, no name that emitted
programs use themselves, and unique within its `Namer`.
"""

from __future__ import annotations

import builtins
import keyword
import re

RESERVED = frozenset(
    "torch ops ctx w g x y dx dy saved mesh data tensor pipeline all_reduce all_gather "
    "reduce_scatter all_to_all shard first dropout Stage SimpleNamespace range reversed len zip "
    "i call early kept self gather scatter_add zeros grads store fetch on_host".split()
) | frozenset(dir(builtins))


LONGEST = 60
"""Characters of a name that is handed out, before what makes it unique."""


def identifier(text: str, *, default: str = "value") -> str:
    """`text` as a lower-case identifier: `h.0/attn weight` becomes `h_0_attn_weight`. One that is
    an identifier of this kind stays as it is, whatever its length: others have the same beginning.
    """
    word = re.sub(r"[^0-9a-zA-Z_]+", "_", text).strip("_").lower()
    if not word:
        word = default
    if word[0].isdigit():
        word = f"{default}_{word}"
    if keyword.iskeyword(word) or keyword.issoftkeyword(word) or word in RESERVED:
        word += "_"
    return word


class Namer:
    """Hands out unique identifiers."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def __call__(self, text: str, *, default: str = "value") -> str:
        base = word = identifier(identifier(text, default=default)[:LONGEST], default=default)
        number = 1
        while word in self.used:
            word = f"{base}_{number}"
            number += 1
        self.used.add(word)
        return word
