"""Offload in the planner: what it takes, when it is chosen, what a pin may ask, what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from small_models import chain, products

from ir.cluster import Cluster, Mesh
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.machines import Host
from ir.offload import OFFLOADS
from ir.plan import Plan, spmd
from planner import plan
from planner.cost import Roofline
from planner.offload import check_host, pinned_bytes
from planner.pins import read_pins
from planner.search import Search
from planner.workload import Workload
from planner.zero import held_cost, least_held_cost
from tests.hand_plan import kinds_of

LINK_BYTES_PER_S = 4e9
HOST = Host(LINK_BYTES_PER_S, 2**30, link_part=1.0)
STATE = ("none", "optimizer")
PINNED = {"pipeline": 1, "tensor": 1, "micro_batches": 1}


def cluster(devices: int, memory_GiB: float = 1, host: Host = HOST) -> Cluster:
    return dataclasses.replace(Cluster.local(devices, memory_GiB=memory_GiB), own_host=host)


@pytest.fixture(scope="module")
def heavy() -> Graph:
    """State outweighs activations."""
    return chain(depth=6, width=128, hidden=512, seq=4)


def best(graph: Graph, memory_GiB: float = 1, devices: int = 1, **pin: Any) -> Plan:
    return plan(graph, cluster(devices, memory_GiB), global_batch=8, pin=pin)


# the price


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_state_crosses_the_link_twice(heavy: Graph, zero: int) -> None:
    """By hand: two tensors of a piece's size each way, and a launch for each of four copies."""
    here, there = (
        spmd(heavy, best(heavy, devices=2, data=2, zero=zero, offload=offload, **PINNED))
        for offload in ("none", "optimizer")
    )
    cost = Roofline(cluster(2), Mesh(1, 2, 1))
    item = max(heavy.state, key=lambda state: state.type.bytes(1))
    on_device, on_host = (held_cost(found, item.name, cost, "adamw") for found in (here, there))
    piece_bytes = item.type.bytes(1) / (2 if zero else 1)
    launch_s = cost.cluster.device.kernel_launch_s
    copies_s = 2 * 2 * piece_bytes / LINK_BYTES_PER_S + 4 * launch_s
    assert on_host.update_s == pytest.approx(on_device.update_s + copies_s)
    streamed_bytes = on_host.tail.update_bytes - on_device.tail.update_bytes
    assert on_device.optimizer_bytes == streamed_bytes == 2 * piece_bytes
    assert on_host.optimizer_bytes == 0
    assert on_host.host_bytes == 2 * pinned_bytes(int(piece_bytes))
    assert on_host.sync_s == on_device.sync_s


def test_an_update_makes_tensors_on_a_cpu_and_none_on_a_gpu(heavy: Graph) -> None:
    """As `runtime.optimizers.implementation` takes the one or the other of torch."""
    whole = spmd(heavy, best(heavy, devices=2, data=2, zero=0, **PINNED))
    item = max(heavy.state, key=lambda state: state.type.bytes(1))
    update_bytes = [
        held_cost(whole, item.name, Roofline(hardware, Mesh(1, 2, 1)), "adamw").tail.update_bytes
        for hardware in (cluster(2), Cluster.parse("2xH100-SXM"))
    ]
    assert update_bytes == [2 * item.type.bytes(1), 0]


def test_least_costs_bound_every_tensor(heavy: Graph) -> None:
    found = spmd(heavy, best(heavy, devices=2, data=2, zero=1, offload="optimizer", **PINNED))
    cost = Roofline(cluster(2), Mesh(1, 2, 1))
    for item in heavy.state:
        exact = held_cost(found, item.name, cost, "adamw")
        least = least_held_cost(item, cost, "adamw", 1, "optimizer")
        for part in ("held_bytes", "host_bytes", "update_s"):
            assert getattr(least, part) <= getattr(exact, part) * (1 + 1e-9), part


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]


def test_the_step_has_the_copies_and_the_device_one_tensor(heavy: Graph) -> None:
    near, far = (best(heavy, offload=offload, **PINNED).prediction for offload in STATE)
    state_bytes = near.stages[0].optimizer_bytes
    tensors = len([item for item in heavy.state if item.trainable])
    copies_s = 2 * state_bytes / LINK_BYTES_PER_S + 4 * tensors * 5e-6
    assert far.optimizer_s == pytest.approx(near.optimizer_s + copies_s, rel=1e-3)
    assert far.step_s - near.step_s == pytest.approx(far.optimizer_s - near.optimizer_s)
    largest_bytes = max(2 * item.type.bytes(1) for item in heavy.state)
    one, other = near.stages[0], far.stages[0]
    assert other.optimizer_bytes == 0 and other.host_bytes >= state_bytes
    assert other.saved_bytes + other.transient_bytes >= largest_bytes
    assert near.peak_bytes - far.peak_bytes == state_bytes - (
        other.transient_bytes - one.transient_bytes
    )


# the choice


