"""What a user mistypes or stops early: one plain message, and the right exit code."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import checking
import shardwright
from checking import check
from ir.errors import CaptureError, UsageError
from ir.trace import trace
from ir.yaml_values import load_yaml
from runtime.models import Loaded

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = {first}, nn.Linear(8, 1)
    def forward(self, x):
        return self.last(self.first(x)).square().mean()

def build():
    torch.manual_seed(0)
    return Net(), ({batch},), {{}}
"""
IMAGES = MODEL.format(first="nn.Linear(8, 8)", batch="torch.randn(12, 8)")
TOKENS = MODEL.format(first="nn.Embedding(9, 8)", batch="torch.randint(9, (12, 5))")


@pytest.fixture
def command(capsys):
    def run(*words):
        try:
            code = shardwright.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def write(folder, text):
    file = folder / "net.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("flag", ["--pin", "--out", "--trace", "--cluster"])
def test_an_empty_value_is_a_usage_error(command, tmp_path, flag):
    words = ["plan", write(tmp_path, IMAGES), "--cluster", "local:1", flag, ""]
    code, out, error = command(*words)
    assert code == 2 and not out and f"argument {flag}: nothing stands behind it" in error


def test_a_colon_without_a_function_says_what_is_missing(command, tmp_path):
    file = write(tmp_path, IMAGES)
    code, _, error = command("plan", f"{file}:", "--cluster", "local:1")
    assert code == 2 and "a function's name is missing behind the colon" in error
    assert f"{file}:build" in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("def loss(output): return output", "to be called with output, and one"),
        ("class Other:\n    def __init__(self, width, depth): ...", "called with width, depth"),
        ("def loss(seq, *, rows, size=1): ...", "called with seq, rows, and"),
    ],
)
def test_a_function_that_builds_no_model_is_said_to_be_none(command, tmp_path, line, words):
    file = write(tmp_path, f"{IMAGES}\n{line}\n")
    name = "Other" if "Other" in line else "loss"
    code, _, error = command("check", f"{file}:{name}", "--devices", "2")
    assert code == 2 and f"{name} is not a function that builds a model" in error
    assert words in error and f"Did you mean {file}:build?" in error


def test_a_size_that_a_build_function_needs_is_asked_for(command, tmp_path):
    file = write(tmp_path, IMAGES.replace("build()", "build(seq, batch=2)"))
    code, _, error = command("check", file, "--devices", "2")
    assert code == 2 and "build needs --seq N: it has no default" in error


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
@pytest.mark.parametrize("name", ["plan", "explain", "emit"])
def test_a_time_limit_is_a_number_of_seconds(command, tmp_path, name, text):
    words = [name, write(tmp_path, IMAGES), "--cluster", "local:1", f"--time-limit={text}"]
    code, _, error = command(*words)
    assert code == 2 and f"{text!r} is not a number of seconds above 0, such as 30" in error


@pytest.mark.parametrize("limit_s", [0, -1.0, float("nan"), "30", True, None])
def test_a_time_limit_in_python_is_one_too(limit_s):
    model, batch = nn.Linear(2, 1), torch.ones(4, 2)
    with pytest.raises(UsageError, match=f"time_limit_s is {limit_s!r}: give a number of seconds"):
        shardwright.plan(model, "local:1", batch, global_batch=4, time_limit_s=limit_s)
    with pytest.raises(UsageError, match=f"time_limit_s is {limit_s!r}: give a number of seconds"):
        shardwright.explain(model, "local:1", batch, global_batch=4, time_limit_s=limit_s)


@pytest.mark.parametrize("processes", [0, -1, "2", 1.5, True])
def test_processes_are_a_whole_number(processes):
    model, batch = nn.Linear(2, 1), torch.ones(4, 2)
    with pytest.raises(UsageError, match=f"processes is {processes!r}: give a whole number from 1"):
        shardwright.plan(model, "local:1", batch, global_batch=4, processes=processes)


def test_the_help_says_what_a_time_limit_does(command):
    text = " ".join(command("plan", "--help")[1].split())
    assert "best plan so far and its gap, or refused if that is too short to plan any" in text


