"""Seconds of the nodes of a lowered block, by the cost model on local shapes.

Input: a `Lowered` block, its `Storage`, a `CostModel`. Output: compute and communication seconds
of any list of its nodes; of a stage's state its bytes and the seconds to sync and update it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ir.graph import Node, State, TensorType
from ir.layout import DATA
from ir.lower import Lowered
from ir.ops import op_def
from ir.spmd import Spmd
from planner.cost import CostModel
from planner.exchange import is_bucketed, zero_members
from planner.exchange_memory import NO_TAIL, Tail
from planner.fusion import groups, library_members
from planner.logits import logit_products
from planner.storage import Storage
from planner.work import Work, work_of

COLLECTIVES = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shard", "first")
)
OPTIMIZER_TENSORS = {"adamw": 2, "sgd": 0}
"""Tensors of a parameter's size that the optimizer holds (torch.optim, without momentum)."""
CROSS_ENTROPY_REDUCTIONS = 3
"""All-reduces of one value per row where the vocabulary is cut: maximum, sum, label's logit."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of a list of nodes on the device, and how many kernels the host launches for them."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    launches: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compute_s + other.compute_s, self.communication_s + other.communication_s,
            self.launches + other.launches,
        )  # fmt: skip

    def times(self, factor: float) -> Seconds:
        return Seconds(
            self.compute_s * factor, self.communication_s * factor, self.launches * factor
        )

    def launched(self, cost: CostModel) -> Seconds:
        """The same with the host that launches the kernels: the slower of both, or one after the
        other where it waits for each kernel."""
        host_s = cost.host_s(self.launches)
        waiting_s = host_s if cost.traits.blocking else max(0.0, host_s - self.total_s)
        return Seconds(self.compute_s + waiting_s, self.communication_s, self.launches)


def node_seconds(
    lowered: Lowered, node: Node, cost: CostModel, storage: Storage | None = None,
    types: Mapping[str, TensorType] | None = None, of_logits: Collection[str] = (),
) -> Seconds:  # fmt: skip
    """Seconds of one node; a view that has to copy costs its bytes.

    `of_logits`: first outputs of products that are never quantised.
    """
    types = lowered.types if types is None else types
    if node.op in COLLECTIVES:
        seconds = cost.collective_s(node.op, moved_bytes(node, types), node.args[1])
        return Seconds(0.0, seconds, float(seconds > 0))
    work = node_work(node, types, storage)
    if node.outputs[0] in of_logits:
        work = replace(work, keeps_precision=True)
    launches = 0.0 if work.kind == "view" else float(work.kernels)
    communication_s = _inner_communication_s(lowered, node, types, cost)
    return Seconds(cost.compute_s(work), communication_s, launches)


def moved_bytes(node: Node, types: Mapping[str, TensorType]) -> int:
    """The size by which a collective is priced: of the larger side, but of all-to-all's operand."""
    results = [name for name in node.outputs if name in types]
    pair = (types[node.inputs[0]].bytes(1), types[results[0]].bytes(1))
    return pair[0] if node.op == "all_to_all" else max(pair)


def node_work(node: Node, types: Mapping[str, TensorType], storage: Storage | None) -> Work:
    """The work of a node of a lowered block; a view that can't alias copies."""
    kind = op_def(node.op).kind
    if kind == "view" and storage is not None and not storage.is_alias(node):
        kind = "memory"
    results = [types[name] for name in node.outputs if name in types]
    return work_of(node, [types[name] for name in node.operands], results, kind)


def _inner_communication_s(
    lowered: Lowered, node: Node, types: Mapping[str, TensorType], cost: CostModel
) -> float:
    chosen = lowered.chosen.get(node.outputs[0])
    if chosen is None or not chosen.communicates:
        return 0.0
    size_bytes = types[node.outputs[0]].bytes(1)
    return CROSS_ENTROPY_REDUCTIONS * cost.collective_s("all_reduce", size_bytes, "tensor")


