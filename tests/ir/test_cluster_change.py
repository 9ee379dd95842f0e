"""A cluster changed by key and value."""

import pytest

from ir.cluster import GIB, Cluster
from ir.cluster_change import changed, level_names, parse_changes
from ir.errors import UsageError

H100 = "4x8xH100-SXM"


def rates(cluster: Cluster) -> list[float]:
    """GB/s per direction and device, innermost first."""
    return [level.device_bytes_per_s / 1e9 for level in cluster.levels]


@pytest.mark.parametrize(
    ("value", "gib"),
    [("+8GiB", 88), ("-8GiB", 72), ("96GiB", 96), ("x1.5", 120), ("+512MiB", 80.5)],
)
def test_memory_changes_and_the_reserve_stays(value: str, gib: float) -> None:
    cluster = Cluster.parse(H100)
    found = changed(cluster, {"memory": value})
    assert found.device.memory_bytes == gib * GIB
    assert found.device.reserve_bytes == cluster.device.reserve_bytes


def test_memory_of_nodes_that_differ_changes_in_each() -> None:
    found = changed(Cluster.parse("2x8xH100-SXM+2x8xA100-40GB"), {"memory": "+8GiB"})
    assert [part.device.memory_bytes / GIB for part in found.nodes] == [88, 48]
    assert found.device.memory_bytes == 48 * GIB


@pytest.mark.parametrize(
    ("key", "value", "number", "wanted"),
    [
        ("link.node", "900", 0, 900), ("link.NODE", "900 GB/s", 0, 900),
        ("link.network", "x2", 1, 97), ("link.network", "+1.5GBps", 1, 50),
    ],
)  # fmt: skip
def test_a_link_is_what_each_device_gets(key: str, value: str, number: int, wanted: float) -> None:
    cluster = Cluster.parse(H100)
    found = rates(changed(cluster, {key: value}))
    assert found[number] == pytest.approx(wanted)
    assert found[1 - number] == rates(cluster)[1 - number]


def test_shared_ports_and_switches_stay_shared(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "device: H100-SXM\nlevels:\n  - {name: node, size: 8}\n"
        "  - {name: rack, size: 4, devices_per_nic: 2, oversubscription: 3}\n"
    )
    found = changed(Cluster.parse(str(path)), {"link.rack": "30"})
    assert rates(found)[1] == pytest.approx(30)
    assert found.levels[1].devices_per_port == 2


@pytest.mark.parametrize(
    ("spec", "nodes", "sizes"),
    [
        (H100, "8", [8, 8]), (H100, "1", [8]), ("8xA100-80GB", "2", [8, 2]),
        ("36x4xGB200", "8", [4, 8]), ("36x4xGB200", "54", [4, 18, 3]),
        ("GB200-NVL72", "36", [4, 18, 2]),
    ],
)  # fmt: skip
def test_nodes_are_joined_as_the_present_ones_are(spec: str, nodes: str, sizes: list[int]) -> None:
    found = changed(Cluster.parse(spec), {"nodes": nodes})
    assert [level.size for level in found.levels] == sizes


def test_more_nodes_cost_more(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: H100-SXM\nnodes: 2\ndevices_per_node: 8\nusd_per_node_hour: 20\n")
    assert changed(Cluster.parse(str(path)), {"nodes": "6"}).usd_per_hour == pytest.approx(120)


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        (H100, "", "nothing is changed"),
        (H100, "memory", "is not KEY=VALUE"),
        (H100, "memory=+8GiB,memory=+9GiB", "names memory twice"),
        (H100, "memry=+8GiB", "'memry' can't be changed"),
        (H100, "memory=8", "number with its unit"),
        (H100, "memory=eight", "can't be read"),
        (H100, "memory=+1e9GiB", "can't be read"),
        (H100, "memory=x2GiB", "can't be read"),
        (H100, "memory=-76GiB", "4.6 GiB are its reserve"),
        (H100, "nodes=0", "whole number of at least 1"),
        (H100, "nodes=+2", "whole number of at least 1"),
        (H100, "nodes=20000", "100000 are the most"),
        (H100, "link=900", "has no link.. Its links are link.node, link.network"),
        (H100, "link.rack=900", "has no link.rack. Its links are link.node, link.network"),
        (H100, "link.node=900GiB", "can't be read"),
        (H100, "link.node=-900", "above 0 GB/s"),
        ("2x8xH100-SXM+2x8xA100-80GB", "nodes=8", "differ"),
        ("36x4xGB200", "nodes=20", "Use nodes=18 or 36"),
        ("local:4", "nodes=8", "one machine"),
    ],
)
def test_a_change_that_makes_no_sense_names_the_legal_ones(
    spec: str, text: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        changed(Cluster.parse(spec), parse_changes(text))
    assert message in str(caught.value)


def test_every_level_has_a_name() -> None:
    assert level_names(Cluster.parse("local:4")) == ("shared memory",)
    assert level_names(Cluster.parse("36x4xGB200")) == ("node", "NVLink domain", "network")
