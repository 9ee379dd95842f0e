"""`nvidia-smi topo -m` of real kinds of machines: which levels it stands for."""

from pathlib import Path

import pytest

from ir.cluster import Cluster, Mesh

TABLES = Path(__file__).parent / "topologies"


def pasted(name: str, device: str, nodes: int = 2) -> Cluster:
    return Cluster.from_nvidia_smi((TABLES / f"{name}.txt").read_text(), device, nodes)


@pytest.mark.parametrize(
    ("name", "device", "levels"),
    [
        # sizes, links, GB/s per port, devices per port, innermost first
        ("dgx-a100", "A100-80GB", [(8, "NVLink", 300, 1), (2, "network", 25, 1)]),
        ("hgx-h100", "H100-SXM", [(8, "NVLink", 450, 1), (2, "network", 50, 1)]),
        ("dgx-2-v100", "V100-32GB", [(16, "NVLink", 150, 1), (2, "network", 12.5, 2)]),
        ("dgx-1-v100", "V100-32GB", [(8, "NVLink", 150, 1), (2, "network", 12.5, 2)]),
        ("pcie-box-8xl40s", "L40S",
         [(4, "PCIe", 31.5, 1), (2, "PCIe", 25, 4), (2, "network", 12.5, 4)]),
        ("server-4xa100-pcie", "A100-PCIe-80GB",
         [(2, "NVLink", 300, 1), (2, "PCIe", 25, 2), (2, "network", 25, 4)]),
        ("workstation-4x3090", "RTX-3090",
         [(2, "NVLink", 56.25, 1), (2, "PCIe", 31.5, 1), (2, "network", 12.5, 1)]),
        ("desktop-2x5090", "RTX-5090", [(2, "PCIe", 63, 1), (2, "network", 12.5, 1)]),
    ],
)  # fmt: skip
def test_a_table_stands_for_levels(name, device, levels) -> None:
    cluster = pasted(name, device)
    found = [
        (x.size, x.link.name, x.link.bandwidth_bytes_per_s / 1e9, x.devices_per_port)
        for x in cluster.levels
    ]
    assert found == levels
    inner = [level.name for level in cluster.levels[:-1]]
    assert inner[-1] == "node" and inner.count("node") == 1
    assert cluster.devices_per_node * 2 == cluster.n_devices


def test_a_machine_with_switches_is_as_its_short_form() -> None:
    assert pasted("dgx-a100", "A100-80GB", 4) == Cluster.parse("4x8xA100-80GB")
    assert pasted("hgx-h100", "H100", 1) == Cluster.parse("8xH100-SXM")


def test_a_cube_mesh_has_links_to_single_neighbours() -> None:
    (mesh,) = pasted("dgx-1-v100", "V100-32GB", 1).levels
    assert mesh.link.point_to_point


def test_devices_of_a_socket_share_the_way_to_the_other() -> None:
    box = pasted("pcie-box-8xl40s", "L40S", 1)
    near, across = (Mesh(1, 8 // n, n).axis_link(box, "tensor") for n in (4, 8))
    assert near.bandwidth_bytes_per_s == pytest.approx(31.5e9 * 0.8)
    assert across.bandwidth_bytes_per_s == pytest.approx(20e9)


def test_colours_and_windows_line_ends_do_not_matter() -> None:
    text = (TABLES / "hgx-h100.txt").read_text()
    coloured = text.replace("GPU0\tGPU1", "\x1b[4mGPU0\tGPU1", 1).replace("\n", "\x1b[0m\r\n")
    assert Cluster.from_nvidia_smi(coloured, "H100") == Cluster.from_nvidia_smi(text, "H100")


def test_a_file_names_the_table(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    table = (TABLES / "dgx-a100.txt").read_text()
    (tmp_path / "topo.txt").write_text(table)
    path.write_text("device: A100-80GB\nnodes: 3\ntopology: topo.txt\nusd_per_node_hour: 30\n")
    cluster = Cluster.parse(str(path))
    assert cluster.levels == Cluster.parse("3x8xA100-80GB").levels
    assert cluster.usd_per_hour == 90
