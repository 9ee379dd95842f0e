"""Seconds of attention on one device, by the generation of the kernel that computes it.

Input: a `Device` and the local shape of an attention. Output: seconds of its forward or backward.
Fused ("flash") kernels cost products plus exponentials; unfused attention costs batched products
plus passes over the scores in memory.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ir.device import Device
from planner.kernels import element_bytes, matmul_s, memory_s
from planner.tiles import waves

UNFUSED = ("unfused", "compiled_softmax", "fused_softmax")
FLASH = ("flash1", "flash2", "flash3", "cudnn")
KERNELS = UNFUSED + FLASH

_BLOCK = 128  # queries (backward: keys) that one SM works on
_EXPONENTIALS_PER_CLOCK = 16  # of an SM's special-function unit (CUDA C programming guide)
# Passes over the q x k scores in memory, forward and backward, besides those of the products: a
# read and a write of scale, mask and softmax, whose backward reads two; one of dropout with its
# one-byte mask. A fused softmax (Megatron's) scales and masks on the way. A compiler's reads the
# scores for the maximum, the sum and the result; backward both operands for a sum and the result.
_SCORE_PASSES = {
    "unfused": (6.0, 7.0),
    "compiled_softmax": (4.0, 5.0),
    "fused_softmax": (2.0, 3.0),
}
_DROPOUT_PASSES = 2.5


@dataclass(frozen=True, slots=True)
class _Flash:
    """A fused kernel on an architecture, forward and backward.

    `products`: part of the dense peak that its products reach; `exponentials`: time per score
    besides them, in units of one exponential at the special-function unit's pace; `block_s`: fixed
    time of a block.
    """

    products: tuple[float, float]
    exponentials: tuple[float, float]
    block_s: tuple[float, float] = (2.0e-6, 4.5e-6)

    def slowed(self, slow: "_Flash", fast: "_Flash") -> "_Flash":
        """As much slower than this as `slow` is than `fast`."""
        forward, backward = (
            (
                self.products[side] * slow.products[side] / fast.products[side],
                self.exponentials[side] * slow.exponentials[side] / fast.exponentials[side],
            )
            for side in (0, 1)
        )
        return _Flash((forward[0], backward[0]), (forward[1], backward[1]), self.block_s)


# From the asymptotes at head dimensions 64, 128 (and 256), which are linear in it: Ampere and
# flash1 arXiv 2307.08691 (figures 4 to 6) and NVIDIA/cudnn-frontend's results on A100; Hopper
# arXiv 2407.08608 (figures 5 and 6) and cudnn-frontend's on H200; Blackwell cudnn-frontend's on
# GB200, and Dao-AILab/flash-attention issue 1589 for flash2 on B200. Others as
# Ampere. CDNA3: an estimate, in proportion to its matrix products; no table was found.
_FLASH = {
    ("flash1", "Ampere"): _Flash((0.60, 0.38), (2.0, 2.5)),
    ("flash2", "Ampere"): _Flash((0.88, 0.635), (1.0, 1.57)),
    ("flash2", "Hopper"): _Flash((0.436, 0.365), (0.73, 1.57)),
    ("flash2", "Blackwell"): _Flash((0.22, 0.18), (0.73, 1.57)),
    ("flash2", "CDNA3"): _Flash((0.45, 0.30), (1.0, 1.57)),
    ("flash3", "Hopper"): _Flash((0.925, 0.70), (0.87, 1.55)),
    ("cudnn", "Hopper"): _Flash((0.94, 0.68), (0.75, 1.5)),
    ("cudnn", "Blackwell"): _Flash((0.95, 0.85), (0.42, 1.45)),
}
_NEAREST = {"CDNA2": "CDNA3", "CDNA3": "CDNA3", "Hopper": "Hopper", "Blackwell": "Blackwell"}


@dataclass(frozen=True, slots=True)
class _Shape:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    causal: bool
    backward: bool

    @property
    def moved_bytes(self) -> float:
        """Of q, k, v and the result once; in backward their gradients as well."""
        rows = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys
        once = self.batch * rows * self.head_dim * element_bytes(self.dtype)
        return 2 * once if self.backward else once

    @property
    def score_flops(self) -> int:
        """Per score: two products forward, five backward (the scores are computed again)."""
        return (10 if self.backward else 4) * self.head_dim

    @property
    def visited(self) -> float:
        """Part of the scores that the mask leaves, with whole blocks on the diagonal."""
        if not self.causal:
            return 1.0
        seen = self.keys - self.queries / 2 + _BLOCK / 2
        return min(1.0, max(seen, _BLOCK) / self.keys)


def flash_kernel(device: Device) -> str:
    """The fused kernel that current libraries choose there; before Ampere there is none."""
    if device.arch in ("Volta", "Turing", ""):
        return "fused_softmax"
    return {"Hopper": "flash3", "Blackwell": "cudnn"}.get(device.arch, "flash2")


@lru_cache(maxsize=2**14)
def attention_s(
    device: Device,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    dtype: str,
    causal: bool,
    backward: bool = False,
    kernel: str = "flash2",
    dropout: bool = False,
    pace: float = 1.0,
) -> float:
    """softmax(q k / sqrt(head_dim)) v over `heads` heads that share `kv_heads` keys and values.

    `backward`: of the gradients alone. Causal: queries are the last ones of the keys. `pace`: of
    the products of unfused kernels over their benchmarks; fused kernels were measured as a whole.
    `ValueError` for a kernel that is not one of `KERNELS`.
    """
    if kernel not in KERNELS:
        raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")
    shape = _Shape(batch, heads, kv_heads, queries, keys, head_dim, dtype, causal, backward)
    if device.sm_count == 0:
        return _rates_only_s(device, shape)
    if kernel in UNFUSED:
        return _unfused_s(device, shape, kernel, dropout, pace)
    return _flash_s(device, shape, _flash(device, kernel))


def _flash(device: Device, kernel: str) -> _Flash:
    """That kernel there; if it has none for the architecture, the one before it, or flash2.

    flash1 runs everywhere as much slower than flash2 as on Ampere: both use the same units.
    """
    arch = _NEAREST.get(device.arch, "Ampere")
    if kernel == "flash1" and (kernel, arch) not in _FLASH:
        return _FLASH["flash2", arch].slowed(_FLASH["flash1", "Ampere"], _FLASH["flash2", "Ampere"])
    for name in FLASH[FLASH.index(kernel) :: -1]:
        if (name, arch) in _FLASH:
            return _FLASH[name, arch]
    return _FLASH["flash2", arch]


def _flash_s(device: Device, shape: _Shape, flash: _Flash) -> float:
    """Blocks of queries (backward: of keys) over the SMs.

    A score takes its FLOPs at the kernel's part of the peak and its exponentials. Backward besides
    reads the result and its gradient, and clears, fills and converts an fp32 gradient of q: 14
    bytes per element of q, in two more kernels.
    """
    side = int(shape.backward)
    blocked, other = shape.queries, shape.keys
    if shape.backward:
        blocked, other = other, blocked
    peak = device.peak_flops_per_s(shape.dtype)
    score_s = shape.score_flops / (peak * flash.products[side])
    exponentials_per_s = _EXPONENTIALS_PER_CLOCK * device.sm_count * device.clock_hz
    score_s += flash.exponentials[side] / exponentials_per_s
    block_scores = _BLOCK * other * shape.visited
    block_s = block_scores * score_s * device.sm_count + flash.block_s[side]
    blocks = shape.batch * shape.heads * ceil(blocked / _BLOCK)
    busy_s = waves(blocks, device.sm_count) * block_s
    total_s = max(busy_s, memory_s(device, shape.moved_bytes, 0)) + device.kernel_fixed_s
    if shape.backward:
        query_elements = shape.batch * shape.heads * shape.queries * shape.head_dim
        total_s += memory_s(device, 14.0 * query_elements, kernels=2)
    return total_s


def _rates_only_s(device: Device, shape: _Shape) -> float:
    """A fused kernel by its FLOPs and bytes alone."""
    scores = shape.batch * shape.heads * shape.queries * shape.keys * shape.visited
    flops_per_s = device.peak_flops_per_s(shape.dtype) * device.attention_fraction
    compute_s = scores * shape.score_flops / flops_per_s
    return max(compute_s, memory_s(device, shape.moved_bytes, 0)) + device.kernel_fixed_s


def _unfused_s(
    device: Device, shape: _Shape, kernel: str, dropout: bool, pace: float
) -> float:
    """Two (backward four) batched products and passes over all scores, masked or not."""
    batch, q, k, d = shape.batch * shape.heads, shape.queries, shape.keys, shape.head_dim
    scores_s = matmul_s(device, q, k, d, shape.dtype, batch)
    values_s = matmul_s(device, q, d, k, shape.dtype, batch)
    products_s = scores_s + values_s
    if shape.backward:  # of the scores, v, q, k
        products_s = scores_s + values_s + 2 * matmul_s(device, k, d, q, shape.dtype, batch)
    passes = _SCORE_PASSES[kernel][int(shape.backward)] + (_DROPOUT_PASSES if dropout else 0.0)
    score_bytes = passes * batch * q * k * max(2.0, element_bytes(shape.dtype))
    kernels = (1 if kernel == "fused_softmax" else 3) + int(dropout)
    return products_s / pace + memory_s(device, score_bytes, kernels)
