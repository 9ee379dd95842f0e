"""What one chip can hold and sustain, from its row of `hardware.csv`.

Input: a row of the table. Output: the fields of `ir.device.Device` that kernels' time depends on:
the units and their clock, the cache, the limits of a tile, and the parts of a peak that real
kernels reach.
"""

import re
from typing import TypedDict

KIB, MIB = 2**10, 2**20

# Best measured bf16 GEMM over the dense peak, by device or else by architecture (published sweeps
# of stas00/ml-engineering, compute/accelerator; measurements/gemm.csv). Others: as A100.
_MATMUL_FRACTION = {
    "Hopper": 0.80,
    "Blackwell": 0.78,
    "CDNA2": 0.51,
    "CDNA3": 0.51,
    "A100-PCIe-40GB": 0.81,
    "A100-PCIe-80GB": 0.81,
    "GB200 (per GPU)": 0.73,
    "GB300 (per GPU)": 0.73,
    "MI325X": 0.60,
}
# The same for 8- and 4-bit products: 1402 to 1453 of 1979 on H100 and H200, 3432 of 4500 on B200,
# 3616 of 5000 on GB200; 1857 of 2615 on MI300X (OpenXLA, matmul_interpolator_data, 4 x 4096^3).
_LOW_PRECISION_FRACTION = {
    "Hopper": 0.72,
    "Blackwell": 0.76,
    "CDNA3": 0.71,
    "GB200 (per GPU)": 0.72,
    "GB300 (per GPU)": 0.72,
}
# Large copies over the nominal HBM rate: A100 0.90, Hopper 0.90, MI300X 0.80. Others: 0.87.
_MEMORY_FRACTION = {"Hopper": 0.90, "Ampere": 0.90, "CDNA2": 0.80, "CDNA3": 0.80}
# Rate of the main loop before the power limit bites: Hopper's peak is quoted at 1830 MHz and short
# products run at up to 1980. Fitted with the constants of `planner.tiles`; others: as sustained.
_BURST_FRACTION = {"Hopper": 0.98, "Blackwell": 0.80}
# FlashAttention-2 reaches 0.50-0.73 of the peak on A100 (arXiv 2307.08691) and 0.35 on H100
# (arXiv 2407.08608); Blackwell and CDNA are taken as H100, others as A100.
_ATTENTION_FRACTION = {"Hopper": 0.35, "Blackwell": 0.35, "CDNA2": 0.35, "CDNA3": 0.35}
# Watts of the power limit per dense bf16 TFLOP/s of the part that an architecture's constants were
# measured on: H100 SXM (700 of 989), GB200 (1200 of 2500).
_WATTS_PER_TFLOPS = {"Hopper": 700 / 989.4, "Blackwell": 1200 / 2500}
# Bytes that one SM takes from L2 per clock, all at once. A100: 5120 over 108 SMs (NVIDIA A100
# whitepaper). V100: 2048 over 80 (arXiv 1804.06826). Hopper, Blackwell, CDNA3: fitted with the
# constants of `planner.tiles`. Ada, Turing: about 5 TB/s on RTX 4090 (recalled, not re-read).
_L2_BYTES_PER_CLOCK = {
    "Volta": 26,
    "Turing": 20,
    "Ada": 20,
    "Hopper": 51,
    "Blackwell": 75,
    "CDNA2": 20,
    "CDNA3": 20,
}
# Cells that the table leaves empty or inexact. GA102 is one chip; GB200's peak of 2568 TFLOP/s in
# NVIDIA/cudnn-frontend's benchmarks is 152 SMs x 8192 x 2.062 GHz; AMD's last cache is the Infinity
# Cache of 256 MB.
_AMENDED = {
    "RTX A6000": {
        "boost_mhz": "1800",
        "l2_mb": "6",
        "smem_per_sm_kb": "100",
        "smem_max_per_block_kb": "99",
        "regs32_per_sm": "65536",
    },
    "GB200 (per GPU)": {"sm_or_cu_count": "152"},
    "MI300X": {"l2_mb": "256"},
    "MI325X": {"l2_mb": "256"},
}


class ChipFields(TypedDict):
    """Keyword arguments of `Device`."""

    arch: str
    sm_count: int
    clock_hz: float
    l2_bytes: int
    l2_bandwidth_bytes_per_s: float
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    registers_per_sm: int
    matmul_fraction: float
    burst_fraction: float
    low_precision_fraction: float
    attention_fraction: float
    memory_fraction: float
    power_pace: float


