"""What a plan may keep in the host's memory instead of the device's.

    none        nothing
    optimizer   optimizer state: at the step it streams through the device, tensor by tensor
"""

from __future__ import annotations

OFFLOADS = ("none", "optimizer")


def offloads_optimizer(offload: str) -> bool:
    """Whether optimizer state lies in host memory."""
    return offload == "optimizer"
