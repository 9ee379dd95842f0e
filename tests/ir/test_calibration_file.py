"""Cluster files that `calibrate` wrote: read, kept in plans, refused where they are wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ir.calibration import Calibration
from ir.calibration_file import FORMAT
from ir.cluster import Cluster
from ir.errors import UsageError


def values() -> dict[str, Any]:
    """Of a machine with two cores, measured with one and with four processes."""
    kernel = {"name": "elementwise", "bytes": [512, 2**20], "us": [2.0, 300.0]}
    product = {"dtype": "float32", "batch": 1, "sizes": [16, 64], "us": [5.0 + i for i in range(8)]}
    timings = [
        {"processes": n, "threads": 1, "kernels": [kernel], "products": [product]} for n in (1, 4)
    ]
    place = {"op": "all_reduce", "processes": 4, "members_near": 2, "members": 2}
    collective = {**place, "bytes": [64, 4096], "us": [90.0, 120.0]}
    return {
        "format": FORMAT, "made_with": "torch", "device": "CPU", "cores": 2, "memory_GiB": 8,
        "devices_per_node": 4, "timings": timings, "collectives": [collective], "left_out": [],
    }  # fmt: skip


def written(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_a_cluster_has_what_was_measured_with_as_many_processes(tmp_path: Path) -> None:
    path = written(tmp_path, values())
    whole, alone = Cluster.parse(path), Cluster.parse(f"1x{path}")
    assert (whole.n_devices, alone.n_devices) == (4, 1)
    assert whole.device.memory_bytes * 4 == alone.device.memory_bytes
    assert whole.calibration is not None and alone.calibration is not None
    assert [t.processes for t in whole.calibration.timings] == [4]
    assert [t.processes for t in alone.calibration.timings] == [1]
    assert (len(whole.calibration.collectives), len(alone.calibration.collectives)) == (1, 0)


def test_two_processes_count_as_the_next_larger_number(tmp_path: Path) -> None:
    cluster = Cluster.parse(f"2x{written(tmp_path, values())}")
    assert cluster.calibration is not None
    assert cluster.calibration.timings[0].processes == 4


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("us", [2.0, "fast"], "kernels 1: number 2 of us must be positive and finite, not 'fast'"),
        ("us", [None, 3.0], "kernels 1: number 1 of us must be positive and finite, not None"),
        ("us", [2.0, float("nan")], "number 2 of us must be positive and finite, not nan"),
        ("us", [2.0, -3.0], "number 2 of us must be positive and finite, not -3.0"),
        ("us", 3.0, "kernels 1: us must be a list of numbers, not 3.0"),
        ("bytes", [True, 2], "number 1 of bytes must be positive and finite, not True"),
        ("head_dim", "wide", "kernels 1: head_dim must be a whole number from 1, not 'wide'"),
        ("name", ["exp"], r"kernels 1: name must be a name, not \['exp'\]"),
    ],
)
def test_a_broken_value_is_told_with_its_place(tmp_path, key, value, reason) -> None:
    broken = values()
    broken["timings"][1]["kernels"] = [{**broken["timings"][1]["kernels"][0], key: value}]
    with pytest.raises(UsageError, match=f"timings 2: .*{reason}"):
        Cluster.parse(written(tmp_path, broken))


@pytest.mark.parametrize(("key", "value"), [("processes", "one"), ("threads", 0), ("cores", -1)])
def test_counts_are_whole_numbers(tmp_path, key, value) -> None:
    broken = values()
    (broken if key == "cores" else broken["timings"][0])[key] = value
    with pytest.raises(UsageError, match=f"{key} must be a whole number"):
        Cluster.parse(written(tmp_path, broken))


def test_more_processes_than_measured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="calibrate --processes 8"):
        Cluster.parse(f"8x{written(tmp_path, values())}")


def test_a_cluster_with_measurements_survives_a_plan_file(tmp_path: Path) -> None:
    cluster = Cluster.parse(written(tmp_path, values()))
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_a_cluster_without_measurements_is_written_as_before() -> None:
    assert set(Cluster.local(2).to_json()) == {"device", "levels"}


def test_calibrations_read_back_equal() -> None:
    keys = ("cores", "timings", "collectives")
    found = Calibration.from_json({key: values()[key] for key in keys})
    assert Calibration.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speed": 1}, "unknown key 'speed'"),
        ({"format": "shardwright-calibration/9"}, "calibrate again"),
        ({"nodes": 2}, "one machine"),
        ({"timings": {}}, "must be a list"),
        ({"timings": [{"processes": 1}]}, "is missing"),
        ({"collectives": [{"op": "all_reduce", "group": 2}]}, "unknown key 'group'"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Cluster.parse(written(tmp_path, values() | change))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("name", "warp", "Known: elementwise"),
        ("us", [1.0], "need as many times"),
        ("bytes", [2**20, 512], "must be positive and rise"),
    ],
)
def test_wrong_curves_are_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    content = values()
    content["timings"][0]["kernels"][0][key] = value
    with pytest.raises(UsageError, match=said):
        Cluster.parse(written(tmp_path, content))


def test_measurements_need_their_format(tmp_path: Path) -> None:
    content = {key: value for key, value in values().items() if key != "format"}
    with pytest.raises(UsageError, match="belongs to a calibration"):
        Cluster.parse(written(tmp_path, content))
