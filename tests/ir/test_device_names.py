"""The short names of devices that docs/clusters.md lists are those that are understood."""

import re
from pathlib import Path

import pytest

from ir.device import find_device

TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
TABLE = TEXT.partition("| name | device |\n")[2].partition("\n\n")[0].splitlines()[1:]
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TABLE]
NAMES = [
    (short, full)
    for shorts, fulls in ROWS
    for short, full in zip(
        re.findall(r"`([^`]+)`", shorts), re.findall(r"(?:^|, )([A-Z][\w-]+)", fulls) * 3,
        strict=False,
    )
]  # fmt: skip


@pytest.mark.parametrize(("short", "full"), NAMES)
def test_a_short_name_is_the_device_of_the_table(short, full) -> None:
    assert find_device(short) == find_device(full)


def test_the_table_is_read() -> None:
    assert ("A100", "A100-80GB") in NAMES and ("A6000", "RTX-A6000") in NAMES
    assert ("B300-SXM", "B300") in NAMES and ("H100-80GB", "H100-SXM") in NAMES
