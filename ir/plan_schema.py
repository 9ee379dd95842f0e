"""The schema of plan files: which keys, of which types. A file is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ir.errors import UsageError
from ir.offload import OFFLOADS

PREDICTION = {
    "step_s": float, "compute_s": float, "exposed_comm_s": float, "bubble_s": float,
    "optimizer_s": float, "bound_s": float, "capacity_bytes": int, "stages": list,
}  # fmt: skip
STAGE_COST = {
    "forward_s": float, "backward_s": float, "parameter_bytes": int, "gradient_bytes": int,
    "optimizer_bytes": int, "saved_bytes": int, "transient_bytes": int,
}  # fmt: skip
BLOCK = {
    "name": str, "nodes": list, "inputs": list, "outputs": list, "tangents": list,
    "gradients": list, "keeps": list,
}  # fmt: skip
PLACED = {"first": int, "count": int, "keep": str}
MESH = {"pipeline": int, "data": int, "tensor": int}
PLAN = {
    "format": str, "hash": str, "model": str, "signature": str, "cluster": dict, "mesh": dict,
    "schedule": str, "micro_batches": int, "global_batch": int, "optimizer": str, "blocks": list,
    "stages": list, "prediction": dict, "approximations": list, "text": str,
}  # fmt: skip

CERTIFICATE = {"candidates": int, "planned": int, "plans_log10": float}
OPTIONAL = {
    "zero": int, "offload": str, "devices_idle": int, "certificate": dict, "host_bytes": int,
    "hosts": list, "capacity_bytes": int, "is_cut_short": bool,
}  # fmt: skip
"""Keys that a plan, its certificate, a block or a stage's cost has only if they say something."""
ZERO_STAGES = (0, 1, 2, 3)


def check_plan(value: Any, version: str, where: str) -> None:
    """Raises `UsageError` naming the first key that is missing, unknown or of another type."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} is no plan: it holds a {type(value).__name__}, not an object.")
    if value.get("format") != version:
        raise UsageError(
            f"{where} has format {value.get('format')!r}; this version reads {version!r}. "
            "Plan again with this version."
        )
    optional = ("zero", "offload", "devices_idle", "certificate")
    _check(value, _with_optional(PLAN, value, optional), where)
    if value.get("zero", 0) not in ZERO_STAGES:
        raise UsageError(f"{where}: zero is {value['zero']}; ZeRO has the stages 0, 1, 2 and 3.")
    if value.get("offload", "none") not in OFFLOADS:
        raise UsageError(f"{where}: offload is {value['offload']!r}, not {', '.join(OFFLOADS)}.")
    _check(value["mesh"], MESH, f"{where}: mesh")
    if "certificate" in value:
        schema = _with_optional(CERTIFICATE, value["certificate"], ("is_cut_short",))
        _check(value["certificate"], schema, f"{where}: certificate")
    _check(value["prediction"], PREDICTION, f"{where}: prediction")
    for i, stage in enumerate(value["prediction"]["stages"]):
        schema = _with_optional(STAGE_COST, stage, ("host_bytes", "capacity_bytes"))
        _check(stage, schema, f"{where}: prediction of stage {i}")
    for i, block in enumerate(value["blocks"]):
        _check(block, _with_optional(BLOCK, block, ("hosts",)), f"{where}: block {i}")
        _check_numbers(block, f"{where}: block {i}")
    for i, stage in enumerate(value["stages"]):
        if not isinstance(stage, list):
            raise UsageError(f"{where}: stage {i} must be a list.")
        for placed in stage:
            _check(placed, PLACED, f"{where}: stage {i}")


def _with_optional(
    schema: Mapping[str, type], value: Any, keys: tuple[str, ...]
) -> dict[str, type]:
    """The schema with those of the optional keys that the value has."""
    return {**schema, **{key: OPTIONAL[key] for key in keys if key in value}}


def _check(value: Any, schema: Mapping[str, type], where: str) -> None:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object, not a {type(value).__name__}.")
    missing = [key for key in schema if key not in value]
    unknown = [key for key in value if key not in schema]
    if missing or unknown:
        raise UsageError(f"{where}: missing keys {missing}, unknown keys {unknown}.")
    for key, kind in schema.items():
        item = value[key]
        fits = isinstance(item, (int, float)) if kind is float else isinstance(item, kind)
        if not fits or (kind is not bool and isinstance(item, bool)):
            raise UsageError(f"{where}: {key} must be a {kind.__name__}, not {item!r:.40}.")


def _check_numbers(block: dict[str, Any], where: str) -> None:
    if not all(type(number) is int for number in block["nodes"]):
        raise UsageError(f"{where}: nodes must be whole numbers.")
    for key in ("inputs", "outputs", "tangents", "gradients"):
        if not all(x is None or x == "partial" or type(x) is int for x in block[key]):
            raise UsageError(f"{where}: {key} must hold factors, 'partial' or null.")
    for keep in (*block["keeps"], *block.get("hosts", ())):
        good = isinstance(keep, list) and len(keep) == 2 and isinstance(keep[0], str)
        if not good or not all(isinstance(name, str) for name in keep[1]):
            raise UsageError(f"{where}: keeps and hosts must be pairs of a label and names.")
