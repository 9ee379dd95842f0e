"""The measured part of a cluster file: what `shardwright calibrate` writes beside `device`.

Input: the values of a YAML file whose `format` is `FORMAT`. Output: a `Calibration`; unknown keys
and missing ones are refused with those that there are. `calibration_values` is the way back.
"""

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any

from ir.calibration import COLLECTIVES, KERNELS, Calibration
from ir.errors import UsageError

FORMAT = "shardwright-calibration/1"
MEASURED_KEYS = {"format", "made_with", "cores", "timings", "collectives", "left_out"}
_TIMING_KEYS = {"processes", "threads", "kernels", "products"}
_KERNEL_KEYS = {"name", "head_dim", "bytes", "us"}
_PRODUCT_KEYS = {"dtype", "batch", "sizes", "us"}
_COLLECTIVE_KEYS = {"op", "processes", "members", "members_near", "bytes", "us"}
_OPTIONAL = {"head_dim"}
_COUNTS = {"processes", "threads", "head_dim", "batch", "members", "members_near"}
_SERIES = {"bytes", "sizes", "us"}
_NAMES = {"name", "op", "dtype"}


def read_calibration(values: Mapping[str, Any], where: str) -> Calibration | None:
    """The calibration of a file's values; None for a cluster.yaml, which has no `format`."""
    if "format" not in values:
        if measured := sorted(MEASURED_KEYS & set(values)):
            raise UsageError(
                f"{where}: `{measured[0]}` belongs to a calibration, which starts with "
                f"`format: {FORMAT}`."
            )
        return None
    if values["format"] != FORMAT:
        raise UsageError(
            f"{where}: format {values['format']!r} can't be read; this version reads {FORMAT}. "
            "Run shardwright calibrate again."
        )
    if not _is_number(values.get("cores", 0), least=0, is_whole=True):
        raise UsageError(f"{where}: cores must be a whole number, not {values['cores']!r}.")
    entries = {key: values.get(key, []) for key in ("timings", "collectives")}
    _check_entries(entries["timings"], _TIMING_KEYS, f"{where}: timings")
    for number, timings in enumerate(entries["timings"], 1):
        at = f"{where}: timings {number}"
        _check_entries(timings["kernels"], _KERNEL_KEYS, f"{at}: kernels")
        _check_entries(timings["products"], _PRODUCT_KEYS, f"{at}: products")
        _check_names((k["name"] for k in timings["kernels"]), KERNELS, f"{at}: kernels")
    _check_entries(entries["collectives"], _COLLECTIVE_KEYS, f"{where}: collectives")
    _check_names((c["op"] for c in entries["collectives"]), COLLECTIVES, f"{where}: collectives")
    try:
        return Calibration.from_json({"cores": values.get("cores", 0), **entries})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{where}: a measured value has the wrong type: {error}.") from error


def calibration_values(
    calibration: Calibration, made_with: str, left_out: Iterable[str]
) -> dict[str, Any]:
    """The keys that a cluster file gets beside its own."""
    measured = calibration.to_json()
    return {
        "format": FORMAT, "made_with": made_with, "cores": measured["cores"],
        "left_out": [*left_out], "collectives": measured["collectives"],
        "timings": measured["timings"],
    }  # fmt: skip


def _check_entries(entries: Any, keys: set[str], where: str) -> None:
    if not isinstance(entries, list):
        raise UsageError(f"{where} must be a list, not {type(entries).__name__}.")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise UsageError(f"{where} {number}: keys are expected: {', '.join(sorted(keys))}.")
        if unknown := sorted(str(key) for key in entry.keys() - keys):
            known = ", ".join(sorted(keys))
            raise UsageError(f"{where} {number}: unknown key {unknown[0]!r}. Known: {known}.")
        if missing := sorted(keys - _OPTIONAL - entry.keys()):
            raise UsageError(f"{where} {number}: the key {missing[0]!r} is missing.")
        for key, value in entry.items():
            _check_value(key, value, f"{where} {number}")


def _check_value(key: str, value: Any, where: str) -> None:
    """What is measured is positive and finite; a slip of the hand names its place."""
    if key in _COUNTS and not _is_number(value, least=1, is_whole=True):
        raise UsageError(f"{where}: {key} must be a whole number from 1, not {_shown(value)}.")
    if key in _NAMES and not isinstance(value, str):
        raise UsageError(f"{where}: {key} must be a name, not {_shown(value)}.")
    if key not in _SERIES:
        return
    if not isinstance(value, list):
        raise UsageError(f"{where}: {key} must be a list of numbers, not {_shown(value)}.")
    for place, number in enumerate(value, 1):
        if not (_is_number(number) and number > 0):
            raise UsageError(
                f"{where}: number {place} of {key} must be positive and finite, not "
                f"{_shown(number)}. Correct it, or run shardwright calibrate again."
            )


def _is_number(value: Any, least: float = -inf, *, is_whole: bool = False) -> bool:
    kinds = (int,) if is_whole else (int, float)
    is_one = isinstance(value, kinds) and not isinstance(value, bool)
    return is_one and isfinite(value) and value >= least


def _shown(value: Any) -> str:
    return repr(value)[:40]


def _check_names(names: Iterable[Any], known: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{where}: unknown name {name!r}. Known: {', '.join(known)}.")
