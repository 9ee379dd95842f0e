"""Clusters whose nodes hold different devices: what each has, and that a plan takes the least."""

import json
from math import prod

import pytest

from ir.cluster import GIB, Cluster, Mesh
from ir.errors import UsageError
from ir.mixed import least_of
from ir.plan import Plan
from planner.links import axis_groups
from planner.planning import plan
from tests.planner.small_models import products

MIXED = "2x8xH100-SXM+2x8xA100-40GB"


def test_each_place_has_its_own_device() -> None:
    cluster = Cluster.parse(MIXED)
    assert str(cluster) == "2x8 H100-SXM + 2x8 A100-40GB"
    assert (cluster.n_devices, cluster.devices_per_node, cluster.near_devices) == (32, 8, 8)
    names = [cluster.device_of(rank).name for rank in (0, 15, 16, 31)]
    assert names == ["H100-SXM", "H100-SXM", "A100-40GB", "A100-40GB"]
    with pytest.raises(UsageError, match="rank 32 is not on"):
        cluster.device_of(32)


def test_the_device_that_all_can_rely_on_is_the_least_of_them() -> None:
    device = Cluster.parse(MIXED).device
    assert device == Cluster.parse("A100-40GB").device
    # less memory with one, a lower rate with the other
    device = Cluster.parse("8xA100-80GB+8xRTX-4090").device
    assert (device.name, device.memory_bytes) == ("RTX-4090", 24 * GIB)
    device = Cluster.parse("8xMI300X+8xMI250X").device
    assert (device.name, device.memory_bytes) == ("MI250X", 64 * GIB)


def test_links_keep_the_rate_of_each_node() -> None:
    cluster = Cluster.parse(MIXED)
    node, across = cluster.levels
    assert [node.port_bytes_per_s(rank) / 1e9 for rank in (0, 31)] == pytest.approx([370.8, 240])
    assert [across.port_bytes_per_s(n) / 1e9 for n in (0, 3)] == pytest.approx([48.5, 24.25])
    assert node.nvls == 0  # A100's switches don't reduce
    whole = axis_groups(cluster, Mesh(1, 32, 1), "data")
    assert whole.ring_bytes_per_s == pytest.approx(8 * 24.25e9)
    fast = Cluster.parse("2x8xH100-SXM")
    assert axis_groups(fast, Mesh(1, 16, 1), "data").ring_bytes_per_s > whole.ring_bytes_per_s


def test_parts_that_are_alike_are_one() -> None:
    assert Cluster.parse("8xH100+3x8xH100").nodes == ()
    three = Cluster.parse("8xH100+8xA100+8xH100")
    assert str(three) == "1x8 H100-SXM + 1x8 A100-80GB + 1x8 H100-SXM"


def test_a_single_node_of_a_machine_keeps_its_network() -> None:
    cluster = Cluster.parse("1xp4d.24xlarge+1xp5.48xlarge")
    assert cluster.levels[1].devices_per_port == 2
    assert cluster.levels[1].port_rates == pytest.approx((12.5e9 * 0.97, 50e9 * 0.97))


@pytest.mark.parametrize("spec", [MIXED, "8xH100-NVL+8xH100-SXM", "8xMI250X+8xMI300X"])
def test_json_gives_back_an_equal_cluster(spec) -> None:
    cluster = Cluster.parse(spec)
    again = Cluster.from_json(json.loads(json.dumps(cluster.to_json())))
    assert again == cluster and hash(again) == hash(cluster)


