"""The tiles that a matrix product can be cut into on a device, and what each costs.

Input: a `Device`, the bytes of an element. Output: the legal `Tile`s, and the seconds of a grid
of them. The least of these over tiles and splits of k is a kernel library's choice (`kernels`).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ir.device import Device

# Rows and columns of the output that one SM (a CU on AMD) works on at a time; libraries and tuned
# Triton kernels choose among these.
_SHAPES = (
    (256, 256),
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
)
_SPLITS = (1, 2, 3, 4, 6, 8, 16)  # of k, over several SMs
_K_STEP_BYTES = 128  # of a row of an operand per step of the main loop: one swizzled line
_ACCUMULATORS_PER_THREAD = 128  # fp32; more spill: 60 of 61 compiled configurations
_THREADS = 256  # of a tile: 8 warps
_LEAST_STAGES = 2  # buffers of the main loop

# Fitted together on a random half of OpenXLA's matmul_interpolator_data (1,125 products of 256 to
# 4096 per dimension on H100 and B200) and of the published sweeps on Hopper and Blackwell in
# measurements/gemm.csv; `kernels` reports the error on the other half.
_TILE_FIXED_S = 1.0e-6  # to fill the pipeline and to drain it, besides the writes
_EXPOSED_WRITES = 0.79  # of a tile's writes at HBM's pace, that products don't hide
_LATER_FIXED = 0.69  # of both, for tiles after an SM's first: the rest hides under the next tile
_LAST_WAVE = 0.70  # what a partly filled last wave costs: 0 is perfect stream-K, 1 a full wave
_EXPOSED_READS = 0.08  # of the time to read the operands, or the products if they take less


@dataclass(frozen=True, slots=True)
class Tile:
    """One SM's part of the output.

    `step_s`: seconds per element of k, the slower of products and loads from L2; `fixed_s`: fill
    of the pipeline and write of the result.
    """

    rows: int
    columns: int
    step_s: float
    fixed_s: float


def waves(tiles: float, sm_count: int, last: float = _LAST_WAVE) -> float:
    """How many times the time of one tile a grid takes; `last`: part of it that a partly filled
    last wave costs.

    98 tiles on 108 SMs take one; 120 take between 1.1 (perfect stream-K) and 2 (no smoothing).
    """
    full = tiles / sm_count
    return 1.0 if full <= 1 else full + last * (ceil(full) - full)


def best_grid_s(
    device: Device, m: int, n: int, k: int, *, batch: int, in_bytes: float, rate_flops_per_s: float
) -> float:
    """Seconds of `batch` products of (m, k) and (k, n), without the start of the kernel.

    Over tiles t and splits p of k, with reads R and writes W at HBM's pace and
    C = w x step_s x k / p + (1 + later x (w - 1)) x fixed_s + the reduction over splits, w waves:

        min over t, p of  max(C, R + W) + exposed x min(C, R)

    `rate_flops_per_s` is the device's rate in the main loop. Results are written in 16 bits or,
    for 32-bit operands, in 32.
    """
    out_bytes = max(2.0, in_bytes)
    bandwidth = device.sustained_bandwidth_bytes_per_s
    read_s = batch * (m + n) * k * in_bytes / bandwidth
    write_s = batch * m * n * out_bytes / bandwidth
    step = int(_K_STEP_BYTES / in_bytes)
    best_s = float("inf")
    for tile in legal_tiles(device, in_bytes, rate_flops_per_s):
        grid = batch * ceil(m / tile.rows) * ceil(n / tile.columns)
        for split in _SPLITS:
            if split > 1 and grid * split > 2 * device.sm_count:
                break
            depth = ceil(k / split / step) * step
            count = waves(grid * split, device.sm_count, last_wave(device))
            fixed_s = tile.fixed_s * (1 + _LATER_FIXED * (count - 1))
            busy_s = count * tile.step_s * depth + fixed_s
            if split > 1:  # each split writes fp32 and reads it back, mostly in L2
                busy_s += split * batch * m * n * 4 / bandwidth + _TILE_FIXED_S
            total_s = max(busy_s, read_s + write_s) + _EXPOSED_READS * min(busy_s, read_s)
            best_s = min(best_s, total_s)
    return best_s


def last_wave(device: Device) -> float:
    """Kernels before Hopper give every SM whole tiles: 120 of 256 x 128 take two waves on an A100
    (NVIDIA, Matrix Multiplication Background User's Guide, 1793 x 1793)."""
    return _LAST_WAVE if device.arch in ("Hopper", "Blackwell") else 1.0


@lru_cache(maxsize=1024)
def legal_tiles(device: Device, in_bytes: float, rate_flops_per_s: float) -> tuple[Tile, ...]:
    """The tiles that neither spill registers nor overflow shared memory, on that device.

    Shared memory: (rows + columns) x k-step x bytes x stages, one stage fewer before Hopper,
    which is exact for 61 of 61 Triton configurations compiled for sm_80, 89, 90 and 120.
    """
    pair = _sm_pair(device)
    sm_flops_per_s = rate_flops_per_s / device.sm_count
    sm_l2_bytes_per_s = device.l2_bandwidth_bytes_per_s / device.sm_count
    sm_write_bytes_per_s = device.sustained_bandwidth_bytes_per_s / device.sm_count
    stages = _LEAST_STAGES if pair > 1 else _LEAST_STAGES - 1
    tiles = []
    for rows, columns in _SHAPES:
        shared_bytes = (rows + columns) * _K_STEP_BYTES * stages
        if rows * columns > _accumulators(device):
            continue
        if shared_bytes > device.shared_memory_per_block_bytes:
            continue
        # A pair of SMs shares the wider operand (TMA multicast, two-SM products).
        loaded = (min(rows, columns) + max(rows, columns) / pair) * in_bytes
        step_s = max(2 * rows * columns / sm_flops_per_s, loaded / sm_l2_bytes_per_s)
        written_s = rows * columns * max(2.0, in_bytes) / sm_write_bytes_per_s
        tiles.append(Tile(rows, columns, step_s, _TILE_FIXED_S + _EXPOSED_WRITES * written_s))
    return tuple(tiles)


def _sm_pair(device: Device) -> int:
    return 2 if device.arch in ("Hopper", "Blackwell") else 1


def _accumulators(device: Device) -> int:
    """Results that a tile may hold: in registers, or in Blackwell's tensor memory (256 KiB)."""
    if device.arch == "Blackwell":
        return 2**18 // 4
    register_share = device.registers_per_sm // 2**16  # AMD's units have twice as many
    return _ACCUMULATORS_PER_THREAD * _THREADS * max(1, register_share)
