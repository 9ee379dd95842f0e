"""Tensors that lie in the host's memory, and the copies there and back.

`store` takes a tensor from the device, `fetch` brings it back, bit for bit. On a GPU the host's
copy is pinned and the copies are queued on the current stream, behind what made the tensor and
before what reads it; on a CPU they are plain copies, and `Hosted` marks what would be elsewhere.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Hosted:
    """A tensor in host memory, and the device that it belongs to."""

    tensor: torch.Tensor
    device: torch.device


def store(x: torch.Tensor) -> Hosted:
    """A copy of `x` in host memory."""
    copy = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")
    return Hosted(copy.copy_(x, non_blocking=True), x.device)


def fetch(held: Hosted) -> torch.Tensor:
    """A copy of what is held, on its device."""
    copy = torch.empty_like(held.tensor, device=held.device)
    return copy.copy_(held.tensor, non_blocking=True)
