"""Dropout whose mask depends on (key, global element index) only, never on the layout.

So every plan of a model drops the same elements as one device does, and recomputing or running
backward draws the same mask again. The hash is the output function of SplitMix64 (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), in wrapping int64 arithmetic.
"""

from dataclasses import dataclass

import torch

from runtime.errors import UsageError

GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB
CHUNK_ELEMENTS = 1 << 22  # bounds the hash's memory to two int64 tensors of this size


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """Which part of a tensor of global `shape` is here: per dim the global indices, 1-D int64."""

    indices: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]


def mix_key(*parts: int) -> int:
    """One signed 64-bit key from several integers; another order gives another key."""
    state = 0
    for part in parts:
        state = _mix((state + GOLDEN) ^ _mix(part + GOLDEN))
    return _signed(state)


def dropout(x: torch.Tensor, p: float, key: int, where: Where) -> torch.Tensor:
    """`x` with each element zeroed with probability `p` and the rest scaled by 1 / (1 - p).

    The function is linear, so the same call on the gradient of the result is its backward.
    """
    if not 0 <= p <= 1:
        raise UsageError(f"dropout probability {p} is not between 0 and 1.")
    if p == 0:
        return x
    if p == 1:
        return x * 0
    return x * keep_mask(p, key, where).reshape(x.shape).to(x.dtype).div_(1 - p)


def keep_mask(p: float, key: int, where: Where) -> torch.Tensor:
    """bool, shape of the local tensor: true with probability 1 - p, by global element index."""
    sizes = [len(index) for index in where.indices]
    if not sizes:
        return _is_kept(torch.zeros((), dtype=torch.int64), p, key)
    row_elements = max(1, _product(sizes[1:]))
    rows = max(1, CHUNK_ELEMENTS // row_elements)
    head, *tail = where.indices
    pieces = ((piece, *tail) for piece in head.split(rows))
    return torch.cat([_is_kept(_linear(piece, where.shape), p, key) for piece in pieces])


def _is_kept(linear: torch.Tensor, p: float, key: int) -> torch.Tensor:
    """Compares the hash's upper 32 bits with p; `linear` is overwritten."""
    z = linear.mul_(_signed(GOLDEN)).add_(key)
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(FIRST_MULTIPLIER))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(SECOND_MULTIPLIER))
    z.bitwise_xor_(_shift_right(z, 31))
    return _shift_right(z, 32) >= round(p * 2**32)


def _linear(indices: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The row-major number of each element in the global tensor; a new tensor."""
    total = torch.zeros((), dtype=torch.int64, device=indices[0].device)
    for dim, index in enumerate(indices):
        stride = _product(shape[dim + 1 :])
        total = total + (index * stride).reshape(-1, *[1] * (len(shape) - dim - 1))
    return total


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own shift copies the sign bit."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: int) -> int:
    z &= 2**64 - 1
    z = (z ^ (z >> 30)) * FIRST_MULTIPLIER % 2**64
    z = (z ^ (z >> 27)) * SECOND_MULTIPLIER % 2**64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    z %= 2**64
    return z - 2**64 if z >= 2**63 else z


def _product(sizes: "tuple[int, ...] | list[int]") -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
