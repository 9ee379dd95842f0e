"""What a value that crosses pipeline stages takes, whole or in pieces.

Input: the program, a value, a cost model. Output: seconds of one way. Where all ranks of the tensor
axis hold the same value, `scatters_sends` has each send its own piece, and the receivers gather:

    send(S / t) + all_gather(S)    instead of    send(S)

Source: Narayanan et al., SC 2021, section 4.1 (Megatron-LM's scatter_gather_tensors_in_pipeline);
DeepSpeed's pipeline engine does the same (is_pipe_partitioned, is_grad_partitioned).
"""

from __future__ import annotations

from collections.abc import Callable

from ir.layout import Shard
from ir.spmd import Spmd
from planner.cost import CostModel


def crossing_s(
    program: Spmd, value: str, cost: CostModel, send_s: Callable[[float], float]
) -> float:
    """Seconds of a value from one pipeline rank to another; `send_s`: of so many bytes."""
    size_bytes, tensor = program.local_type_of(value).bytes(1), cost.mesh.tensor
    if not cost.traits.scatters_sends or tensor == 1 or _is_cut(program, value):
        return send_s(size_bytes)
    gathered_s = cost.collective_s("all_gather", size_bytes, "tensor")
    return send_s(size_bytes / tensor) + gathered_s


def _is_cut(program: Spmd, value: str) -> bool:
    """Whether the tensor axis divides a value already."""
    index, place = program.makers[value]
    lowered = program.lowered[program.placed[index].variant]
    return isinstance(lowered.layouts[lowered.outputs[place]].tensor, Shard)
