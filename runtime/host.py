"""Tensors that lie in the host's memory, and the copies there and back.

`store` takes tensors from the device, `fetch` brings them back, bit for bit and with the same views
of the same memory. On a GPU the host's copy is pinned and the copies are queued on the current
stream, behind what made the tensors and before what reads them; on a CPU they are plain copies, and
`Hosted` marks what would be elsewhere.
"""

from dataclasses import dataclass

import torch

ALIGNMENT = 16
"""Bytes; every dtype's elements begin at multiples of theirs."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a buffer, from a byte on."""

    buffer: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hosted:
    """Tensors in host memory: buffers of bytes, views of them, and the device they belong to."""

    buffers: tuple[torch.Tensor, ...]
    views: tuple[View, ...]
    device: torch.device


def store(*tensors: torch.Tensor) -> Hosted:
    """Copies in host memory; tensors that share memory are copied once."""
    plain = [x.resolve_conj().resolve_neg() for x in tensors]
    spans: dict[int, tuple[int, int]] = {}
    for x in plain:
        start, end = _span(x)
        low, high = spans.get(_place(x), (start, end))
        spans[_place(x)] = min(low, start), max(high, end)
    places = {place: number for number, place in enumerate(spans)}
    owners = {_place(x): x for x in plain}
    buffers = tuple(_copied_out(owners[place], *spans[place]) for place in places)
    views = tuple(
        View(
            places[_place(x)], _first_byte(x) - spans[_place(x)][0], x.dtype, tuple(x.shape),
            x.stride(),
        )
        for x in plain
    )  # fmt: skip
    return Hosted(buffers, views, tensors[0].device)


def fetch(held: Hosted) -> tuple[torch.Tensor, ...]:
    """Copies of what is held, on its device."""
    buffers = [
        torch.empty_like(buffer, device=held.device).copy_(buffer, non_blocking=True)
        for buffer in held.buffers
    ]
    return tuple(
        torch.empty(0, dtype=view.dtype, device=held.device).set_(
            buffers[view.buffer].untyped_storage(), view.start // view.dtype.itemsize,
            view.shape, view.stride,
        )
        for view in held.views
    )  # fmt: skip


def _place(x: torch.Tensor) -> int:
    """What tensors that share memory have in common."""
    return x.untyped_storage().data_ptr()


def _first_byte(x: torch.Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of its memory that a tensor reads, and the one behind the last."""
    start = _first_byte(x)
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    end = start + (reach + 1) * x.element_size() if x.numel() else start
    return start - start % ALIGNMENT, end


def _copied_out(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """These bytes of a tensor's memory, on the host."""
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    flat.set_(x.untyped_storage(), start, (end - start,), (1,))
    copy = torch.empty_like(flat, device="cpu", pin_memory=x.device.type == "cuda")
    return copy.copy_(flat, non_blocking=True)
