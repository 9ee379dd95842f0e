"""Reads a YAML file of keys and values, and checks the values.

Input: a path, or the values with words for where they stand. Output: numbers; what is wrong is a
`UsageError` that names the file, the key and the value.
"""

import difflib
import re
from pathlib import Path
from typing import Any

from ir.errors import UsageError

Values = dict[str, Any]
LARGEST = 1e12
"""Above any number of a cluster, in any of the units."""
EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
"""A number with an exponent, as Python and YAML 1.2 write it."""


def load_yaml(path: Path) -> Values:
    """The keys and values of a file; `UsageError` if it has none."""
    try:
        import yaml  # optional: only a cluster.yaml needs it
    except ImportError as error:
        raise UsageError(f"reading {path} needs PyYAML: pip install pyyaml.") from error
    loader = _with_exponents(yaml)(read_text(path))
    try:
        document = loader.get_single_node()
        _check_once(document, path)
        values = loader.construct_document(document) if document else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {error}.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold keys and values, such as `device: H100-SXM`.")
    return {str(key): value for key, value in values.items()}


def _with_exponents(yaml: Any) -> Any:
    """PyYAML's safe loader, which also takes `1e-9` as a number: YAML 1.1 wants `1.0e-9`."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package is optional, hence untyped
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, [*"+-.0123456789"])
    return Loader


def _check_once(node: Any, path: Path) -> None:
    """Raises `UsageError` for a key that a mapping has twice: YAML would take the last."""
    if node is None or node.id == "scalar":
        return
    lines: dict[str, int] = {}
    for item in node.value:
        if node.id == "sequence":
            _check_once(item, path)
            continue
        key, value = item
        line = key.start_mark.line + 1
        if key.value in lines and key.id == "scalar":
            raise UsageError(
                f"{path}: `{key.value}` stands in line {lines[key.value]} and in line {line}. Keep "
                "one of them."
            )
        lines[str(key.value)] = line
        _check_once(value, path)


def read_text(path: Path) -> str:
    """The text of a file; `UsageError` if it has none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}.") from error


def check_keys(values: Values, keys: set[str], where: str) -> None:
    """Raises `UsageError` for a key that is not known, with the nearest one."""
    if unknown := sorted(str(key) for key in set(values) - keys):
        near = difflib.get_close_matches(unknown[0], keys, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(keys))}."
        raise UsageError(f"{where}: unknown key {unknown[0]!r}. {hint}")


def positive(values: Values, key: str, where: str, default: float = 0) -> float:
    """A number above 0; `default` where the key is absent, which is an error without one."""
    value = values.get(key, default)
    if key not in values and not default:
        raise UsageError(f"{where}: `{key}` is missing; it is a positive number.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{where}: `{key}` must be a positive number, not {value!r}.")
    if value >= LARGEST:
        raise UsageError(f"{where}: `{key}` must be less than {LARGEST:g}, not {value!r}.")
    return float(value)


def whole(values: Values, key: str, where: str, default: float = 0) -> int:
    """A whole number of at least 1."""
    count = positive(values, key, where, default)
    if count != int(count):
        raise UsageError(f"{where}: `{key}` is {count:g}; device counts are whole numbers.")
    return int(count)