def test_a_file_lists_nodes_with_their_own_keys(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "devices_per_node: 8\n"
        "nodes:\n"
        "  - {count: 2, device: H100-SXM, usd_per_node_hour: 80}\n"
        "  - {device: A100-40GB, inter_bandwidth_GBps: 12, memory_GiB: 36,"
        " usd_per_device_hour: 2}\n"
    )
    cluster = Cluster.parse(str(path))
    assert str(cluster) == "2x8 H100-SXM + 1x8 A100-40GB"
    assert (cluster.usd_per_hour, cluster.device.memory_bytes) == (2 * 80 + 8 * 2, 36 * GIB)
    assert cluster.levels[1].port_rates == pytest.approx((48.5e9, 48.5e9, 12e9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []", "lists no node"),
        (
            "nodes: [{device: H100, usd_per_node_hour: 8}, {device: A100}]",
            "entry 2 of `nodes` has no price and others have one",
        ),
        ("nodes: [8]", "entry 1 of `nodes` must hold keys"),
        ("nodes: [{count: 0, device: H100}]", "entry 1 of `nodes`: `count` must be"),
        ("nodes: [{count: 2}]", "entry 1 of `nodes`: `device` must name a device"),
        ("nodes: [{device: H100}, {device: H900}]", "no device is called 'H900'"),
        ("nodes: [{device: H100, levels: 2}]", "entry 1 of `nodes`: unknown key 'levels'"),
        ("nodes: [{device: H100}]\nlevels: []", "`levels` can't describe nodes that differ"),
        ("nodes: [{device: H100, devices_per_node: 8}, {device: A100, devices_per_node: 4}]",
         "nodes of 4 and of 8 devices can't be ranks of one mesh"),
        ("nodes: [{device: H100}, {device: MI300X}]", "no communication library in common"),
    ],
)  # fmt: skip
def test_nodes_that_can_not_be_one_cluster_are_refused(tmp_path, text, message) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Cluster.parse(str(path))


@pytest.mark.parametrize(
    ("spec", "works"),
    [
        ("2xL4+1xA100-80GB", "2x1xL4+1x1xA100-80GB"),
        ("3x8xH100-SXM+2x6xA100-80GB", "12x2xH100-SXM+6x2xA100-80GB"),
    ],
)
def test_nodes_of_unlike_sizes_are_told_a_description_that_works(spec, works) -> None:
    with pytest.raises(UsageError) as e:
        Cluster.parse(spec)
    assert f": {works} (nodes x devices x kind)" in str(e.value)
    assert Cluster.parse(works).n_devices == sum(
        prod(int(n) for n in part.split("x")[:-1]) for part in spec.split("+")
    )


def test_a_plan_names_all_kinds_that_its_numbers_are_of() -> None:
    for pin in ({"data": 4}, {"pipeline": 2, "data": 2}):
        cluster = Cluster.parse("1x2xL4+1x2xA100-80GB")
        made = plan(products(4), cluster, global_batch=64, pin=pin)
        words = least_of(made.cluster.nodes)
        assert "L4" in words and "A100-80GB" in words and words in str(made)
        assert made.to_json()["cluster"]["device_is"] == words
        assert Plan.from_json(made.to_json()) == made


def test_a_plan_takes_every_device_as_the_least_and_says_so() -> None:
    graph = products(4)
    slow, mixed = (
        plan(graph, Cluster.parse(spec), global_batch=64, pin={"data": 8})
        for spec in ("2x4xA100-40GB", "1x4xH100-SXM+1x4xA100-40GB")
    )
    assert mixed.prediction.step_s >= slow.prediction.step_s * (1 - 1e-9)
    assert mixed.prediction.capacity_bytes == slow.prediction.capacity_bytes
    least = "a device with the least rates and memory of H100-SXM and A100-40GB"
    note = f"every device is taken as {least}, 37.0 usable GiB"
    assert any(note in item for item in mixed.approximations) and note in str(mixed)
    assert not any("every device" in item for item in slow.approximations)


def test_a_priced_cluster_gives_the_cost_of_a_step(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: H100\ndevices_per_node: 4\nusd_per_node_hour: 36\n")
    found = plan(products(4), Cluster.parse(str(path)), global_batch=64)
    (line,) = [line for line in str(found).splitlines() if line.startswith("cost")]
    step_usd = 0.01 * found.prediction.step_s  # 36 USD in 3600 s
    assert f"{step_usd:.4g} USD per step" in line
    assert f"{step_usd * 1e6 / 64:.4g} USD per million samples" in line
    free = plan(products(4), Cluster.parse("4xH100"), global_batch=64)
    assert "cost  " not in str(free)