@dataclass(frozen=True)
class NodeTimes:
    """The seconds of every node of a lowered block, by its first output.

    The prologue's are in `early`: its nodes may define values of the same names. Where memory-bound
    ops are fused, `of` has what each takes alone and `total` what the groups of a list take.
    `inner`: bytes that a node keeps for backward, and needs while it runs, beside its values.
    `mask_bytes`: of dropout in the block, beside that of attention.
    """

    of: dict[str, Seconds]
    early: dict[str, Seconds]
    storage: Storage
    cost: CostModel
    inner: dict[str, tuple[float, float]]
    mask_bytes: int = 0

    @property
    def prologue(self) -> Seconds:
        return sum(self.early.values(), Seconds())

    def total(self, nodes: Sequence[Node], wanted: Collection[str] = ()) -> Seconds:
        """Of a list of nodes whose values `wanted` are read outside it."""
        found = Seconds()
        fused: set[str] = set()
        traits = self.cost.traits
        if traits.fused_elementwise or traits.library_kernels:
            only = None if traits.fused_elementwise else library_members(nodes)
            across = traits.fuses_norms and only is None
            for group in groups(nodes, self.storage, wanted, COLLECTIVES, across, only):
                found += Seconds(self.cost.group_s(group.moved_bytes), 0.0, 1.0)
                fused |= set(group.nodes)
        for node in nodes:
            alone = self.of[node.outputs[0]]
            found += Seconds(0.0, alone.communication_s) if node.outputs[0] in fused else alone
        return found


def node_times(lowered: Lowered, storage: Storage, cost: CostModel) -> NodeTimes:
    """All nodes priced once."""
    early = {
        n.outputs[0]: node_seconds(lowered, n, cost, types=lowered.early_types)
        for n in lowered.prologue
    }
    nodes = (*lowered.forward, *lowered.backward)
    of_logits = logit_products(lowered)
    found = {
        n.outputs[0]: node_seconds(lowered, n, cost, storage, of_logits=of_logits) for n in nodes
    }
    inner = {
        n.outputs[0]: cost.inner_bytes(node_work(n, lowered.types, storage))
        for n in nodes if n.op not in COLLECTIVES and op_def(n.op).kind != "view"
    }  # fmt: skip
    mask_bytes = _mask_bytes(lowered) if cost.traits.dropout else 0
    used = {name: both for name, both in inner.items() if any(both)}
    return NodeTimes(found, early, storage, cost, used, mask_bytes)


def _mask_bytes(lowered: Lowered) -> int:
    """A byte per element (Korthikanti et al. 2022) of the sums that dropout precedes: of a residual
    and its branch, of token and position embeddings. They have the type of what the block hands
    on; a bias has but one dim."""
    types = lowered.types
    outputs = [types[name] for name in lowered.outputs if name in types]

    def is_sum(node: Node) -> bool:
        return node.op == "add.Tensor" and len(node.inputs) == 2 and types[
            node.outputs[0]
        ] in outputs and all(len(types[name].shape) > 1 for name in node.inputs)

    sums = [node.outputs[0] for node in lowered.forward if is_sum(node)]
    return sum(types[name].elements(1) for name in sums)


@dataclass(frozen=True, slots=True)
class StateCost:
    """Bytes per device of state tensors; seconds per step to sync gradients and to update.

    `exchanged_bytes` and `gathered_bytes`: gradients and parameters that the data axis moves in
    buckets (`planner.exchange`); what it moves tensor by tensor is in `sync_s`. `summed_bytes`:
    gradients that every micro-batch adds up, of `summed_tensors` parameters. `gather_s` and
    `scatter_s`: of one gather of a parameter and one scatter of its gradient, where every
    micro-batch does them (`planner.zero`). `host_bytes`: of state in host memory
    (`planner.offload`). `scattering_bytes`: beside the gradient, during that scatter; `tail`: once
    per step. Neither is known of totals.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    sync_s: float = 0.0
    update_s: float = 0.0
    exchanged_bytes: int = 0
    gathered_bytes: int = 0
    summed_bytes: int = 0
    summed_tensors: int = 0
    gather_s: float = 0.0
    scatter_s: float = 0.0
    host_bytes: int = 0
    scattering_bytes: int = 0
    tail: Tail = NO_TAIL

    @property
    def held_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @staticmethod
    def total(items: Sequence[StateCost]) -> StateCost:
        """Of several tensors together."""
        return StateCost(
            sum(item.parameter_bytes for item in items),
            sum(item.gradient_bytes for item in items),
            sum(item.optimizer_bytes for item in items),
            sum((item.sync_s for item in items), 0.0), sum((item.update_s for item in items), 0.0),
            sum(item.exchanged_bytes for item in items),
            sum(item.gathered_bytes for item in items),
            sum(item.summed_bytes for item in items),
            sum(item.summed_tensors for item in items),
            sum((item.gather_s for item in items), 0.0),
            sum((item.scatter_s for item in items), 0.0),
            sum(item.host_bytes for item in items),
        )  # fmt: skip


MASTER_BYTES = 4
"""Of a parameter's fp32 copy, and of each tensor of optimizer state beside it."""


