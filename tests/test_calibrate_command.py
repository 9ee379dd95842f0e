"""`shardwright calibrate`: measures, leaves out what is noisy, writes what `plan` reads."""

import json
from pathlib import Path

import pytest
import yaml

import shardwright
from calibration import collectives_of, process_counts, read_output, timings_of, with_nccl_tests
from ir.calibration import COLLECTIVES, KERNELS
from ir.cluster import Cluster
from runtime.collective_calls import OPS
from runtime.kernel_calls import KERNELS as MEASURED
from tests.ir.test_nccl_tests import TEXT


def row(size: float, us: float, noise: float = 0.01) -> dict:
    timing = {"us": us, "spread": 2 * noise, "noise": noise}
    return {"kernel": "exp", "dtype": "float32", "batch": 0, "head_dim": 0, "size": size, **timing}


def test_a_steady_curve_is_kept() -> None:
    found, left_out = timings_of([row(512, 3.0), row(2**20, 900.0)], 2, 1)
    assert found["kernels"] == [{"name": "exp", "bytes": [512, 2**20], "us": [3.0, 900.0]}]
    assert (found["processes"], found["threads"], left_out) == (2, 1, [])


def test_a_noisy_curve_is_left_out_and_named() -> None:
    found, left_out = timings_of([row(512, 3.0, 0.4), row(4096, 9.0, 0.3)], 2, 1)
    assert found["kernels"] == []
    assert "exp" in left_out[0] and "35%" in left_out[0] and "catalogue" in left_out[0]


def test_a_curve_that_time_cut_short_is_left_out() -> None:
    found, left_out = timings_of([row(512, 3.0), row(4096, 9.0)], 2, 1)
    assert found["kernels"] == []
    assert "time was up" in left_out[0]


def test_noisy_collectives_are_left_out_too() -> None:
    rows = [
        {"op": op, "members": 2, "size": 64, "us": 90.0, "spread": noise, "noise": noise}
        for op, noise in (("all_reduce", 0.0), ("all_gather", 0.5))
    ]
    found, left_out = collectives_of(rows, 2)
    assert [c["op"] for c in found] == ["all_reduce"]
    assert left_out[0].startswith("all_gather of 2")


def test_what_is_measured_is_what_files_may_hold() -> None:
    assert {*MEASURED, "view", "adamw", "sgd", "attention", "attention_backward"} == set(KERNELS)
    assert {*OPS, "send"} == set(COLLECTIVES)


def test_nccl_tests_describe_hardware_elsewhere(tmp_path: Path, capsys) -> None:
    text, out = tmp_path / "all_reduce.txt", tmp_path / "cluster.yaml"
    text.write_text(TEXT)
    words = ["calibrate", "--cluster", "2x4xH100-SXM", "--nccl-tests", str(text), "--out", str(out)]
    assert shardwright.main(words) == 0
    cluster = Cluster.parse(str(out))
    assert str(cluster) == "2x4 H100-SXM"
    assert cluster.calibration is not None
    (found,) = cluster.calibration.collectives
    assert (found.op, found.members, found.members_near) == ("all_reduce", 8, 4)
    assert found.curve.at(2**20) == pytest.approx(61.2e-6)


def test_nccl_tests_replace_what_was_measured_of_the_same_groups(tmp_path: Path) -> None:
    text = tmp_path / "all_reduce.txt"
    text.write_text(TEXT)
    once = with_nccl_tests({"device": "H100-SXM"}, [read_output(text)])
    assert len(with_nccl_tests(once, [read_output(text)])["collectives"]) == 1


def test_hardware_elsewhere_needs_measurements_of_it(capsys) -> None:
    assert shardwright.main(["calibrate", "--cluster", "8xH100-SXM"]) == shardwright.USAGE
    assert "--nccl-tests" in capsys.readouterr().err


def test_counts_of_processes_are_lists() -> None:
    assert process_counts("1,2,4") == (1, 2, 4)
    with pytest.raises(Exception, match="not a list"):
        process_counts("1,two")


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> tuple[Path, dict]:
    """This machine, measured quickly with two processes."""
    path = tmp_path_factory.mktemp("machine") / "machine.yaml"
    words = ["calibrate", "--quick", "--processes", "2", "--json", "--out", str(path)]
    assert shardwright.main(words) == 0
    return path, yaml.safe_load(path.read_text())


def test_this_machine_can_be_measured(machine) -> None:
    path, values = machine
    assert values["device"] == "CPU" and values["devices_per_node"] == 2
    kept = sum(len(t["kernels"]) + len(t["products"]) for t in values["timings"])
    assert kept + len(values["collectives"]) + len(values["left_out"]) > 20
    assert Cluster.parse(f"1x{path}").n_devices == 1


def test_every_command_takes_the_file(machine, tmp_path: Path, capsys) -> None:
    path, _ = machine
    model = f"{Path(__file__).parent.parent / 'examples' / 'tiny_llama.py'}:build"
    capsys.readouterr()
    assert shardwright.main(["plan", model, "--cluster", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["cluster"]["calibration"]["cores"] >= 1
    out = ["--out", str(tmp_path / "program")]
    assert shardwright.main(["emit", model, "--cluster", f"1x{path}", *out]) == 0
    pin = ["--pin", "tensor=2", "--steps", "1"]
    assert shardwright.main(["check", model, "--cluster", str(path), *pin]) == 0