def chip_fields(row: dict[str, str], share: float) -> ChipFields:
    """The fields for a device that is `share` of the row's card (a die of a MI250X is half)."""
    row = row | _AMENDED.get(row["gpu"], {})
    arch = row["arch"].split()[0]
    # GB202 has Blackwell's name but neither its tensor memory nor its pairs of SMs.
    arch = "Ada" if row["arch"] == "Blackwell GB202" else arch
    sm_count = int(_number(row["sm_or_cu_count"]) * share)
    clock_hz = _number(row["boost_mhz"]) * 1e6
    fraction = _measured(_MATMUL_FRACTION, row["gpu"], arch, 0.87)
    return ChipFields(
        arch=arch,
        sm_count=sm_count,
        clock_hz=clock_hz,
        l2_bytes=int(_number(row["l2_mb"]) * share * MIB),
        l2_bandwidth_bytes_per_s=_L2_BYTES_PER_CLOCK.get(arch, 47) * sm_count * clock_hz,
        shared_memory_per_sm_bytes=int(_number(row["smem_per_sm_kb"]) * KIB),
        shared_memory_per_block_bytes=int(_number(row["smem_max_per_block_kb"]) * KIB),
        registers_per_sm=int(_number(row["regs32_per_sm"])),
        matmul_fraction=fraction,
        burst_fraction=_BURST_FRACTION.get(arch, fraction),
        low_precision_fraction=_measured(_LOW_PRECISION_FRACTION, row["gpu"], arch, fraction),
        attention_fraction=_ATTENTION_FRACTION.get(arch, 0.60),
        memory_fraction=_MEMORY_FRACTION.get(arch, 0.87),
        power_pace=_power_pace(row, arch),
    )


def _power_pace(row: dict[str, str], arch: str) -> float:
    """Clock that the power limit sustains, relative to the architecture's measured part.

    Dynamic power goes with f V^2 and V with f, so the clock with the cube root of the watts that
    are there per unit.
    """
    watts, peak = _number(row["tdp_w"]), _number(row["bf16_tflops"])
    if arch not in _WATTS_PER_TFLOPS or not watts or not peak:
        return 1.0
    return float((watts / peak / _WATTS_PER_TFLOPS[arch]) ** (1 / 3))


def peaks(row: dict[str, str], share: float) -> tuple[tuple[str, float], ...]:
    """Dense FLOP/s by dtype name, of `share` of the card; a dtype that it lacks is absent.

    float32 is the vector rate (torch's default, TF32 is off), tf32 what it is with TF32 on; where
    the table lacks float32, a quarter of fp16 (true of GA102). bfloat16 runs as float32 where the
    table lacks it. float64 is half of float32 on the data-centre parts and 1/64 on the others;
    B300 has 1.2 TFLOP/s (its data sheet). Block-scaled mxfp8 and nvfp4 need Blackwell.
    """
    fp16 = float(row["fp16_tflops"])
    fp32 = float(row["fp32_tflops"] or fp16 / 4)
    bf16 = float(row["bf16_tflops"] or fp32)
    is_data_centre = row["arch"] in ("Volta", "Ampere", "Hopper", "Blackwell", "CDNA2", "CDNA3")
    fp64 = 1.2 if "B300" in row["gpu"] else fp32 / (2 if is_data_centre else 64)
    rates = {"bfloat16": bf16, "float16": fp16, "float32": fp32, "float64": fp64}
    if row["tf32_tflops"]:
        rates["tf32"] = float(row["tf32_tflops"])
    if row["fp8_tflops"]:
        rates |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), float(row["fp8_tflops"]))
    if row["fp4_tflops"]:
        rates |= {"mxfp8": float(row["fp8_tflops"]), "nvfp4": float(row["fp4_tflops"])}
    return tuple((dtype, rate * share * 1e12) for dtype, rate in rates.items())


def _measured(table: dict[str, float], gpu: str, arch: str, default: float) -> float:
    """What was measured on that device, or else on its architecture."""
    return table.get(gpu, table.get(arch, default))


def _number(cell: str) -> float:
    """The first number of a cell such as "32 (8x4) + 256 Infinity Cache"; 0 if it is empty."""
    match = re.match(r"[\d.]+", cell)
    return float(match[0]) if match else 0.0
