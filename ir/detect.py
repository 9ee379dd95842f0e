"""Finds the cluster that this process runs on: its GPUs (NVML), its nodes (SLURM), else its CPU.

Input: NVML if `pynvml` is installed, and the environment variables CUDA_VISIBLE_DEVICES,
SLURM_JOB_NUM_NODES (or SLURM_NNODES), SLURM_GPUS_ON_NODE and SLURM_NTASKS_PER_NODE. Output: a spec
that `Cluster.parse` reads.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

from ir.device import find_device
from ir.errors import UsageError

_NVML_NAMES = {  # marketing name, without maker and family, to a name of hardware.csv
    "h10080gbhbm3": "H100-SXM",
    "h100": "H100-SXM",
    "h200": "H200-SXM",
    "a100sxm440gb": "A100-40GB",
    "a100sxm480gb": "A100-80GB",
    "a10080gbpcie": "A100-PCIe-80GB",
    "h10096gbhbm3": "H100-96GB",
    "b300sxm6ac": "B300",
}


def detected_spec(environment: Mapping[str, str]) -> str:
    """The spec of the cluster around this process, such as 4x8xH100-SXM or local:2.

    On a SLURM login node without GPUs the device is unknown: that is a `UsageError`.
    """
    names = _visible(_gpu_names(), environment)
    nodes = _number(environment, ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")) or 1
    if not names:
        if nodes > 1 or _number(environment, ("SLURM_GPUS_ON_NODE",)):
            raise UsageError(
                f"SLURM gives {nodes} nodes, but NVML shows no device here to say what they hold. "
                "Install nvidia-ml-py, or name the cluster, for example --cluster 4x8xH100-SXM."
            )
        tasks = _number(environment, ("SLURM_NTASKS_PER_NODE",))
        return f"local:{tasks or len(os.sched_getaffinity(0))}"
    if len(set(names)) > 1:
        raise UsageError(f"this node has different devices: {', '.join(sorted(set(names)))}.")
    count = _number(environment, ("SLURM_GPUS_ON_NODE",)) or len(names)
    return f"{nodes}x{count}x{names[0]}"


def _gpu_names() -> list[str]:
    """The catalogue's name of every GPU that NVML shows; none without NVML."""
    try:
        import pynvml  # optional: only detection of NVIDIA devices needs it
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        parts = [part for handle in handles for part in _slices(pynvml, handle) or [handle]]
        return [catalogue_name(pynvml.nvmlDeviceGetName(part)) for part in parts]
    finally:
        pynvml.nvmlShutdown()


def _slices(pynvml: Any, handle: Any) -> list[Any]:
    """The MIG slices of a card in MIG mode; none of another."""
    found = []
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        for n in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError):  # there is none at that index
                found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n))
    except (pynvml.NVMLError, AttributeError):  # the card or the library is older than MIG
        return []
    return found


def _visible(names: list[str], environment: Mapping[str, str]) -> list[str]:
    """Those that CUDA_VISIBLE_DEVICES leaves: by index, in its order; of UUIDs only the number.

    CUDA stops at the first index that is none.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None or not names:
        return names
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in wanted):
        return names[: len(wanted)] if not any(w.startswith("-") for w in wanted) else []
    indices = takewhile(lambda n: n < len(names), map(int, wanted))
    return [names[n] for n in indices]


def catalogue_name(name: str | bytes) -> str:
    text = name.decode() if isinstance(name, bytes) else name
    short, _, profile = text.partition(" MIG ")
    short = re.sub(r"\b(NVIDIA|Tesla|GeForce|Quadro)\b\s*", "", short).strip()
    key = re.sub(r"[^a-z0-9]", "", short.lower())
    whole = find_device(_NVML_NAMES.get(key, short)).name
    return f"{whole}:{profile.strip()}" if profile else whole


def _number(environment: Mapping[str, str], keys: tuple[str, ...]) -> int | None:
    """The first of these variables that is set; SLURM writes "8(x4)" for 8 on each of 4 nodes."""
    for key in keys:
        if text := environment.get(key, "").strip():
            match = re.match(r"\d+", text)
            if match is None or int(match[0]) < 1:
                raise UsageError(f"{key}={text!r} is not a number of nodes, tasks or devices.")
            return int(match[0])
    return None