def least_state_cost(item: State, cost: CostModel, optimizer: str, tensor: int) -> StateCost:
    """What no sharding beats: the tensor and its gradient cut evenly over the tensor axis, with
    nothing to reduce there."""
    local = TensorType((item.type.elements(1) // tensor,), item.type.dtype)
    size_bytes = local.bytes(1)
    if not item.trainable:
        return StateCost(size_bytes)
    state_bytes = OPTIMIZER_TENSORS[optimizer] * size_bytes
    sync_s = cost.collective_s("all_reduce", size_bytes, DATA) if cost.mesh.data > 1 else 0.0
    return StateCost(
        size_bytes, size_bytes, state_bytes, sync_s, cost.optimizer_s(size_bytes, state_bytes),
        summed_bytes=size_bytes, summed_tensors=1,
    )  # fmt: skip


def state_cost(spmd: Spmd, name: str, cost: CostModel, optimizer: str) -> StateCost:
    """What holding, syncing and updating one state tensor takes on a stage that has it.

    ZeRO divides optimizer state (stage 1), gradients (2) and parameters (3) over its group. With
    master weights stage 3 holds only these, and gathers copies in the parameter's dtype.
    """
    local = spmd.state_type(name)
    held_bytes, traits = local.bytes(1), cost.traits
    if not spmd.state_of[name].trainable:
        return StateCost(held_bytes)
    bucketed, members = is_bucketed(cost), zero_members(cost)
    whole_bytes = spmd.state_of[name].type.bytes(1)
    gradient = spmd.gradient_type(name)
    wide = TensorType(gradient.shape, traits.gradient_dtype or gradient.dtype)
    sync_s, exchanged = 0.0, 0
    for op, axis, _, _ in spmd.gradient_sync(name):
        size_bytes = held_bytes if axis == DATA or op == "all_to_all" else whole_bytes
        if axis == DATA and bucketed:
            exchanged = TensorType(local.shape, wide.dtype).bytes(1)
        else:
            sync_s += cost.collective_s(op, size_bytes, axis)
    state_bytes = OPTIMIZER_TENSORS[optimizer] * held_bytes
    if traits.master_weights:
        state_bytes = (1 + OPTIMIZER_TENSORS[optimizer]) * MASTER_BYTES * local.elements(1)
    parts = (members if traits.zero_stage >= stage else 1 for stage in (1, 2, 3))
    of_state, of_gradients, of_parameters = parts
    memory = traits.memory
    is_cast = of_parameters > 1 and traits.master_weights and not memory.keeps_shards
    stored_bytes = 0 if is_cast else held_bytes
    gradient_bytes = wide.bytes(1)
    if memory.sums_whole:
        of_gradients = 1
    if memory.keeps_gradients and wide.dtype != gradient.dtype:
        gradient_bytes += gradient.bytes(1)
    return StateCost(
        stored_bytes // of_parameters, gradient_bytes // of_gradients, state_bytes // of_state,
        sync_s, cost.optimizer_s(held_bytes / of_state, state_bytes / of_state),
        exchanged, held_bytes, wide.bytes(1), 1,
    )  # fmt: skip
