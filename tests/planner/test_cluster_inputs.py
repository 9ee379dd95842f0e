"""Clusters from named levels, from what tools print, from the environment; MIG slices."""

import json
import sys
from types import SimpleNamespace

import pytest

from ir.cluster import GIB, Cluster
from ir.errors import UsageError


def from_yaml(tmp_path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return Cluster.parse(str(path))


NAMED = """
device: H100-SXM
reserve_GiB: 6
levels:
  - {name: node, size: 8}
  - {name: rack, size: 4, devices_per_nic: 2, latency_us: 9}
  - {name: pod, size: 2, bandwidth_GBps: [50, 25], oversubscription: 3}
"""


def test_named_levels_are_read_innermost_first(tmp_path) -> None:
    cluster = from_yaml(tmp_path, NAMED)
    node, rack, pod = cluster.levels
    assert (str(cluster), cluster.near_devices) == ("8x8 H100-SXM", 8)
    assert (node.link.name, node.nvls) == ("NVLink", 0.85)
    assert (rack.devices_per_port, rack.link.latency_s) == (2, pytest.approx(9e-6))
    assert rack.device_bytes_per_s == pytest.approx(50e9 * 0.97 / 2)
    assert pod.port_rates == (50e9, 25e9)
    assert pod.device_bytes_per_s == pytest.approx(25e9 / 2 / 3)
    assert cluster.device.usable_bytes == 74 * GIB
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_an_nvlink_domain_may_hold_nodes_and_a_node_may_hold_bridges(tmp_path) -> None:
    rack = "device: GB200\nlevels: [{name: node, size: 4}, {name: NVLink domain, size: 18}]\n"
    cluster = from_yaml(tmp_path, rack)
    assert cluster == Cluster.parse("18x4xGB200")
    assert (cluster.devices_per_node, cluster.near_devices) == (4, 72)
    bridged = "device: H100-NVL\nlevels: [{name: NVLink domain, size: 2}, {name: node, size: 4}]\n"
    cluster = from_yaml(tmp_path, bridged)
    assert [level.link.name for level in cluster.levels] == ["NVLink", "PCIe"]
    assert cluster.devices_per_node == 8


def test_a_network_may_be_named_by_its_kind(tmp_path) -> None:
    text = "device: B200\nlevels: [{size: 8}, {size: 4, link: EFA}]\n"
    infiniband, efa = Cluster.parse("4x8xB200"), from_yaml(tmp_path, text)
    assert efa.levels[1].link.latency_s > 5 * infiniband.levels[1].link.latency_s


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("[]", "must list the levels"),
        ("[8]", "level 1 must hold keys"),
        ("[{size: 8, speed: 3}]", "level 1: unknown key 'speed'"),
        ("[{name: node}]", "level 1: `size` is missing"),
        ("[{size: 8.5}]", "`size` is 8.5; device counts are whole numbers"),
        ("[{size: 8}, {size: 3, bandwidth_GBps: [50, 25]}]", "2 bandwidths for 3 units"),
        ("[{size: 8, link: carrier pigeon}]", "'carrier pigeon'; it is one of NVLink, "),
        ("[{size: 8, link: xGMI}]", "level 1: `link` is xGMI, and H100 has none. It has NVLink"),
        ("[{size: 8, oversubscription: 0.5}]", "`oversubscription` is 0.5; it is 1 where"),
        ("[{size: 8, size: 4}]", "`size` stands in line 2 and in line 2"),
        ("[{size: 8}]\ndevice: A100", "`device` stands in line 1 and in line 3. Keep one"),
        ("[{size: 8}]\nmemory_GiB: 96", "`memory_GiB` is 96, and a H100-SXM has 80. Name the"),
        ("[{size: }]", "level 1: `size` must be a positive number, not None"),
        ("[{name: node, size: 2}, {name: node, size: 2}]", "two levels are named 'node'"),
        ("[{size: 8}]\nprice: 2024-13-45", "is not YAML: month must be in"),
        ("[{size: 8}, {size: 2, devices_per_nic: 9}]", "is 9, and 8 devices are all that could"),
        ("[{size: 8}]\nnodes: 2", "`nodes` says what `levels` says"),
        ("[{size: 8}]\nreserve_GiB: 90", "leaves nothing of 80.0 GiB"),
    ],
)
def test_levels_with_a_mistake_are_refused(tmp_path, levels: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_yaml(tmp_path, f"device: H100\nlevels: {levels}\n")


def test_a_table_whose_links_lead_one_way_is_refused(tmp_path) -> None:
    rows = "     GPU0 GPU1\nGPU0  X   NV12\nGPU1 SYS   X\n"
    (tmp_path / "topo.txt").write_text(rows)
    with pytest.raises(UsageError, match="topo.txt: .*GPU0 has NV12 to GPU1, and GPU1 has SYS to"):
        from_yaml(tmp_path, "device: A100-80GB\ntopology: topo.txt\n")


@pytest.mark.parametrize("spec", ["local:-1", "local:", "local:four", "local"])
def test_a_wrong_count_of_processes_is_answered_with_the_form(spec: str) -> None:
    with pytest.raises(UsageError, match="local:N is N processes here, as in local:4"):
        Cluster.parse(spec)


@pytest.mark.parametrize(
    ("spec", "gib", "share"),
    [
        ("H100-SXM:3g.40gb", 40, 60 / 132),
        ("a100-40gb:1g.5gb", 5, 14 / 108),
        ("H100:7g.80gb", 80, 1),
        ("8xH200:1g.18gb", 17.625, 16 / 132),
        ("H100:1g.20gb", 20, 26 / 132),
        ("B200:2g.45gb", 45, 42 / 148),
    ],
)
def test_a_mig_slice_has_its_part_of_a_device(spec: str, gib: float, share: float) -> None:
    part = Cluster.parse(spec)
    full = Cluster.parse(spec.partition(":")[0])
    flops = full.device.peak_flops_per_s("bfloat16")
    assert part.device.memory_bytes == gib * GIB
    assert part.device.peak_flops_per_s("bfloat16") == pytest.approx(flops * share)
    assert part.levels[0].link.name == "PCIe"
    assert Cluster.parse(str(part).replace(" ", "x")) == part


NO_SLICES = (
    "H100:3g H100:8g.80gb H100:3g.400gb H100: H100:5g.50gb H100:3g.80gb V100:1g.4gb "
    "RTX-4090:1g.3gb MI300X:1g.24gb A100-40GB:1g.6gb"
)


@pytest.mark.parametrize("spec", NO_SLICES.split())
def test_a_slice_that_can_not_be_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="is no MIG profile. A "):
        Cluster.parse(spec)


