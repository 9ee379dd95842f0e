"""What exchanges add to a step: gradients reduced, parameters gathered, hidden or not.

Input: a stage's bytes, its layers and their seconds, a cost model with its traits. Output: seconds
per micro-batch and once per step. With L layers of forward f and backward b, a collective of a
layer g (gather) or r (reduction), M micro-batches, contention c:

    (1) reduced after backward          r L
    (2) reduced under backward          r + max(0, r (L-1) - b (L-1)) + c hidden
    (3) ZeRO-1, 2: scattered, and after the update gathered, under the next forward likewise
        whole tensors: all-reduced, and after the update a broadcast from every owner, unhidden
    (4) ZeRO-3, per micro-batch         g + (L-1) max(0, g - f) forward,
                                        g + (L-1) max(0, g + r - b) + r backward, + c hidden

The last layer's reduction and the first one's gather have nothing to hide under. (2) is torch's
DistributedDataParallel and Megatron's overlap, (4) FSDP with one prefetched layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from planner.cost import CostModel

CONTENTION = 0.189
"""Part of a hidden second that compute loses to it: mean slowdown of overlapped compute on A100,
H100, MI210 and MI250, arXiv 2507.03114."""
BUCKET_BYTES = 25 * 2**20
"""Gradients of smaller layers are reduced together (torch's DistributedDataParallel)."""


@dataclass(frozen=True, slots=True)
class Load:
    """One stage on one device: gradient and parameter bytes before ZeRO divides them, the layers,
    seconds of a micro-batch, how many parameters there are."""

    gradient_bytes: float
    parameter_bytes: float
    layers: int
    forward_s: float
    backward_s: float
    tensors: int = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exposed seconds: of every micro-batch's forward and backward, and once per step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


def is_bucketed(cost: CostModel) -> bool:
    """Whether gradients are exchanged in buckets; otherwise tensor by tensor after backward."""
    return cost.traits.overlap_gradients or cost.traits.zero_stage > 0


def zero_members(cost: CostModel) -> int:
    """Data ranks that share one copy of what ZeRO divides; 1 without it."""
    if cost.traits.zero_stage == 0:
        return 1
    return min(cost.traits.zero_group or cost.mesh.data, cost.mesh.data)


def exchange(load: Load, cost: CostModel) -> Exchange:
    """The exposed seconds of a stage; nothing for what is exchanged tensor by tensor."""
    if not is_bucketed(cost) or cost.mesh.data == 1 or load.gradient_bytes == 0:
        return Exchange()
    if cost.traits.zero_stage == 3:
        return _zero3(load, cost)
    if cost.traits.zero_stage == 0:
        pieces = load.layers if cost.traits.combines_gradients else load.tensors
        reduced_s = _hidden(load.gradient_bytes, load.backward_s, pieces, cost, "all_reduce")
        return Exchange(step_s=reduced_s)
    if cost.traits.whole_tensors:
        reduced_s = _hidden(load.gradient_bytes, load.backward_s, load.layers, cost, "all_reduce")
        return Exchange(step_s=reduced_s + _broadcasts_s(load, cost))
    scattered_s = _hidden(
        load.gradient_bytes, load.backward_s, load.layers, cost, "reduce_scatter", "zero"
    )
    gathered_s = _hidden(
        load.parameter_bytes, load.forward_s, load.layers, cost, "all_gather", "zero"
    )
    return Exchange(step_s=scattered_s + gathered_s + _replicas_s(load, cost))


def exposed_tensor_s(communication_s: float, compute_s: float, cost: CostModel) -> float:
    """Of a block's collectives on the tensor axis. With `overlap_tensor` they go in pieces, one
    per rank, each under the product of another piece; one piece is exposed (Wang et al., ASPLOS
    2023; Transformer Engine's user buffers)."""
    tensor = cost.mesh.tensor
    if tensor == 1 or not cost.traits.overlap_tensor:
        return communication_s
    hidden_s = min(communication_s * (1 - 1 / tensor), compute_s)
    return communication_s - (1 - CONTENTION) * hidden_s


def exposed_send_s(send_s: float, compute_s: float, virtual_stages: int) -> float:
    """Of a stage's send per micro-batch. Plain schedules wait for it; interleaved ones send each of
    their v pieces while the next one computes (Megatron's overlap of point-to-point)."""
    if virtual_stages == 1:
        return send_s
    hidden_s = min(send_s, compute_s / virtual_stages)
    return virtual_stages * (send_s - hidden_s + CONTENTION * hidden_s)


def _hidden(
    size_bytes: float, under_s: float, pieces: int, cost: CostModel, op: str, axis: str = "data"
) -> float:
    """(1) or (2), in buckets of a piece or `BUCKET_BYTES`, whichever is more; or piece by piece."""
    fewest = ceil(size_bytes / BUCKET_BYTES) if cost.traits.combines_gradients else pieces
    buckets = max(1, min(pieces, fewest))
    each_s = cost.collective_s(op, size_bytes / buckets, axis)
    if not cost.traits.overlap_gradients:
        return buckets * each_s
    hideable_s = each_s * (buckets - 1)
    hidden_s = min(hideable_s, under_s * (buckets - 1) / buckets)
    return each_s + hideable_s - hidden_s + CONTENTION * hidden_s


def _broadcasts_s(load: Load, cost: CostModel) -> float:
    """One from every rank that owns a tensor, one after the other."""
    owners = min(zero_members(cost), load.tensors)
    return owners * cost.collective_s("broadcast", load.parameter_bytes / owners, "zero")


def _zero3(load: Load, cost: CostModel) -> Exchange:
    """(4)."""
    layers = max(1, load.layers)
    gather_s = cost.collective_s("all_gather", load.parameter_bytes / layers, "zero")
    reduce_s = cost.collective_s("reduce_scatter", load.gradient_bytes / layers, "zero")
    replicas_s = _replicas_s(load, cost)
    if not cost.traits.overlap_gradients:
        return Exchange(layers * gather_s, layers * (gather_s + reduce_s), replicas_s)
    forward_s = gather_s + _excess(gather_s, load.forward_s / layers, layers)
    backward_s = gather_s + _excess(gather_s + reduce_s, load.backward_s / layers, layers)
    return Exchange(forward_s, backward_s + reduce_s, replicas_s)


def _excess(moving_s: float, under_s: float, layers: int) -> float:
    """Of all layers but one: what does not fit under compute, and what hiding costs."""
    hidden_s = min(moving_s, under_s)
    return (layers - 1) * (moving_s - hidden_s + CONTENTION * hidden_s)


def _replicas_s(load: Load, cost: CostModel) -> float:
    """Copies of the divided state (a `zero_group` below the data degree) sum their pieces."""
    piece = load.gradient_bytes / zero_members(cost)
    return cost.collective_s("all_reduce", piece, "replica")
