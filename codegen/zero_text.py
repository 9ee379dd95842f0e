"""ZeRO in the text of a stage: what is gathered before a block runs, and scattered behind it.

Input: an `Spmd` program and a group of calls. Output: the words for its weights and gradients, and
the lines around its backward; those of `runtime.zero`. Below stage 2 nothing changes in a program.
"""

from __future__ import annotations

from codegen.groups import Group
from ir.spmd import Spmd

FUNCTIONS = ("gather", "scatter_add", "zeros")
"""What a program may import from `runtime.zero`."""


def whole_weights(spmd: Spmd, group: Group, word: str) -> str:
    """How a block is given its weights: gathered, if it reads divided ones."""
    reads = any(spmd.zero_of(name) == 3 for name in _state(spmd, group))
    return f"gather({word}, ctx.mesh)" if reads else word


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
    trained = (name for name in _state(spmd, group) if spmd.state_of[name].trainable)
    return any(spmd.zero_of(name) >= 2 for name in trained)


def _state(spmd: Spmd, group: Group) -> list[str]:
    """The state tensors that the calls of a group read."""
    names = (name for placed in group.calls for name in spmd.call(placed).arguments)
    return [name for name in dict.fromkeys(names) if name in spmd.state_of]
