"""The devices and links that a cluster is made of, read from the table `hardware.csv`.

Input: a device name as people write it ("H100-SXM", "a100-80gb"). Output: a `Device` and the
`Link`s of a usual machine with it. Peaks are dense (no sparsity) and per device.
"""

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ir.chip import chip_fields, peaks
from ir.errors import UsageError

GIB = 2**30

# What the row names of hardware.csv are called here; other rows keep their own name.
_SHORT_NAMES = {
    "V100-SXM2-16GB": "V100-16GB",
    "V100-SXM2-32GB": "V100-32GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A800-SXM4-80GB": "A800-80GB",
    "H100-SXM5-80GB": "H100-SXM",
    "H100-PCIe-80GB": "H100-PCIe",
    "H100-NVL-94GB": "H100-NVL",
    "H100-96GB-HBM2e-500W": "H100-96GB",
    "H200-SXM-141GB": "H200-SXM",
    "H200-NVL-141GB": "H200-NVL",
    "B200-SXM-180GB": "B200",
    "B300-SXM-270GB": "B300",
    "GB200 (per GPU)": "GB200",
    "GB300 (per GPU)": "GB300",
    "RTX 3090": "RTX-3090",
    "RTX 4090": "RTX-4090",
    "RTX 5090": "RTX-5090",
    "RTX A6000": "RTX-A6000",
}
_ALIASES = {
    "V100": "V100-SXM2-32GB",
    "A100": "A100-SXM4-80GB",
    "A100-SXM": "A100-SXM4-80GB",
    "A100-PCIe": "A100-PCIe-80GB",
    "A800": "A800-SXM4-80GB",
    "H100": "H100-SXM5-80GB",
    "H100-80GB": "H100-SXM5-80GB",
    "H100-SXM5": "H100-SXM5-80GB",
    "H200": "H200-SXM-141GB",
    "H200-141GB": "H200-SXM-141GB",
    "B200-SXM": "B200-SXM-180GB",
    "B300-SXM": "B300-SXM-270GB",
    "3090": "RTX 3090",
    "4090": "RTX 4090",
    "5090": "RTX 5090",
    "A6000": "RTX A6000",
}

