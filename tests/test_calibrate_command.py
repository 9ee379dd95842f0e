"""`shardwright calibrate`: measures, leaves out what is noisy, writes what `plan` reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
    assert "exp" in left_out[0] and "35.0%" in left_out[0] and "catalogue" in left_out[0]


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


def test_the_output_that_comes_last_counts(tmp_path: Path) -> None:
    fast, slow = tmp_path / "all_reduce_fast.txt", tmp_path / "all_reduce_slow.txt"
    fast.write_text(TEXT)
    slow.write_text(TEXT.replace("61.20", "6120"))
    read = [read_output(fast), read_output(slow)]
    at_once, notes = with_nccl_tests({"device": "H100-SXM"}, read)
    first, _ = with_nccl_tests({"device": "H100-SXM"}, read[:1])
    then, said = with_nccl_tests(first, read[1:])
    assert at_once == then and then["made_with"] == "nccl-tests"
    assert [row["us"][1] for row in then["collectives"]] == [6120.0]
    assert "all_reduce_slow.txt counts and replaces what all_reduce_fast.txt says" in notes[0]
    assert "replaces what the file says" in said[0]


def test_hardware_elsewhere_needs_measurements_of_it(capsys) -> None:
    assert shardwright.main(["calibrate", "--cluster", "8xH100-SXM"]) == shardwright.USAGE
    assert "--nccl-tests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cluster", "text", "said"),
    [
        ("2x4xH100-SXM+2x4xA100-80GB", TEXT, "nodes that differ"),
        ("local:8", TEXT, "are of GPUs"),
        ("2x8xH100-SXM", TEXT.replace("Some GPU", "NVIDIA A100-SXM4-80GB"), "(A100-80GB)"),
        ("1x8xH100-SXM", TEXT, "has 2 x 4 ranks"),
        ("4x2xH100-SXM", TEXT, "4 x 2 devices"),
        ("4x8xH100-SXM", TEXT.replace("node1 device  0", "node0 device  4"), "have 5, 3 ranks"),
        ("", TEXT, "none is found here"),
    ],
)
def test_outputs_of_other_hardware_are_refused(
    cluster: str, text: str, said: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file, out = tmp_path / "all_reduce.txt", tmp_path / "cluster.yaml"
    file.write_text(text)
    words = ["--cluster", cluster] if cluster else []
    words = ["calibrate", *words, "--nccl-tests", str(file), "--out", str(out)]
    assert shardwright.main(words) == shardwright.USAGE
    assert said in capsys.readouterr().err and not out.exists()


def elsewhere(cluster: str, out: Path) -> tuple[int, Path]:
    """The exit code of a file for that hardware."""
    file = out.parent / "all_reduce.txt"
    file.write_text(TEXT)
    words = ["calibrate", "--cluster", cluster, "--nccl-tests", str(file), "--out", str(out)]
    return shardwright.main(words), out


@pytest.mark.parametrize("spec", ["2xDGX-H100", "8xp4d.24xlarge", "4x8xA100-80GB"])
def test_the_file_is_of_the_same_cluster(spec: str, tmp_path: Path, capsys) -> None:
    code, out = elsewhere(spec, tmp_path / "cluster.yaml")
    assert code == 0
    assert replace(Cluster.parse(str(out)), calibration=None) == Cluster.parse(spec)
    said = capsys.readouterr().out
    assert ("4x" + str(out) in said) == (spec == "4x8xA100-80GB")
    if spec == "4x8xA100-80GB":
        assert "for 4 devices on each of 4 nodes" in said
        assert Cluster.parse(f"4x{out}").n_devices == 16


def test_one_nvlink_domain_makes_all_hosts_near(tmp_path: Path, capsys) -> None:
    code, out = elsewhere("GB200-NVL72", tmp_path / "cluster.yaml")
    assert code == 0
    measured = Cluster.parse(str(out)).calibration
    assert measured is not None and measured.collectives[0].members_near == 8


def test_a_file_that_it_names_is_found_from_the_new_place(tmp_path: Path, capsys) -> None:
    (tmp_path / "there").mkdir()
    source = tmp_path / "source.yaml"
    source.write_text("device: A100-80GB\nnodes: 2\ntopology: topo.txt\n")
    code, out = elsewhere(str(source), tmp_path / "there" / "cluster.yaml")
    assert code == shardwright.USAGE and not out.exists()
    rows = "\n".join(
        f"GPU{i} " + " ".join("X" if i == j else "NV12" for j in range(4)) for i in range(4)
    )
    (tmp_path / "topo.txt").write_text("     GPU0 GPU1 GPU2 GPU3\n" + rows + "\n")
    code, out = elsewhere(str(source), tmp_path / "there" / "cluster.yaml")
    assert code == 0 and yaml.safe_load(out.read_text())["topology"] == "../topo.txt"
    assert replace(Cluster.parse(str(out)), calibration=None) == Cluster.parse(str(source))
    assert "or --cluster" not in capsys.readouterr().out


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