def test_a_folder_that_is_not_there_is_said_to_be_missing(command, tmp_path):
    code, _, error = command("run", tmp_path / "nosuch")
    assert code == 2 and f"there is no folder {tmp_path / 'nosuch'}" in error


def test_a_limit_that_planned_nothing_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr("planner.search.monotonic", iter(range(0, 10**6, 100)).__next__)
    words = ["--cluster", "local:1", "--time-limit", "1"]
    code, _, error = command("plan", write(tmp_path, IMAGES), *words)
    assert code == 3 and "within 1 s: of " in error and "none was planned" in error


@pytest.mark.parametrize(("text", "word"), [(IMAGES, "samples"), (TOKENS, "tokens")])
def test_speed_is_in_what_a_model_trains_on(tmp_path, text, word):
    words = ["run", write(tmp_path, text), "--cluster", "local:1", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", *words], capture_output=True, text=True
    )
    assert done.returncode == 0 and f" {word}/s" in done.stdout, done.stderr


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("a: 1e-9\nb: -2E+3\nc: 1.5e3\nd: [.5e1, 3e2]\nname: 1e9x\nhex: e5\n")
    values = load_yaml(file)
    assert values == {"a": 1e-9, "b": -2e3, "c": 1.5e3, "d": [5.0, 300.0], "name": "1e9x",
                      "hex": "e5"}  # fmt: skip


class Positions(nn.Module):
    """A table of 8 positions, the first `skipped` of which are never read."""

    def __init__(self, skipped):
        super().__init__()
        self.skipped = skipped
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(8, 6)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).unsqueeze(0) + self.skipped
        return (self.tokens(ids) + self.places(places)).square().mean()


@pytest.mark.parametrize(("skipped", "longest"), [(0, 8), (2, 6)])
def test_more_positions_than_the_table_has_are_refused(skipped, longest):
    def ids(length):
        return (torch.zeros(4, length, dtype=torch.long),)

    trace(Positions(skipped), ids(longest))
    read = rf"reads {longest + skipped + 1} positions, and its table has 8.*at most {longest},"
    with pytest.raises(CaptureError, match=rf"places \(.*{read}"):
        trace(Positions(skipped), ids(longest + 1))


def test_a_check_that_agrees_trains_no_further_copies(monkeypatch):
    def refuse(*_):
        raise AssertionError("no copy is needed")

    monkeypatch.setattr(checking, "nudged", refuse)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    loaded = Loaded(model, (torch.randn(4, 4),), {}, lambda y: y.square().mean(), "net")
    (found,) = check(loaded, 2, pin={"data": 2})
    assert found["status"] == "ok"


def test_a_plan_does_not_replace_its_model(command, tmp_path):
    file = write(tmp_path, IMAGES)
    code, _, error = command("plan", f"{file}:build", "--cluster", "local:1", "--out", file)
    assert code == 2 and "is what is read: write to another file" in error
    assert file.read_text() == IMAGES


def test_a_model_whose_own_loss_is_no_number_is_not_called_a_defect(command, tmp_path):
    file = write(tmp_path, IMAGES.replace(".square()", ".log()"))
    code, _, error = command("check", f"{file}:build", "--devices", 2)
    assert code == 3 and "the plain model's own loss is nan in step 1" in error


def test_a_check_on_absurdly_many_devices_is_refused_at_once(command, tmp_path):
    code, _, error = command("check", f"{write(tmp_path, IMAGES)}:build", "--devices", 1000)
    assert code == 2 and "at most 128, not 1000" in error


@pytest.mark.parametrize("damage", ["missing", "text", "list"])
def test_a_damaged_program_starts_no_ranks(command, tmp_path, damage):
    model, folder = f"{write(tmp_path, IMAGES)}:build", tmp_path / "program"
    assert command("emit", model, "--cluster", "local:1", "--out", folder)[0] == 0
    if damage == "missing":
        (folder / "program.py").unlink()
    else:
        (folder / "run.json").write_text("x" if damage == "text" else "[]")
    code, _, error = command("run", folder, "--steps", 1)
    assert code == 2 and ("has no program.py" in error or "run.json is no" in error)
    assert "Traceback" not in error
