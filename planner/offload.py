"""The host's memory: what copies there and back take, and whether what lies there fits.

Input: a cluster; the cost of a state tensor as if it lay on the device. Output: seconds of copies,
and the tensor's cost with the optimizer's state on the host. At the step the emitted program copies
state to the device, runs the update and copies it back, parameter by parameter; a block's forward
copies what it saves out when it ends, its backward copies it in before it starts. All in the open:

    2 S / (rate of the host link) + a launch per copy, for S bytes

Only one parameter's state is on the device at a time, when no activation is; of saved values those
of the running block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ir.cluster import Cluster, Mesh
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.offload import offloads_activations, staying_inputs
from ir.quantities import size
from ir.variants import Variant
from planner.cost import CostModel
from planner.price import OPTIMIZER_TENSORS, StateCost


class HostFull(Refused):
    """A plan that needs more host memory than there is."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """The host that a block's saved values may lie on; `staying`: inputs that are on the device in
    any case."""

    cluster: Cluster
    staying: frozenset[str] = frozenset()

    def copy_s(self, size_bytes: float, copies: int) -> float:
        """One way."""
        return copy_s(self.cluster, size_bytes, copies)


def hosting_of(
    graph: Graph, cluster: Cluster, offload: str
) -> Callable[[Variant], Hosting] | None:
    """The host of a variant's saved values; None where they stay on the device."""
    if not offloads_activations(offload):
        return None
    return lambda variant: Hosting(cluster, staying_inputs(graph, variant))


def can_offload(cluster: Cluster) -> bool:
    """Whether both the link to the host and its memory are known."""
    return cluster.host.copy_bytes_per_s > 0


def copy_s(cluster: Cluster, size_bytes: float, copies: int = 1) -> float:
    """Seconds of `copies` copies one way between a device and its host, of so many bytes in all."""
    return size_bytes / cluster.host.copy_bytes_per_s + copies * cluster.device.kernel_launch_s


def pinned_bytes(size_bytes: int) -> int:
    """What a tensor takes in host memory: torch rounds pinned blocks up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h).

    >>> pinned_bytes(3000)
    4096
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def with_hosted_state(found: StateCost, cost: CostModel, optimizer: str) -> StateCost:
    """The same tensor with its optimizer state in host memory."""
    state_bytes, tensors = found.optimizer_bytes, OPTIMIZER_TENSORS[optimizer]
    if not state_bytes:
        return found
    return replace(
        found, optimizer_bytes=0, host_bytes=tensors * pinned_bytes(state_bytes // tensors),
        tail=replace(found.tail, update_bytes=found.tail.update_bytes + state_bytes),
        update_s=found.update_s + 2 * copy_s(cost.cluster, state_bytes, tensors),
    )  # fmt: skip


def check_host(cluster: Cluster, mesh: Mesh, host_bytes: Sequence[int]) -> None:
    """Raises `HostFull` where the ranks of a node need more than its memory. `host_bytes`: of each
    device of a pipeline rank."""
    per_node = cluster.devices_per_node
    node_bytes = cluster.host.memory_bytes * per_node
    each = mesh.data * mesh.tensor
    devices = [held_bytes for held_bytes in host_bytes for _ in range(each)]
    needs = [sum(devices[i : i + per_node]) for i in range(0, len(devices), per_node)]
    if max(needs) > node_bytes:
        node = needs.index(max(needs))
        raise HostFull(
            f"no plan fits: what is offloaded takes {size(needs[node])} of the host of "
            f"node {node}, and {size(node_bytes)} are there. Try offload=none, more "
            "devices, or host_memory_GiB in cluster.yaml if there is more."
        )


def check_offload(offload: str | None, cluster: Cluster, optimizer: str) -> None:
    """Raises `UsageError` where a pinned offload makes no sense."""
    if offload in (None, "none"):
        return
    if not can_offload(cluster):
        raise UsageError(
            f"pin offload={offload}: the link to the host and its memory are not known of "
            f"{cluster}. Give host_link_GBps and host_memory_GiB in a cluster.yaml, or use "
            "offload=none."
        )
    if offload == "optimizer" and not OPTIMIZER_TENSORS[optimizer]:
        raise UsageError(
            f"pin offload={offload}: {optimizer} holds no state, so there is nothing to offload. "
            "Use offload=none."
        )
