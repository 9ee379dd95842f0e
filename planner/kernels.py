"""Seconds of one kernel on one device: matrix products, memory-bound groups, launches.

Input: a `Device` and a local shape or bytes. Output: seconds on the device, of a kernel that was
queued in time (`launch_bound_s` says what the host needs). Attention is in `attention_time`.
"""

from functools import lru_cache

from ir.device import Device
from ir.errors import UsageError
from planner.tiles import best_grid_s

# Bytes of an element in memory, with the scales of blocks of 32 (mxfp8) and of 16 (nvfp4).
_ELEMENT_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "tf32": 4.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
_LOW_PRECISIONS = ("float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4")
# Kernels that load 16 bytes at a time need rows of a multiple of that. Others are about twice as
# slow: GPT-2 gained 25 % of a step on A100 when its vocabulary, 30 % of its products, was padded
# from 50257 to 50304 (Karpathy, nanoGPT).
# Batched ones fall back to the vector units: runs of unfused attention with head dimensions 150 and
# 108 take about a quarter longer than with 128 or 144 (bigscience-a100 in benchmarks/data).
_VECTOR_BYTES = 16
_MISALIGNED = 2.0
# PyTorch in eager mode on a recent server CPU: dispatch, autograd's node, cudaLaunchKernel.
EAGER_OP_S = 7e-6


@lru_cache(maxsize=2**16)
def matmul_s(device: Device, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
    """`batch` products of (m, k) and (k, n) in the dtype of that name, by a kernel library.

    The best tile and split of k (`tiles`), but no faster than the device sustains under its
    power limit; misaligned rows (n, k) cost twice as much. Operands in 8 or 4 bits are taken as
    quantised already. `UsageError` if the device has no units for such a dtype.

    Error on products that the fit did not see (OpenXLA's, with the 4.4 us that their start took
    as measured): H100 bf16 median 2.5 %, p90 9 %; B200 bf16 2 % and 9 %, fp8 3.5 % and 12 %.
    MI300X, not fitted: 14 % and 35 %.
    """
    if min(m, n, k, batch) <= 0:
        return 0.0
    peak = _peak_flops_per_s(device, dtype)
    is_low = dtype in _LOW_PRECISIONS
    sustained = device.low_precision_fraction if is_low else device.matmul_fraction
    floor_s = 2.0 * batch * m * n * k / (peak * sustained)
    in_bytes = element_bytes(dtype)
    if device.sm_count == 0:  # only rates are known
        moved_bytes = batch * ((m + n) * k * in_bytes + m * n * max(2.0, in_bytes))
        memory_bound_s = moved_bytes / device.sustained_bandwidth_bytes_per_s
        return max(floor_s, memory_bound_s) + device.kernel_fixed_s
    rate = peak * max(sustained, device.burst_fraction)
    if n * in_bytes % _VECTOR_BYTES or k * in_bytes % _VECTOR_BYTES:
        rate /= _MISALIGNED
        if batch > 1:  # libraries have no such kernels on tensor units
            rate = min(rate, device.peak_flops_per_s("float32"))
    grid_s = best_grid_s(device, m, n, k, batch=batch, in_bytes=in_bytes, rate_flops_per_s=rate)
    return max(floor_s, grid_s) + device.kernel_fixed_s


def memory_s(device: Device, moved_bytes: float, kernels: int = 1) -> float:
    """`kernels` elementwise or reducing kernels that read and write `moved_bytes` together.

    The fixed time of a kernel is also the ramp: on an H100 one of 9 MB reaches half of HBM's
    pace, one of 90 MB nine tenths.
    """
    return moved_bytes / device.sustained_bandwidth_bytes_per_s + kernels * device.kernel_fixed_s


def launch_bound_s(kernels: float, device: Device, cpu_per_op_s: float = EAGER_OP_S) -> float:
    """What the host needs to launch that many kernels one by one.

    It hides under the device's work when that takes longer: a run of kernels takes the greater.
    With CUDA graphs `cpu_per_op_s` is 0 and only the device's fixed time per kernel is left.
    """
    return kernels * max(cpu_per_op_s, device.kernel_fixed_s)


def element_bytes(dtype: str) -> float:
    """Bytes of an element of a matrix in memory, block scales included."""
    return _ELEMENT_BYTES.get(dtype, 2.0)


def _peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak of the dtype; low precisions have no other units to fall back to."""
    if dtype in _LOW_PRECISIONS and dtype not in dict(device.peaks):
        known = ", ".join(name for name, _ in device.peaks)
        raise UsageError(
            f"{device.name} has no units for products in {dtype}; it has {known}. "
            "Choose another precision or device (fp8: Ada, Hopper, CDNA3 and later; mxfp8 and "
            "nvfp4: Blackwell)."
        )
    return device.peak_flops_per_s(dtype)