# Sustained over nominal link rate. NCCL 2.30.7 src/graph/topo.h counts 20.6 of 25 GB/s per
# NVLink 4 link and 20 of 25 before, 40.1 of 50 on Blackwell; measured rings agree within 3 %.
# MI300X: 313 of 448 GB/s measured (stas00/ml-engineering, network/README.md).
_LINK_FRACTION = {"Hopper": 0.824, "Blackwell": 0.802, "CDNA2": 0.70, "CDNA3": 0.70}
_BRIDGE_SIZES = {  # NVLink joins only so many of these cards; larger nodes talk over PCIe
    "A100-PCIe-40GB": 2,
    "A100-PCIe-80GB": 2,
    "H100-PCIe-80GB": 2,
    "H100-NVL-94GB": 2,
    "H200-NVL-141GB": 4,
    "RTX 3090": 2,
}
_C2C_RATES = dict.fromkeys(("GB200 (per GPU)", "GB300 (per GPU)"), 450e9)  # per direction
# Seconds per ring step, NCCL 2.30.7 src/graph/tuning.cc (hop latency, Ring, Simple).
_NVLINK_LATENCY_S, _PCIE_LATENCY_S, _NETWORK_LATENCY_S = 3.4e-6, 5.7e-6, 14.0e-6


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as torch sees it.

    `peaks` maps a dtype name to dense FLOP/s; the fractions say how much of a nominal rate real
    kernels reach (`burst_fraction`: before the power limit bites); `reserve_bytes` is what
    context, libraries and fragmentation take. `kernel_launch_s` is the least that a kernel costs
    a host that launches them one by one, `kernel_fixed_s` what each costs the device when it was
    queued in time: start, fill and drain (tiny kernels in a CUDA graph take about 3 us).
    `power_pace`: clock under the power limit, relative to the part that the fractions are from.
    An SM is a CU on AMD; `sm_count` 0 means unknown, as on a CPU: only rates are used then.
    """

    name: str
    peaks: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matmul_fraction: float = 0.80
    attention_fraction: float = 0.40
    memory_fraction: float = 0.90
    kernel_launch_s: float = 5e-6
    reserve_bytes: int = 0
    arch: str = ""
    sm_count: int = 0
    clock_hz: float = 0.0
    l2_bytes: int = 0
    l2_bandwidth_bytes_per_s: float = 0.0
    shared_memory_per_sm_bytes: int = 0
    shared_memory_per_block_bytes: int = 0
    registers_per_sm: int = 0
    burst_fraction: float = 0.80
    low_precision_fraction: float = 0.80
    kernel_fixed_s: float = 3e-6
    power_pace: float = 1.0

    @property
    def sustained_bandwidth_bytes_per_s(self) -> float:
        """Rate at which large kernels read and write memory."""
        return self.memory_bandwidth_bytes_per_s * self.memory_fraction

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill: the memory less the reserve."""
        return self.memory_bytes - self.reserve_bytes

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense FLOP/s for a dtype name ("bfloat16"); unlisted ones compute as float32."""
        peaks = dict(self.peaks)
        return peaks.get(dtype, peaks["float32"])

    def has_units(self, dtype: str) -> bool:
        """Whether products of that dtype run at a rate of their own; else as those of float32."""
        rates = dict(self.peaks)
        if dtype in ("float32", "float64") or not self.sm_count:
            return dtype in rates
        return rates.get(dtype, 0.0) > rates["float32"]


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the members of one level of a cluster.

    `bandwidth_bytes_per_s`: nominal, per direction and device; `achievable`: the part of it that
    large messages reach; `latency_s`: of one step of a ring. `point_to_point`: the bandwidth is
    the sum over one link to each other member, so a pair sees only its share (AMD's xGMI).
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    achievable: float = 1.0
    point_to_point: bool = False

    @property
    def sustained_bytes_per_s(self) -> float:
        """Rate of a large message, per direction and device."""
        return self.bandwidth_bytes_per_s * self.achievable


def find_device(name: str) -> Device:
    """The device of that name or alias, in any case; `UsageError` with the nearest names if none.

    >>> find_device("h100").name
    'H100-SXM'
    """
    return _device(_row(name))


def inner_link(name: str, members: int) -> Link:
    """What joins `members` devices of that name within a node: NVLink, xGMI or PCIe."""
    row = _row(name)
    fraction = _LINK_FRACTION.get(row["arch"], 0.80)
    bridged = members <= _BRIDGE_SIZES.get(row["gpu"], members)
    if row["link_gbs_per_dir"] and bridged:
        is_xgmi = row["arch"].startswith("CDNA")
        rate = float(row["link_gbs_per_dir"]) * 1e9
        # SXM2 boards have no switch: links to single neighbours (`nvidia-smi topo -m`: NV1, NV2).
        paired = is_xgmi or "SXM2" in row["gpu"]
        return Link("xGMI" if is_xgmi else "NVLink", rate, _NVLINK_LATENCY_S, fraction, paired)
    return Link("PCIe", pcie_bytes_per_s(name), _PCIE_LATENCY_S, 0.80)


def network_link(name: str) -> Link:
    """The network of a usual machine with that device: one NIC per device.

    400 Gb/s from Hopper and CDNA3 on (800 Gb/s for B300 and GB300), 200 Gb/s for A100, 100 Gb/s
    for others; 48.5 of 50 GB/s is the ceiling of a 400 Gb/s NIC (NVIDIA/nccl-tests issue 267).
    """
    row = _row(name)
    rates = {"Hopper": 50e9, "Blackwell": 50e9, "CDNA3": 50e9, "Ampere": 25e9}
    rate = 100e9 if "B300" in row["gpu"] else rates.get(row["arch"], 12.5e9)
    return Link("network", rate, _NETWORK_LATENCY_S, 0.97)


def host_link_bytes_per_s(name: str) -> float:
    """Nominal rate between a device and its host: PCIe, or NVLink-C2C of a Grace CPU."""
    return _C2C_RATES.get(_row(name)["gpu"], pcie_bytes_per_s(name))


def pcie_bytes_per_s(name: str) -> float:
    """Nominal rate of a device's 16 lanes of PCIe, per direction."""
    return float(_row(name)["pcie_gbs_per_dir"]) * 1e9


def _device(row: dict[str, str]) -> Device:
    # torch shows each die of a MI250X as a device of its own, with half of the table's numbers.
    share = 0.5 if row["gpu"] == "MI250X" else 1.0
    memory_bytes = int(float(row["mem_gb"]) * share * GIB)
    return Device(
        name=_SHORT_NAMES.get(row["gpu"], row["gpu"]),
        peaks=peaks(row, share),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=float(row["mem_gbs"]) * share * 1e9,
        # 1.4 GiB: context, NCCL channels, library workspaces; 4 %: fragmentation and what the
        # driver hides (an "80 GB" H100 shows 79.6 GiB).
        reserve_bytes=int(1.4 * GIB + 0.04 * memory_bytes),
        **chip_fields(row, share),
    )


def _row(name: str) -> dict[str, str]:
    rows, names = _table()
    key = _normal(name)
    if key in names:
        return rows[names[key]]
    near = difflib.get_close_matches(key, names, n=8, cutoff=0.4)
    shown = dict.fromkeys(_SHORT_NAMES.get(names[k], names[k]) for k in near or names)
    known = shown if near else sorted(shown)
    hint = "Nearest" if near else "Known"
    raise UsageError(f"no device is called {name!r}. {hint}: {', '.join(known)}.")


@cache
def _table() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The rows of hardware.csv by their name, and every spelling's row name."""
    text = resources.files("ir").joinpath("hardware.csv").read_text(encoding="utf-8")
    rows = {row["gpu"]: row for row in csv.DictReader(text.splitlines())}
    spellings = {name: name for name in rows}
    spellings |= {short: name for name, short in _SHORT_NAMES.items()} | _ALIASES
    return rows, {_normal(spelling): name for spelling, name in spellings.items()}


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