def test_what_fits_only_with_offload_is_offloaded(heavy: Graph) -> None:
    roomy, far = (best(heavy, offload=offload, **PINNED).prediction for offload in STATE)
    memory_GiB = (0.6 * far.peak_bytes + 0.4 * roomy.peak_bytes) / 2**30
    with pytest.raises(Refused, match="no plan fits"):
        best(heavy, memory_GiB, offload="none")
    found = best(heavy, memory_GiB)
    assert found.offload in ("optimizer", "all")
    assert found.prediction.peak_bytes <= memory_GiB * 2**30
    assert found.prediction.bound_s <= found.prediction.step_s
    assert "optimizer state in host memory" in found.text


def test_where_there_is_room_nothing_is_offloaded(heavy: Graph) -> None:
    assert best(heavy).offload == "none"
    assert "host" not in best(heavy).text


@pytest.mark.parametrize("part", [1.5, 0.8, 0.65, 0.6])
def test_the_search_finds_the_best_of_all(heavy: Graph, part: float) -> None:
    roomy_GiB = best(heavy, offload="none", **PINNED).prediction.peak_bytes / 2**30
    pinned = []
    for offload in OFFLOADS:
        try:
            pinned.append(best(heavy, roomy_GiB * part, offload=offload, pipeline=1, tensor=1))
        except Refused as error:
            assert "no plan fits" in str(error)
    found = best(heavy, roomy_GiB * part, pipeline=1, tensor=1)
    least_s = min(p.prediction.step_s for p in pinned)
    assert least_s <= found.prediction.step_s <= least_s * 1.005
    assert found.prediction.bound_s <= least_s


def words(graph: Graph, where: Cluster, optimizer: str = "adamw") -> tuple[str, ...]:
    batch_flow, kinds = kinds_of(graph)
    work = Workload(graph, batch_flow, kinds, 8, optimizer)
    return Search(work, where, read_pins({}), True).offload.words


def test_nothing_is_considered_without_a_host(heavy: Graph) -> None:
    assert words(heavy, Cluster.local(2)) == ("none",)
    assert words(heavy, cluster(2, host=Host(1e9, 0))) == ("none",)
    assert words(heavy, cluster(2, host=Host(0.0, 2**30))) == ("none",)
    assert words(heavy, cluster(2), "sgd") == ("none", "activations")
    assert words(heavy, Cluster.parse("8xH100-SXM")) == ("none", "activations", "all")


# the host's memory


def test_the_devices_of_a_node_share_its_memory() -> None:
    """Four nodes of two devices; pipeline ranks of four devices cover two nodes each."""
    found = Cluster.parse("4x2xH100-SXM")
    found = dataclasses.replace(found, own_host=Host(1e9, 100))
    check_host(found, Mesh(2, 4, 1), [100, 100])
    with pytest.raises(Refused, match="host of node 2"):
        check_host(found, Mesh(2, 4, 1), [100, 101])
    check_host(found, Mesh(8, 1, 1), [150, 50, 50, 150, 0, 200, 200, 0])
    with pytest.raises(Refused, match="host of node 1"):
        check_host(found, Mesh(8, 1, 1), [0, 0, 150, 51, 0, 0, 0, 0])


def test_a_host_that_is_too_small_is_refused(heavy: Graph) -> None:
    small = cluster(1, host=Host(LINK_BYTES_PER_S, 2**20))
    with pytest.raises(Refused, match=r"takes .* MiB of the host of node 0"):
        plan(heavy, small, global_batch=8, pin={"offload": "optimizer"})


# pins and the plan file


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"offload": "disk"}, "offload='disk': it is one of none, optimizer, activations, all"),
        ({"offload": True}, "it is one of none, optimizer, activations, all"),
        ({"offload": 1}, "it is one of none, optimizer, activations, all"),
    ],
    ids=str,
)
def test_pins_that_make_no_sense(heavy: Graph, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        best(heavy, **pin)


def test_a_pin_needs_a_host_and_state(heavy: Graph) -> None:
    with pytest.raises(UsageError, match="host_link_GBps and host_memory_GiB"):
        plan(heavy, Cluster.local(1), global_batch=8, pin={"offload": "optimizer"})
    with pytest.raises(UsageError, match="sgd holds no state"):
        plan(
            products(2), cluster(1), global_batch=8, pin={"offload": "optimizer"}, optimizer="sgd"
        )


@pytest.mark.parametrize("offload", STATE)
def test_json_gives_the_choice_back(heavy: Graph, offload: str) -> None:
    found = best(heavy, offload=offload, **PINNED)
    again = Plan.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found and again.offload == offload
    assert ("offload" in found.to_json()) == (offload != "none")
    with pytest.raises(UsageError, match="offload is 'disk', not none, optimizer"):
        Plan.from_json(found.to_json() | {"offload": "disk"})


def test_a_cluster_file_tells_of_the_host(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: CPU\nhost_link_GBps: 2\nhost_memory_GiB: 3\n")
    host = Cluster.parse(str(path)).host
    assert (host.copy_bytes_per_s, host.memory_bytes) == (2e9, 3 * 2**30)
    usual = Cluster.parse("H100-SXM").host
    assert usual.copy_bytes_per_s == pytest.approx(0.8 * usual.link_bytes_per_s)
