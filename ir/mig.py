"""Slices of one card (NVIDIA MIG), which are devices of their own.

Input: a whole device and a profile such as "3g.40gb". Output: the slice as a `Device`. Source:
NVIDIA MIG user guide (supported profiles; `nvidia-smi mig -lgip` on H100 and A100).
"""

import re
from dataclasses import replace

from ir.device import GIB, Device, find_device
from ir.errors import UsageError

EIGHTHS = {1: (1, 2), 2: (2,), 3: (4,), 4: (4,), 7: (8,)}
"""Eighths of the memory that a profile of so many compute slices may have."""
_INSTANCES = {(1, 1): 7, (1, 2): 4, (2, 2): 3, (3, 4): 2, (4, 4): 1, (7, 8): 1}
# SMs by (compute slices, eighths of memory): H100 with 132 SMs and A100 as nvidia-smi lists them.
_SMS = {
    132: {(1, 1): 16, (1, 2): 26, (2, 2): 32, (3, 4): 60, (4, 4): 64, (7, 8): 132},
    108: {(1, 1): 14, (1, 2): 14, (2, 2): 28, (3, 4): 42, (4, 4): 56, (7, 8): 98},
}
_SEVENTHS = 7  # of the SMs per compute slice, rounded down, where they are not listed
_NO_MIG = ("Volta", "Turing", "Ada", "CDNA2", "CDNA3")
_TOLERANCE = 1 / 8  # GiB per eighth, and half a GiB at least: a profile's name rounds its memory
_PROFILE = re.compile(r"(?P<compute>\d)g\.(?P<memory>\d+)gb(\+\w+)*", re.IGNORECASE)


def mig_slice(whole: Device, profile: str) -> Device:
    """The slice of that profile; `UsageError` with the device's profiles if it has none such."""
    found = _PROFILE.fullmatch(profile)
    kind = _kind(whole, int(found["compute"]), int(found["memory"])) if found else None
    if kind is None or not _has_mig(whole):
        raise UsageError(f"{whole.name}:{profile}: {profile!r} is no MIG profile. {_hint(whole)}")
    sms = _sms(whole, kind)
    compute, memory = sms / whole.sm_count, kind[1] / 8
    return replace(
        whole,
        name=f"{whole.name}:{profile.lower()}",
        peaks=tuple((dtype, flops * compute) for dtype, flops in whole.peaks),
        memory_bytes=int(whole.memory_bytes * memory),
        memory_bandwidth_bytes_per_s=whole.memory_bandwidth_bytes_per_s * memory,
        reserve_bytes=int(1.4 * GIB + 0.04 * whole.memory_bytes * memory),
        sm_count=sms,
        l2_bytes=int(whole.l2_bytes * memory),
        l2_bandwidth_bytes_per_s=whole.l2_bandwidth_bytes_per_s * memory,
    )


def slices_per_device(device: Device) -> int:
    """How many slices like this one a card holds; 1 for a whole device."""
    whole, _, profile = device.name.partition(":")
    found = _PROFILE.fullmatch(profile)
    if found is None:
        return 1
    eighths = round(8 * device.memory_bytes / find_device(whole).memory_bytes)
    return _INSTANCES[int(found["compute"]), eighths]


def _has_mig(device: Device) -> bool:
    """Data-centre cards from A100 on; of Blackwell and Ampere not the consumer ones."""
    return device.arch not in _NO_MIG and not device.name.startswith("RTX")


def _kind(whole: Device, compute: int, named_gib: int) -> tuple[int, int] | None:
    """(compute slices, eighths of memory) of a profile, if the device has it."""
    unit_gib = whole.memory_bytes / GIB / 8
    for eighths in EIGHTHS.get(compute, ()):
        if abs(eighths * unit_gib - named_gib) <= max(0.5, _TOLERANCE * eighths):
            return compute, eighths
    return None


def _sms(whole: Device, kind: tuple[int, int]) -> int:
    return _SMS.get(whole.sm_count, {}).get(kind) or whole.sm_count * kind[0] // _SEVENTHS


def _hint(whole: Device) -> str:
    if not _has_mig(whole):
        return f"A {whole.name} can't be sliced."
    unit_gib = whole.memory_bytes / GIB / 8
    names = [
        f"{compute}g.{int(eighths * unit_gib + 0.5)}gb"
        for compute, all_eighths in EIGHTHS.items() for eighths in all_eighths
    ]  # fmt: skip
    return f"A {whole.name} has {', '.join(names)}."
