"""The bytes that exchanging gradients and updating parameters needs while it runs.

Input: a program, a state tensor, or all of a rank. Output: bytes beside state, as `runtime` needs
them (`gradients`, `zero`, `optimizers`): tensor by tensor, each result written over what it
replaces. Names of collectives as in `runtime.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

from ir.graph import TensorType, evaluate
from ir.layout import DATA, Layout, Placement, Shard
from ir.lower import local_type
from ir.spmd import Spmd

COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_to_all", "shard"))
"""Those that need memory beside operand and result."""
UPDATE_TENSORS = {"adamw": 2, "sgd": 0}
"""Of an updated tensor's size, while torch.optim updates it: the root of its second moment, and
that over the bias correction (torch/optim/adam.py, `_single_tensor_adam`). The fused kernel of GPUs
makes no tensor (`runtime.optimizers.implementation`)."""


def collective_bytes(
    op: str, operand: TensorType, result: TensorType, dim: int = 0, outer: int = 1
) -> int:
    """Beside operand and result. Gathered and turned pieces are joined; those to be scattered or
    turned are laid in a row first, and a cut with an outer part may copy them before. `dim` and
    `outer`: of the cut that is undone by a gather, else of the one that is made."""
    operand_bytes, result_bytes = operand.bytes(1), result.bytes(1)
    copies = outer > 1 and result.shape[dim] != outer
    match op:
        case "all_gather":
            return 0 if (dim, outer) == (0, 1) else result_bytes
        case "all_to_all":
            return operand_bytes
        case "reduce_scatter":
            return 2 * operand_bytes - result_bytes if copies else operand_bytes
        case "shard":
            return operand_bytes - result_bytes if copies else 0
    return 0


@dataclass(frozen=True, slots=True)
class Tail:
    """Of one state tensor after the last backward. `sync_bytes`: the most while its gradient is
    brought to it, the last result of which, `made_bytes`, is no state; `gradient_bytes`: that
    result in any case; `left_bytes`: what of it fits no accumulator, and lies there until the end.
    `update_bytes` and `gather_bytes`: while it is updated, and gathered from its pieces."""

    sync_bytes: int = 0
    made_bytes: int = 0
    gradient_bytes: int = 0
    left_bytes: int = 0
    update_bytes: int = 0
    gather_bytes: int = 0


NO_TAIL = Tail()


def tail_of(program: Spmd, name: str, optimizer: str, *, on_gpu: bool) -> Tail:
    """Without the sum over the pipeline ranks that share a tied parameter."""
    if not program.state_of[name].trainable:
        return NO_TAIL
    chain = _synchronised(program, name)
    result, fits = chain.last.bytes(1), chain.last.elements(1) <= chain.first.elements(1)
    is_gathered = program.zero_of(name) in (1, 2)
    piece = piece_type(program, name)
    is_fused = on_gpu and not piece.dtype.startswith("complex")
    return Tail(
        chain.peak_bytes, chain.held_bytes, result, 0 if fits else result,
        0 if is_fused else UPDATE_TENSORS[optimizer] * piece.bytes(1),
        _padded_bytes(program, name) if is_gathered else 0,
    )  # fmt: skip


def tail_bytes(tails: Sequence[tuple[Tail, bool]]) -> int:
    """The most that a rank needs on top of state after its last backward: of each state tensor,
    in order, its `Tail` and whether it is tied to one of another rank."""
    left = peak = 0
    for tail, is_tied in tails:
        summed_bytes = tail.made_bytes + tail.gradient_bytes if is_tied else 0
        peak = max(peak, left + max(tail.sync_bytes, summed_bytes))
        left += tail.left_bytes
    once = (max(tail.update_bytes, tail.gather_bytes) for tail, _ in tails)
    return max(peak, left + max(once, default=0))


def scattering_bytes(program: Spmd, name: str) -> int:
    """Of one gradient, while this data rank's piece of it is made."""
    chain = _Chain(program.gradient_type(name))
    _scatter(program, name, chain)
    return chain.peak_bytes


class _Chain:
    """Tensors made one from the other: each is there until the next is. The first is state."""

    def __init__(self, first: TensorType) -> None:
        self.first = self.last = first
        self.held_bytes = self.peak_bytes = 0

    def make(self, kind: TensorType, more_bytes: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + kind.bytes(1) + more_bytes)
        self.held_bytes, self.last = kind.bytes(1), kind


Step: TypeAlias = "tuple[str, str, Placement, Placement]"


def _synchronised(program: Spmd, name: str) -> _Chain:
    """From what backward added up to what the optimizer takes."""
    zero, piece = program.zero_of(name), piece_type(program, name)
    chain = _Chain(piece if zero >= 2 else program.gradient_type(name))
    if zero == 0:
        for step in program.gradient_sync(name):
            _make(program, name, chain, step)
    if zero == 1:
        _scatter(program, name, chain)
    if zero >= 1:
        for _ in _divided(program, name)[1]:
            chain.make(piece)
    return chain


def _scatter(program: Spmd, name: str, chain: _Chain) -> None:
    for step in _divided(program, name)[0]:
        _make(program, name, chain, step)
    padded_bytes = _padded_bytes(program, name)
    is_padded = padded_bytes != chain.last.bytes(1)
    chain.make(piece_type(program, name), padded_bytes if is_padded else 0)


def _make(program: Spmd, name: str, chain: _Chain, step: Step) -> None:
    op, axis, have, want = step
    if axis == DATA:
        chain.make(chain.last)
        return
    kind = local_type(program.state_of[name].type, Layout(tensor=want), program.degrees, 1)
    place, cut = have if op == "all_gather" else want, (0, 1)
    if isinstance(place, Shard):
        cut = place.dim, int(evaluate(place.outer, program.degrees.batch))
    chain.make(kind, collective_bytes(op, chain.last, kind, *cut))


def _divided(program: Spmd, name: str) -> tuple[list[Step], list[Step]]:
    """Steps on the tensor axis before a gradient is cut in pieces, and after: only sums wait."""
    steps = [step for step in program.gradient_sync(name) if step[1] != DATA]
    shaped = [number for number, step in enumerate(steps) if step[0] != "all_reduce"]
    end = shaped[-1] + 1 if shaped else 0
    return steps[:end], steps[end:]


def piece_type(program: Spmd, name: str) -> TensorType:
    """What this rank updates: the parameter, or its piece."""
    local = program.state_type(name)
    if program.zero_of(name) == 0:
        return local
    return TensorType((ceil(local.elements(1) / program.degrees.data),), local.dtype)


def _padded_bytes(program: Spmd, name: str) -> int:
    return piece_type(program, name).bytes(1) * program.degrees.data
