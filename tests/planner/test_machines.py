"""Machines by name, what a device can use of its host, prices."""

import csv
import json
from importlib import resources

import pytest

from ir.cluster import GIB, Cluster
from ir.device import find_device
from ir.errors import UsageError
from ir.machines import find_machine, machine_names


@pytest.mark.parametrize(
    ("spec", "text", "nic"),
    [
        ("dgx-h100", "1x8 H100-SXM", None),
        ("4xDGX-H100", "4x8 H100-SXM", (50e9, 1)),
        ("2 x p4d.24xlarge", "2x8 A100-40GB", (12.5e9, 2)),
        ("2x8xDGX-A100", "2x8 A100-80GB", (25e9, 1)),
        ("gb200-nvl72", "18x4 GB200", None),
        ("2xGB200-NVL72", "36x4 GB200", (50e9, 1)),
        ("2xnd96isr_h100_v5", "2x8 H100-SXM", (50e9, 1)),
    ],
)
def test_a_machine_is_named_in_place_of_a_device(spec, text, nic) -> None:
    cluster = Cluster.parse(spec)
    assert str(cluster) == text
    found = [x for x in cluster.levels if x.link.name == "network"]
    ports = [(x.link.bandwidth_bytes_per_s, x.devices_per_port) for x in found]
    assert ports == ([nic] if nic else [])
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_every_machine_holds_a_known_device_and_states_its_source() -> None:
    text = resources.files("ir").joinpath("machines.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert all(row["source"] and row["checked"] for row in rows)
    for name in machine_names():
        machine = find_machine(name)
        assert machine is not None and find_device(machine.device).name == machine.device
        assert str(Cluster.parse(name)) == f"{machine.nodes}x{machine.devices} {machine.device}"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4x4xDGX-H100", "a DGX-H100 has 8 devices, not 4"),
        ("dgx-h10", "did you mean the machine dgx-h100"),
        ("32xH100", "one node with 32 H100-SXM is not built .* 4x8xH100"),
        ("8xH100+", "can't be read"),
        ("20000x8xH100", "160000 devices; 100000 are the most"),
        ("nowhere.xml", "nowhere.xml can't be read"),
    ],
)
def test_a_mistake_in_a_spec_is_answered(spec, message) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster.parse(spec)


def test_a_device_uses_memory_from_registers_to_nvme() -> None:
    levels = {level.name: level for level in Cluster.parse("8xH100").memory_levels}
    assert [*levels] == ["registers", "shared memory", "L2", "device", "host", "NVMe"]
    assert levels["registers"].size_bytes == 132 * 65536 * 4
    assert levels["device"].size_bytes == 80 * GIB
    assert levels["host"].bytes_per_s == 63e9  # PCIe 5, not the host's memory, is the limit
    rates = [level.bytes_per_s for level in levels.values()][1:]
    assert rates == sorted(rates, reverse=True)


def test_a_grace_cpu_is_nearer_than_pcie_and_a_process_has_only_its_memory() -> None:
    assert Cluster.parse("GB200").host.link_bytes_per_s == 450e9
    assert [level.name for level in Cluster.local(2).memory_levels] == ["device"]


def from_yaml(tmp_path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return Cluster.parse(str(path))


def test_a_file_states_the_host_and_the_price(tmp_path) -> None:
    text = (
        "device: H100\nnodes: 2\ndevices_per_node: 8\nusd_per_device_hour: 2.5\n"
        "host_memory_GiB: 100\nnvme_GB: 3840\nnvme_GBps: 6\n"
    )
    cluster = from_yaml(tmp_path, text)
    assert cluster.usd_per_hour == 40
    assert (cluster.host.memory_bytes, cluster.host.nvme_bytes) == (100 * GIB, 3840 * 10**9)
    assert cluster.host.link_bytes_per_s == 63e9
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert hash(cluster) != hash(Cluster.parse("2x8xH100"))


def test_a_file_names_a_machine_and_overrides_it(tmp_path) -> None:
    text = "machine: p5.48xlarge\nnodes: 2\ninter_bandwidth_GBps: 30\nusd_per_node_hour: 55\n"
    cluster = from_yaml(tmp_path, text)
    assert (str(cluster), cluster.usd_per_hour) == ("2x8 H100-SXM", 110)
    assert cluster.levels[1].device_bytes_per_s == 30e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: H100\nusd_per_device_hour: -1", "must be a positive number"),
        ("device: H100\nusd_per_device_hour: free", "must be a positive number, not 'free'"),
        ("device: H100\nusd_per_device_hour: 1\nusd_per_node_hour: 8", "per node, not both"),
        ("device: H100\nhost_memory_GiB: 0", "must be a positive number"),
        ("device: H100\nmachine: dgx-h100", "`device` says what `machine` says"),
        ("machine: dgx-h10", "no machine is called 'dgx-h10'. Known: DGX-1"),
        ("device: H100\ntopology: nowhere.txt", "nowhere.txt can't be read"),
        ("device: H100\ntopology: t.txt\ndevices_per_node: 8", "says what `topology` says"),
        ("device: H100\ndevices_per_nod: 8", "Did you mean devices_per_node?"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, text, message) -> None:
    with pytest.raises(UsageError, match=message):
        from_yaml(tmp_path, text)
