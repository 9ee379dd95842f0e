"""ZeRO in the text of a stage: what is gathered before a block runs, and scattered behind it.

Input: an `Spmd` program and a group of calls. Output: the words for its weights and gradients, and
the lines around its backward; those of `runtime.zero`. Below stage 2 nothing changes in a program.
"""

from __future__ import annotations

from codegen.groups import Group
from ir.spmd import Spmd

FUNCTIONS = ("gather", "scatter_add", "zeros")
"""What a program may import from `runtime.zero`."""


def whole_weights(spmd: Spmd, group: Group, word: str, phase: str) -> str:
    """How a block is given its weights: gathered, where divided ones are read."""
    is_read = any(spmd.gathered(placed, phase) for placed in group.calls)
    return f"gather({word}, ctx.mesh)" if is_read else word


def gradient_word(spmd: Spmd, group: Group, word: str) -> str:
    """What the backward of a block adds its gradients to."""
    return "grads" if _is_scattered(spmd, group) else word


def around_backward(
    spmd: Spmd, group: Group, word: str, lines: list[str], indent: str
) -> list[str]:
    """The lines of a block's backward, between its whole gradients' beginning and end."""
    if not _is_scattered(spmd, group):
        return lines
    first, last = f"grads = zeros({word})", f"scatter_add({word}, grads, ctx.mesh)"
    return [f"{indent}{first}", *lines, f"{indent}{last}"]


def _is_scattered(spmd: Spmd, group: Group) -> bool:
    return any(spmd.scattered(placed) for placed in group.calls)
