"""Cluster specs, files and meshes: what is read, what is refused, what an axis sees."""

import json

import pytest

from ir.cluster import GIB, Cluster, Mesh
from ir.errors import UsageError


@pytest.mark.parametrize(
    ("spec", "text", "devices"),
    [
        ("4x8xH100-SXM", "4x8 H100-SXM", 32),
        ("4x8xh100", "4x8 H100-SXM", 32),
        ("8xA100-80GB", "1x8 A100-80GB", 8),
        ("A100-SXM4-80GB", "1x1 A100-80GB", 1),
        ("2 x 4 x RTX 4090", "2x4 RTX-4090", 8),
        ("8x4090", "1x8 RTX-4090", 8),
        ("8xMI300X", "1x8 MI300X", 8),
        ("local:4", "1x4 CPU", 4),
    ],
)
def test_a_spec_names_nodes_devices_and_device(spec: str, text: str, devices: int) -> None:
    cluster = Cluster.parse(spec)
    assert (str(cluster), cluster.n_devices) == (text, devices)


def test_spellings_of_one_device_give_equal_clusters() -> None:
    assert Cluster.parse("8xh100_sxm5_80gb") == Cluster.parse("8xH100") == Cluster.parse("1x8xH100")


@pytest.mark.parametrize("spec", ["", "0x8xH100", "2x2x2xH100", "8*H100", "x", "local:", "local:0"])
def test_a_spec_that_makes_no_sense_is_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        Cluster.parse(spec)


def test_an_unknown_device_is_answered_with_near_names() -> None:
    with pytest.raises(UsageError, match=r"'H1000'.*H100-SXM"):
        Cluster.parse("8xH1000")


def test_the_grammar_is_shown_for_a_spec_that_can_not_be_read() -> None:
    with pytest.raises(UsageError, match=r"4x8xH100-SXM \(4 nodes of 8\)"):
        Cluster.parse("2x2x2xH100")


def test_peaks_are_dense() -> None:
    device = Cluster.parse("H100-SXM").device
    assert device.peak_flops_per_s("bfloat16") == pytest.approx(989.4e12)
    assert device.peak_flops_per_s("float32") == pytest.approx(66.9e12)
    assert device.memory_bytes == 80 * GIB
    assert device.usable_bytes == pytest.approx(75.4 * GIB, rel=1e-3)


def test_a_dtype_without_fast_units_computes_as_float32() -> None:
    device = Cluster.parse("V100").device
    assert device.peak_flops_per_s("bfloat16") == device.peak_flops_per_s("float32")


def test_a_bridge_joins_only_pairs() -> None:
    names = [Cluster.parse(f"{n}xH100-NVL").levels[0].link.name for n in (2, 8)]
    assert names == ["NVLink", "PCIe"]


@pytest.mark.parametrize("spec", ["4x8xH100", "T4", "local:3", "2x8xMI300X"])
def test_json_gives_back_an_equal_cluster(spec: str) -> None:
    cluster = Cluster.parse(spec)
    again = Cluster.from_json(json.loads(json.dumps(cluster.to_json())))
    assert again == cluster
    assert hash(again) == hash(cluster)


def test_json_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match="levels"):
        Cluster.from_json({"device": {"peaks": {}}})


def test_local_memory_is_per_process() -> None:
    assert Cluster.local(4, memory_GiB=2).device.memory_bytes == 2 * GIB


def test_a_file_overrides_memory_and_links(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes: 2\ndevices_per_node: 8\ndevice: a100\nmemory_GiB: 60\n"
        "intra_bandwidth_GBps: 200\ninter_bandwidth_GBps: 12.5\ninter_latency_us: 30\n"
    )
    cluster = Cluster.parse(str(path))
    inner, outer = (level.link for level in cluster.levels)
    assert str(cluster) == "2x8 A100-80GB"
    assert cluster.device.memory_bytes == 60 * GIB
    assert inner.sustained_bytes_per_s == 200e9
    assert (outer.sustained_bytes_per_s, outer.latency_s) == (12.5e9, pytest.approx(30e-6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: H100\nnode: 2\n", "unknown key 'node'"),
        ("nodes: 2\n", "must name a device"),
        ("device: H100\nnodes: -1\n", "`nodes` must be a positive number"),
        ("device: H100\nintra_bandwidth_GBps: 1e30\n", "must be less than 1e\\+12, not 1e\\+30"),
        ("device: H100\nnodes: 1.5\n", "whole numbers"),
        ("device: H100\nnodes: yes\n", "`nodes` must be a positive number"),
        ("- 1\n", "keys and values"),
        ("a: [", "not YAML"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Cluster.parse(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match="nowhere.yaml can't be read"):
        Cluster.parse("nowhere.yaml")


FOUR_NODES = Cluster.parse("4x8xH100")


@pytest.mark.parametrize(
    ("mesh", "axis", "spread"),
    [
        (Mesh(1, 4, 8), "tensor", (8, 8)),
        (Mesh(1, 4, 8), "data", (1, 4)),
        (Mesh(1, 32, 1), "data", (8, 32)),
        (Mesh(2, 4, 4), "data", (2, 4)),
        (Mesh(2, 4, 4), "pipeline", (1, 2)),
        (Mesh(1, 1, 24), "tensor", (8, 24)),
        (Mesh(1, 2, 12), "tensor", (4, 12)),
        (Mesh(1, 1, 1), "data", (1, 1)),
    ],
)
def test_spread_counts_the_members_that_meet(mesh: Mesh, axis: str, spread: tuple) -> None:
    assert mesh.spread(FOUR_NODES, axis) == spread


def test_an_axis_within_a_node_gets_the_inner_link() -> None:
    link = Mesh(1, 4, 8).axis_link(FOUR_NODES, "tensor")
    assert link.name == "NVLink"
    assert link.bandwidth_bytes_per_s == pytest.approx(450e9 * 0.824)


def test_members_in_one_node_share_the_crossing() -> None:
    per_nic = 50e9 * 0.97
    one, two, all_eight = (
        mesh.axis_link(FOUR_NODES, "data").bandwidth_bytes_per_s
        for mesh in (Mesh(1, 4, 8), Mesh(2, 4, 4), Mesh(1, 32, 1))
    )
    assert one == pytest.approx(per_nic)
    assert two == pytest.approx(2 * per_nic)
    assert all_eight == pytest.approx(450e9 * 0.824)


def test_a_pair_on_point_to_point_links_gets_one_of_them() -> None:
    link = Mesh(1, 4, 2).axis_link(Cluster.parse("8xMI300X"), "tensor")
    assert link.bandwidth_bytes_per_s == pytest.approx(448e9 * 0.70 / 7)


def test_neighbouring_stages_meet_on_the_network_only_between_nodes() -> None:
    names = [Mesh(8, 1, 4).neighbour_link(FOUR_NODES, stage).name for stage in range(3)]
    assert names == ["NVLink", "network", "NVLink"]


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(UsageError, match="needs 64 devices, 4x8 H100-SXM has 32"):
        Mesh(1, 8, 8).axis_link(FOUR_NODES, "tensor")