def test_slices_of_one_card_share_its_port_to_the_host() -> None:
    whole, parts = Cluster.parse("2xT4").levels[0], Cluster.parse("7xH100:1g.10gb").levels[0]
    assert (whole.devices_per_port, parts.devices_per_port) == (1, 7)


def matrix(cells: list[str], nics: int = 0) -> str:
    """A `nvidia-smi topo -m` output with these rows of GPU columns."""
    gpus = len(cells)
    header = [f"GPU{n}" for n in range(gpus)] + [f"NIC{n}" for n in range(nics)]
    lines = ["\t".join(["", *header, "CPU Affinity", "NUMA Affinity"])]
    lines += [
        "\t".join([f"GPU{n}", *c.split(), *["PIX"] * nics, "0-47"]) for n, c in enumerate(cells)
    ]
    lines += ["\t".join([f"NIC{n}", *["PIX"] * (gpus + n), "X"]) for n in range(nics)]
    return "\n".join([*lines, "", "Legend:", "  X    = Self"])


SWITCHED = matrix([" ".join("X" if a == b else "NV18" for b in range(8)) for a in range(8)], nics=4)
PAIRS = matrix(["X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X"])
MESH = matrix(["X NV4 NV4 NV4", "NV4 X NV4 NV4", "NV4 NV4 X NV4", "NV4 NV4 NV4 X"])


def test_a_switched_node_is_one_level() -> None:
    cluster = Cluster.from_nvidia_smi(SWITCHED, "H100-SXM")
    assert cluster == Cluster.parse("8xH100")


def test_nics_are_shared_by_the_devices_of_a_node() -> None:
    cluster = Cluster.from_nvidia_smi(SWITCHED, "H100-SXM", nodes=2)
    assert (str(cluster), cluster.levels[1].devices_per_port) == ("2x8 H100-SXM", 2)


def test_bridged_pairs_meet_over_pcie() -> None:
    cluster = Cluster.from_nvidia_smi(PAIRS, "H100-NVL")
    assert [(level.size, level.link.name) for level in cluster.levels] == [
        (2, "NVLink"),
        (2, "PCIe"),
    ]
    assert cluster.devices_per_node == 4


def test_a_mesh_of_nvlinks_has_its_links_one_by_one() -> None:
    (level,) = Cluster.from_nvidia_smi(MESH, "A100").levels
    assert level.link.point_to_point
    assert level.link.bandwidth_bytes_per_s == pytest.approx(300e9)


def test_devices_without_nvlink_meet_over_pcie() -> None:
    (level,) = Cluster.from_nvidia_smi(matrix(["X PHB", "PHB X"]), "L40S").levels
    assert (level.size, level.link.name) == (2, "PCIe")


