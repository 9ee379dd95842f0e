"""What makes no sense is refused before the model is read, with the place and what is legal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import calibration
import deciding
import prediction
import shardwright
from ir.errors import UsageError
from tests.test_cli import command, model  # noqa: F401  (fixtures)


@pytest.fixture
def idle(monkeypatch):
    """No work may begin."""

    def work(*_, **__):
        raise AssertionError("work began")

    monkeypatch.setattr(deciding, "load_model", work)
    monkeypatch.setattr(prediction, "predict_rows", work)
    monkeypatch.setattr(calibration, "calibrate", work)


LOCAL = ["--cluster", "local:4"]
REFUSED = [
    (["plan", "MODEL", *LOCAL, "--out", "/proc/p.json"], "/proc/p.json can't be written: No such"),
    (["plan", "MODEL", *LOCAL, "--trace", "HERE/no/t.json"], "there is no folder"),
    (["plan", "MODEL", *LOCAL, "--out", "HERE"], "is a folder: name a file in it"),
    (["plan", "MODEL", *LOCAL, "--out", "HERE/a", "--trace", "HERE/./a"], "--out and --trace are"),
    (["emit", "MODEL", *LOCAL, "--out", "/proc/program"], "/proc/program can't be written"),
    (["emit", "MODEL", *LOCAL, "--out", "HERE/tiny.py"], "tiny.py is a file; give a folder"),
    (["emit", "MODEL", *LOCAL, "--out", "HERE"], "is not empty"),
    (["predict", "HERE/rows.csv", "--out", "HERE/no/p.csv"], "there is no folder"),
    (["predict", "HERE/rows.csv", "--out", "HERE/p.csv", "--explain", "x"], "--out: --explain"),
    (["calibrate", "--out", "HERE/no/m.yaml"], "there is no folder"),
    (["calibrate", "--cluster", "2xA100-80GB", "--quick"], "with --cluster nothing is measured"),
    (["calibrate", "--cluster", "2xA100-80GB", "--processes", "2"], "--processes: with --cluster"),
    (["calibrate", "--out", "HERE/m.txt"], "a cluster file is called .yaml"),
    (["calibrate", "--out", "HERE/m.yaml", "--nccl-tests", "HERE/no.txt"], "no.txt can't be read"),
    (["plan", "MODEL", *LOCAL, "--pin", "tensor=3"], "pin tensor=3: 4 devices can't be split in 3"),
    (["plan", "MODEL", *LOCAL, "--pin", "tensr=2"], "unknown pin 'tensr'"),
    (["plan", "MODEL", *LOCAL, "--pin", "zero=7"], "it is one of 0, 1, 2, 3"),
    (["plan", "MODEL", *LOCAL, "--pin", "data=4", "--global-batch", "6"], "divided by data=4"),
    (["plan", "MODEL", *LOCAL, "--pin", "pipeline=1,schedule=gpipe"], "Use schedule=1f1b, or pipe"),
    (["plan", "MODEL", *LOCAL, "--pin", "data=2,tensor=2,schedule=zero-bubble"], "there is one. "),
    (["plan", "MODEL", *LOCAL, "--pin", "data=4,tensor=1,schedule=interleaved"], "at least two of"),
    (["plan", "MODEL", "--cluster", "local:1", "--pin", "schedule=gpipe"], "with pipeline=1"),
    (["plan", "MODEL", "--cluster", "local:-1"], "local:N is N processes here"),
    (["explain", "MODEL", *LOCAL, "--pin", "data=3"], "pin data=3: 4 devices"),
    (["explain", "MODEL", *LOCAL, "--what-if", "link.x=3"], "has no link.x. Its links are"),
    (["explain", "MODEL", *LOCAL, "--what-if", "nodes=2"], "is one machine"),
    (["explain", "MODEL", *LOCAL, "--what-if", "memory=-900GiB"], "leaves"),
    (["explain", "MODEL", *LOCAL, "--why-not", "tensor=0"], "whole number of at least 1"),
    (["explain", "MODEL", *LOCAL, "--why-not", ""], "asks for nothing"),
    (["check", "MODEL", "--devices", "3", "--pin", "tensor=2"], "pin tensor=2: 3 devices can't"),
    (["check", "MODEL", "--devices", "2", "--cluster", "local:2"], "give one of them"),
    (["run", "HERE", *LOCAL], "--cluster: .* is an emitted program"),
    (["run", "HERE", "--seq", "8"], "--seq: .* is an emitted program"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(w) for w, _ in REFUSED])
def test_refused_before_any_work(command, model, tmp_path, idle, words, said):  # noqa: F811
    (tmp_path / "rows.csv").write_text("id,layers\nx,2\n")
    before = sorted(tmp_path.iterdir())
    words = [word.replace("MODEL", model).replace("HERE", str(tmp_path)) for word in words]
    code, _, error = command(*words)
    assert code == 2
    first, _, rest = said.partition(" .* ")
    assert first in error and rest in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_explaining_a_plan_keeps_what_it_has(command, model, tmp_path, monkeypatch):  # noqa: F811
    file = tmp_path / "plan.json"
    asked = ("--cluster", "local:2", "--pin", "tensor=2")
    assert command("plan", model, *asked, "--out", file)[0] == 0
    monkeypatch.setattr(deciding, "load_model", None)
    for pin, said in (("tensor=1", "the plan has tensor=2"), ("tensr=2", "unknown pin 'tensr'")):
        code, _, error = command("explain", model, "--plan", file, "--pin", pin)
        assert code == 2 and said in error


@pytest.mark.parametrize("flag", [
    ("--cluster", "local:2"), ("--global-batch", "4"), ("--micro-batches", "2"),
    ("--pin", "tensor=1"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["emit", "run"])
def test_a_made_plan_takes_no_planning_flags(command, model, tmp_path, name, flag):  # noqa: F811
    file = tmp_path / "plan.json"
    assert command("plan", model, "--cluster", "local:2", "--out", file)[0] == 0
    place = ["--out", tmp_path / "program"] if name == "emit" else []
    code, _, error = command(name, model, "--plan", file, *place, *flag)
    assert code == 2 and f"{flag[0]}: the plan in {file}" in error
    assert not (tmp_path / "program").exists()


@pytest.mark.parametrize(("call", "said"), [
    (lambda: shardwright.plan(None, "local:4", {}, global_batch=4, pin="tensor=2"), "by name"),
    (lambda: shardwright.plan(None, "local:4", {}, global_batch=4, pin={"tensor": 3}), "can't be"),
    (lambda: shardwright.plan(None, "local:4", {}, global_batch="4"), "whole number of at least 1"),
    (lambda: shardwright.plan(None, None, {}, global_batch=4), "a cluster is a Cluster or a spec"),
    (lambda: shardwright.predict(None, "local:4", [1]), "names its values"),
    (lambda: shardwright.predict(None, 4, {"tp": 1}), "a cluster is a Cluster or a spec"),
    (lambda: shardwright.explain(None, None, {}, global_batch=4), "a cluster is a Cluster or a sp"),
    (lambda: shardwright.explain(None, "local:4", {}, global_batch=4, why_not="a=1"), "by name"),
    (lambda: shardwright.explain(None, "local:4", {}, global_batch=4, what_if=[1]), "are named"),
    (lambda: shardwright.explain(None, "local:4", {}, global_batch=4, what_if={"nodes": 2}),
     "is one machine"),
])  # fmt: skip
def test_from_python_too(call, said):
    with pytest.raises(UsageError, match=said):
        call()


@pytest.mark.parametrize("neighbour", [False, True])
def test_a_file_that_is_no_python_makes_no_sense(command, tmp_path, neighbour):  # noqa: F811
    (tmp_path / "bad.py").write_text("x = 1\ndef build(:\n")
    (tmp_path / "good.py").write_text("import bad\n")
    file = tmp_path / ("good.py" if neighbour else "bad.py")
    code, _, error = command("plan", f"{file}:build", "--cluster", "local:1")
    assert code == 2 and "bad.py:2: " in error and "SyntaxError" in error


def test_a_fixed_batch_names_the_line_that_fixes_it(command, tmp_path):  # noqa: F811
    path = tmp_path / "fixed.py"
    text = (
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.up = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return self.up(x).reshape(12, 8).square().mean()\n"
        "def build():\n    return Net(), (torch.randn(12, 8),), {}\n"
    )
    path.write_text(text)
    line = "fixed.py:8: `return self.up(x).reshape(12, 8)"
    code, _, error = command("plan", f"{path}:build", *LOCAL, "--pin", "data=2")
    assert code == 2 and line in error and "Use data=1" in error
    code, out, _ = command("plan", f"{path}:build", "--cluster", "local:2", "--pin", "tensor=2")
    assert code == 0 and line in out
    asked = ("--cluster", "local:2", "--pin", "schedule=interleaved")
    code, _, error = command("plan", f"{path}:build", *asked)
    assert code == 3 and "a step is one micro-batch. Use schedule=1f1b" in error


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1e-3", "much"])
def test_a_rate_that_trains_nothing_is_no_argument(command, model, idle, value):  # noqa: F811
    code, _, error = command("run", model, *LOCAL, f"--lr={value}")
    assert code == 2 and f"--lr: '{value}' is not a number from 0" in error


COUNTS = [
    ("plan", flag) for flag in ("--seq", "--batch", "--global-batch", "--micro-batches")
] + [("run", "--steps"), ("check", "--devices")]  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1.5", "²"])
@pytest.mark.parametrize(("name", "flag"), COUNTS)
def test_counts_are_whole_numbers_from_1(command, model, idle, name, flag, value):  # noqa: F811
    code, _, error = command(name, model, f"{flag}={value}")
    assert code == 2 and f"{flag}: '{value}' is not a whole number from 1" in error


@pytest.mark.parametrize(("words", "said"), [
    (["--lr=nan"], "--lr: 'nan' is not a number from 0"),
    (["--clip-norm=0"], "--clip-norm: '0' is not a number above 0"),
    (["--clip-norm=inf"], "--clip-norm: 'inf' is not a number above 0"),
    (["--every=0"], "--every: '0' is not a whole number from 1"),
    (["--steps=-1"], "--steps: '-1' is not a whole number from 1"),
])  # fmt: skip
def test_an_emitted_program_takes_the_same_numbers(command, model, tmp_path, words, said):  # noqa: F811
    folder = tmp_path / "program"
    assert command("emit", model, "--cluster", "local:1", "--out", folder)[0] == 0
    path = os.environ | {"PYTHONPATH": str(Path(shardwright.__file__).parent)}
    asked = [sys.executable, folder / "train.py", *words]
    ended = subprocess.run(asked, capture_output=True, text=True, env=path)
    assert ended.returncode == 2 and said in ended.stderr
