"""The bytes that exchanging gradients and updating parameters needs while it runs.

Input: a program, the state tensors of a rank. Output: bytes beside state, as `runtime.gradients`,
`runtime.zero` and `runtime.optimizers` need them: tensor by tensor, results written over what they
replace. Names of collectives as in `runtime.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from ir.graph import DTYPE_BYTES, evaluate
from ir.layout import DATA, Layout, Placement, Shard
from ir.lower import local_type
from ir.spmd import Spmd

COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_to_all", "shard"))
"""Those that need memory beside operand and result."""
UPDATE_TENSORS = {"adamw": 2, "sgd": 0}
"""Of an updated tensor's size, while torch.optim updates it: the root of its second moment, and
that over the bias correction (torch/optim/adam.py, `_single_tensor_adam`)."""


def collective_bytes(
    op: str, operand_bytes: int, result_bytes: int, dim: int = 0, outer: int = 1, *_: int
) -> int:
    """Beside operand and result: gathered pieces are joined, pieces to be scattered or turned are
    laid in a row first, and a cut with an outer part copies them before. Only a gather of the first
    dim needs neither."""
    match op:
        case "all_gather":
            return 0 if (dim, outer) == (0, 1) else result_bytes
        case "reduce_scatter" | "all_to_all":
            return operand_bytes if outer == 1 else 2 * operand_bytes
        case "shard":
            return 0 if outer == 1 else operand_bytes
    return 0


class _Chain:
    """Tensors made one from the other: each is there until the next is. The first is state."""

    def __init__(self, size_bytes: int) -> None:
        self.first_bytes = self.last_bytes = size_bytes
        self.held_bytes = self.peak_bytes = 0

    def make(self, size_bytes: int, more_bytes: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + size_bytes + more_bytes)
        self.held_bytes = self.last_bytes = size_bytes


Step = tuple[str, str, Placement, Placement]


def scattering_bytes(program: Spmd, name: str) -> int:
    """Of one gradient, while this data rank's piece of it is made."""
    chain = _Chain(program.gradient_type(name).bytes(1))
    _scatter(program, name, chain)
    return chain.peak_bytes


def tail_bytes(program: Spmd, names: Sequence[str], optimizer: str, ranks: int) -> int:
    """The most that a rank needs on top of state after its last backward; `names`: of its state."""
    left = peak = 0
    state = program.state_of
    for name in (name for name in names if state[name].trainable):
        chain = _synchronised(program, name, ranks)
        peak = max(peak, left + chain.peak_bytes)
        left += chain.held_bytes if chain.last_bytes > chain.first_bytes else 0
    updated = max((_updated_bytes(program, n) for n in names if state[n].trainable), default=0)
    gathered = max((_padded_bytes(program, n) for n in names if program.zero_of(n) in (1, 2)),
                   default=0)  # fmt: skip
    return max(peak, left + UPDATE_TENSORS[optimizer] * updated, left + gathered)


def _synchronised(program: Spmd, name: str, ranks: int) -> _Chain:
    """From what backward added up to what the optimizer takes."""
    zero = program.zero_of(name)
    piece_bytes = _updated_bytes(program, name)
    if zero >= 2:
        chain = _Chain(piece_bytes)
    else:
        chain = _Chain(program.gradient_type(name).bytes(1))
    if zero == 0:
        for step in program.gradient_sync(name):
            _make(program, name, chain, step)
    else:
        if zero == 1:
            _scatter(program, name, chain)
        for _ in _divided(program, name)[1]:
            chain.make(piece_bytes)
    if len({stage % ranks for stage in program.stages_of_state(name)}) > 1:
        chain.make(chain.last_bytes)
    return chain


def _scatter(program: Spmd, name: str, chain: _Chain) -> None:
    for step in _divided(program, name)[0]:
        _make(program, name, chain, step)
    padded, piece = _padded_bytes(program, name), _updated_bytes(program, name)
    copy = padded if padded != chain.last_bytes else 0
    chain.make(piece, copy)


def _make(program: Spmd, name: str, chain: _Chain, step: Step) -> None:
    op, axis, have, want = step
    size_bytes = chain.last_bytes
    if axis != DATA:
        kind = local_type(program.state_of[name].type, Layout(tensor=want), program.degrees, 1)
        size_bytes = kind.bytes(1)
    place = have if op == "all_gather" else want
    cut = (0, 1)
    if isinstance(place, Shard):
        cut = place.dim, int(evaluate(place.outer, program.degrees.batch))
    chain.make(size_bytes, collective_bytes(op, chain.last_bytes, size_bytes, *cut))


def _divided(program: Spmd, name: str) -> tuple[list[Step], list[Step]]:
    """Steps on the tensor axis before a gradient is cut in pieces, and after: only sums wait."""
    steps = [step for step in program.gradient_sync(name) if step[1] != DATA]
    shaped = [number for number, step in enumerate(steps) if step[0] != "all_reduce"]
    end = shaped[-1] + 1 if shaped else 0
    return steps[:end], steps[end:]


def _updated_bytes(program: Spmd, name: str) -> int:
    """What this rank updates: the parameter, or its piece."""
    local = program.state_type(name)
    if program.zero_of(name) == 0:
        return local.bytes(1)
    return ceil(local.elements(1) / program.degrees.data) * DTYPE_BYTES[local.dtype]


def _padded_bytes(program: Spmd, name: str) -> int:
    return _updated_bytes(program, name) * program.degrees.data