@pytest.mark.parametrize(
    ("text", "device", "message"),
    [
        ("hello", "H100", "is not the output of"),
        ("", "H100", "is not the output of"),
        (matrix(["X ZZ", "ZZ X"]), "A100", "'ZZ' is no known kind"),
        (matrix(["X SYS NV4 SYS", "SYS X SYS NV4", "NV4 SYS X SYS", "SYS NV4 SYS X"]), "A100",
         "CUDA_VISIBLE_DEVICES=0,2,1,3"),
        (matrix(["X NV4 SYS", "NV4 X SYS", "SYS SYS X"]), "A100", "unlike size, 2, 1 dev"),
        (matrix(["X NV4", "NV4 X"]), "L40S", "has no NVLink"),
        ("\n".join(PAIRS.splitlines()[:3]), "H100-NVL", "4 GPUs, 2 rows"),
    ],
)  # fmt: skip
def test_a_matrix_that_can_not_be_read_is_refused(text: str, device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster.from_nvidia_smi(text, device)


def gpu_xml(dev: int, links: str) -> str:
    return (
        f'<pci busid="0000:{dev:02x}:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">'
        f'<gpu dev="{dev}" sm="80" rank="{dev}" gdr="1">{links}</gpu></pci>'
    )


def nccl_xml(links: list[str], nets: int = 0) -> str:
    gpus = "".join(gpu_xml(dev, text) for dev, text in enumerate(links))
    ports = "".join(
        f'<nic><net name="mlx5_{n}" dev="{n}" speed="200000" port="1"/></nic>' for n in range(nets)
    )
    nics = f'<pci busid="0000:f0:00.0" class="0x020700">{ports}</pci>' if nets else ""
    return f'<system version="1"><cpu numaid="0" arch="x86_64">{gpus}{nics}</cpu></system>'


TO_SWITCHES = '<nvlink target="0000:c4:00.0" count="6" tclass="0x068000"/>' * 2


def test_nccl_xml_of_a_switched_node() -> None:
    cluster = Cluster.from_nccl_xml(nccl_xml([TO_SWITCHES] * 8, nets=4), nodes=2)
    node, outer = cluster.levels
    assert str(cluster) == "2x8 A100-80GB"
    assert (node.link.name, node.link.bandwidth_bytes_per_s) == ("NVLink", 300e9)
    assert not node.link.point_to_point
    assert (outer.link.bandwidth_bytes_per_s, outer.devices_per_port) == (25e9, 2)


def test_nccl_xml_of_a_bridged_pair() -> None:
    links = [f'<nvlink target="0000:0{1 - n}:00.0" count="12" tclass="0x030200"/>' for n in (0, 1)]
    (level,) = Cluster.from_nccl_xml(nccl_xml(links), device="A100-PCIe-80GB").levels
    assert (level.size, level.link.bandwidth_bytes_per_s) == (2, 300e9)


@pytest.mark.parametrize("text", ["<system", "<system></system>", "<graphs/>"])
def test_other_xml_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="XML"):
        Cluster.from_nccl_xml(text)


def fake_nvml(names: list[str]) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetName=lambda n: names[n],
    )


@pytest.mark.parametrize(
    ("names", "environment", "text"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, {}, "1x8 H100-SXM"),
        (["NVIDIA H200"] * 8, {"SLURM_JOB_NUM_NODES": "4"}, "4x8 H200-SXM"),
        (["NVIDIA A100-SXM4-80GB"] * 8, {"SLURM_GPUS_ON_NODE": "4"}, "1x4 A100-80GB"),
        ([b"NVIDIA GeForce RTX 4090"], {}, "1x1 RTX-4090"),
        (["Tesla V100-SXM2-32GB"] * 4, {}, "1x4 V100-32GB"),
        ([], {"SLURM_NTASKS_PER_NODE": "3(x2)"}, "1x3 CPU"),
        (["NVIDIA A100 80GB PCIe"] * 4, {"CUDA_VISIBLE_DEVICES": "2,3"}, "1x2 A100-PCIe-80GB"),
        (["NVIDIA L4", "NVIDIA L40S"], {"CUDA_VISIBLE_DEVICES": "1"}, "1x1 L40S"),
        (["NVIDIA L4"] * 4, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1a2b"}, "1x2 L4"),
        (["NVIDIA L4"], {"CUDA_VISIBLE_DEVICES": "", "SLURM_NTASKS_PER_NODE": "3"}, "1x3 CPU"),
    ],
)
def test_the_cluster_around_a_process_is_found(monkeypatch, names, environment, text) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(names))
    assert str(Cluster.detect(environment)) == text


def test_a_card_in_mig_mode_is_its_slices(monkeypatch) -> None:
    nvml = fake_nvml(["NVIDIA H100 80GB HBM3"])
    slices = {("slice", n): "NVIDIA H100 80GB HBM3 MIG 3g.40gb" for n in (0, 1)}
    nvml.nvmlDeviceGetMigMode = lambda handle: (1, 1)
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 7
    nvml.nvmlDeviceGetName = lambda handle: slices[handle]

    def slice_of(handle, n):
        if ("slice", n) not in slices:
            raise OSError
        return "slice", n

    nvml.nvmlDeviceGetMigDeviceHandleByIndex = slice_of
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert str(Cluster.detect({})) == "1x2 H100-SXM:3g.40gb"


def test_without_nvml_the_cpu_is_found(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Cluster.detect({}).device.name == "CPU"


def test_what_can_not_be_detected_is_said(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UsageError, match="2 nodes, but NVML shows no device"):
        Cluster.detect({"SLURM_NNODES": "2"})
    with pytest.raises(UsageError, match="SLURM_NNODES='many'"):
        Cluster.detect({"SLURM_NNODES": "many"})
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA L4", "NVIDIA L40S"]))
    with pytest.raises(UsageError, match="different devices: L4, L40S"):
        Cluster.detect({})
