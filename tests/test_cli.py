"""The command line: what it prints, what it returns, and what a mistyped request gets."""

import json

import pytest

import checking
import deciding
import shardwright
from runtime.errors import RankFailed
from runtime.launch import launch

TINY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(12, 8),), {}

def loss(output):
    return (output * output).mean()
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return f"{path}:build"


@pytest.fixture
def command(capsys):
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def run(*words):
        try:
            code = shardwright.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_help_teaches(command):
    code, out, _ = command("--help")
    assert code == 0
    for word in ("plan", "explain", "emit", "run", "check", "hf:llama-3-8b", "exit codes"):
        assert word in out
    assert "FILE.py:build" in command("plan", "--help")[1]


def test_plan_prints_saves_and_reads_back(command, model, tmp_path):
    file = tmp_path / "plan.json"
    asked = ("plan", model, "--cluster", "local:4", "--pin", "data=2,tensor=2", "--out", file)
    code, out, _ = command(*asked)
    assert code == 0
    saved = shardwright.load_plan(file)
    assert (saved.mesh.data, saved.mesh.tensor) == (2, 2)
    assert out.strip() == str(saved).strip()


def test_pins_may_come_in_parts(command, model, tmp_path):
    """The last one had stood for all of them."""
    asked = "plan", model, "--cluster", "local:4", "--json", "--pin", "pipeline=2"
    code, out, _ = command(*asked, "--pin", "data=2")
    mesh = json.loads(out)["mesh"]
    assert code == 0 and (mesh["pipeline"], mesh["data"]) == (2, 2)
    code, _, error = command(*asked, "--pin", "pipeline=1")
    assert code == 2 and "names pipeline twice" in error


def test_plan_writes_the_timeline_of_a_step(command, model, tmp_path):
    file = tmp_path / "trace.json"
    asked = ("plan", model, "--cluster", "local:2", "--pin", "pipeline=2", "--trace", file)
    assert command(*asked)[0] == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert "perfetto" in command("plan", "--help")[1]
    assert command(*asked[:-1], tmp_path / "nowhere" / "trace.json")[0] == 2
    code, _, error = command(*asked, "--out", file)
    assert code == 2 and "--out and --trace are both" in error


def test_plan_as_json_is_the_plan_file(command, model, tmp_path):
    file = tmp_path / "plan.json"
    code, out, _ = command("plan", model, "--cluster", "local:2", "--out", file, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(file.read_text())


def test_emit_writes_once_unless_forced(command, model, tmp_path):
    out = tmp_path / "program"
    asked = ("emit", model, "--cluster", "local:2", "--out", out, "--json")
    code, text, _ = command(*asked)
    assert code == 0
    assert {"program.py", "plan.json", "layout.json", "train.py"} <= set(json.loads(text)["files"])
    before = (out / "program.py").read_text()
    (out / "program.py").write_text("mine")
    assert command(*asked)[0] in (2, 3)
    assert (out / "program.py").read_text() == "mine"
    assert command(*asked, "--force")[0] == 0
    assert (out / "program.py").read_text() == before


def test_emit_takes_a_saved_plan(command, model, tmp_path):
    file, out = tmp_path / "plan.json", tmp_path / "program"
    assert command("plan", model, "--cluster", "local:2", "--out", file)[0] == 0
    assert command("emit", model, "--plan", file, "--out", out)[0] == 0
    assert json.loads((out / "plan.json").read_text()) == json.loads(file.read_text())


def test_check_tries_every_split(command, model):
    code, out, _ = command("check", model, "--devices", 4, "--json")
    result = json.loads(out)
    assert code == 0 and result["status"] == "ok"
    assert max(result[key] for key in checking.ERRORS) <= 1e-9
    assert len(result["combinations"]) == 6
    assert sum(one["status"] == "ok" for one in result["combinations"]) >= 2


def test_check_says_that_float64_takes_more_where_memory_is_lacking(command, model, tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text("device: CPU\ndevices_per_node: 2\nmemory_GiB: 1e-6\nreserve_GiB: 1e-7\n")
    code, out, _ = command("check", model, "--cluster", small, "--pin", "tensor=2")
    assert code == 3 and "no plan fits" in out and "check computes in float64" in out


def test_check_of_one_split(command, model):
    code, out, _ = command("check", model, "--devices", 2, "--pin", "tensor=2", "--json")
    assert code == 0
    assert set(json.loads(out)) == set(checking.UNKNOWN)


def test_check_cuts_small_models_too(command, model, monkeypatch):
    """For cores as they are, repeating so little on both ranks would be faster."""
    programs = []
    cuts = checking._cuts_tensors
    monkeypatch.setattr(checking, "_cuts_tensors", lambda p: programs.append(p) or cuts(p))
    code, out, _ = command("check", model, "--devices", 2, "--pin", "tensor=2")
    assert code == 0 and "is cut" not in out and "idle" not in out
    (program,) = programs
    weights = {name: program.state_type(name).shape for name in program.state}
    assert any(8 in shape and 16 not in shape for shape in weights.values()), weights


def test_check_says_what_it_does_not_show(command, model, tmp_path):
    odd = tmp_path / "odd.py"
    odd.write_text(TINY.replace("8, 16", "7, 5").replace("16, 8", "5, 7").replace("12, 8", "9, 7"))
    code, out, _ = command("check", f"{odd}:build", "--devices", 2, "--pin", "tensor=2")
    assert code == 0 and "nothing is cut on the tensor axis: its ranks repeat each other" in out
    code, out, _ = command("check", model, "--devices", 4, "--pin", "pipeline=2,data=1,tensor=1")
    assert code == 0 and "2 of 4 ranks idle" in out


def test_numbers_that_differ_exit_with_4(command, model, monkeypatch):
    results = [{"status": status, "plan": ""} for status in ("ok", "mismatch", "refused")]
    found = [checking.UNKNOWN | result for result in results]
    monkeypatch.setattr(checking, "check", lambda *_, **__: found)
    code, out, _ = command("check", model, "--devices", 2, "--json")
    assert code == 4
    assert json.loads(out)["status"] == "mismatch"
    assert command("check", model, "--devices", 2)[0] == 4


def test_all_refused_exits_with_3(command, model, monkeypatch):
    refused = checking.UNKNOWN | {"status": "refused", "plan": "", "reason": "too small"}
    monkeypatch.setattr(checking, "check", lambda *_, **__: [refused])
    code, out, _ = command("check", model, "--devices", 2)
    assert code == 3
    assert "too small" in out


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["plan", "nowhere.py:build", "--cluster", "local:2"], 2, "no such file"),
        (["plan", "hf:lama-3-8b", "--cluster", "local:2"], 2, "Did you mean llama-3-8b"),
        (["plan", "MODEL"], 2, "--cluster"),
        (["plan", "MODEL", "--cluster", "0xH100"], 2, "0xH100"),
        (["plan", "MODEL", "--cluster", "8xH1000"], 2, "H100-SXM"),
        (["plan", "MODEL", "--cluster", "local:2", "--pin", "tensor"], 2, "KEY=VALUE"),
        (["plan", "MODEL", "--cluster", "local:2", "--pin", "tenser=2"], 2, "tenser"),
        (["plan", "MODEL", "--cluster", "local:2", "--global-batch", "0"], 2, "whole number"),
        (["plan", "MODEL", "--cluster", "local:2", "--out", "/nowhere/plan.json"], 2, "nowhere"),
        (["emit", "MODEL", "--cluster", "local:2"], 2, "--out"),
        (["emit", "MODEL", "--plan", "/nowhere/plan.json", "--out", "x"], 2, "nowhere"),
        (["check", "MODEL"], 2, "--devices"),
    ],
)
def test_a_wrong_request_is_one_paragraph(command, model, words, code, reason):
    got, _, err = command(*(model if word == "MODEL" else word for word in words))
    assert got == code
    assert reason in err
    assert "Traceback" not in err


def test_an_error_under_json_is_json(command):
    code, out, err = command("plan", "nowhere.py:build", "--cluster", "local:2", "--json")
    assert code == 2
    assert json.loads(out) == {"status": "usage", "reason": err.strip().partition(": ")[2]}
    _, out, _ = command("check", "nowhere.py:build", "--devices", "2", "--json")
    assert set(json.loads(out)) == set(checking.UNKNOWN)


def test_a_model_that_can_t_be_captured_exits_with_3(command, tmp_path):
    path = tmp_path / "branch.py"
    path.write_text(TINY.replace("return self.down", "return x if x.sum() > 0 else self.down"))
    code, _, err = command("plan", f"{path}:build", "--cluster", "local:2")
    assert code == 3
    assert "branch.py:11" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "shardwright-plan/999"}'])
def test_a_broken_plan_file_is_one_paragraph(command, model, tmp_path, text):
    file, out = tmp_path / "plan.json", tmp_path / "program"
    file.write_text(text)
    code, _, err = command("emit", model, "--plan", file, "--out", out)
    assert code in (2, 3)
    assert "plan.json" in err and "Traceback" not in err
    assert not out.exists()


def test_a_plan_for_another_model_is_refused(command, model, tmp_path):
    file, out = tmp_path / "plan.json", tmp_path / "program"
    assert command("plan", model, "--cluster", "local:2", "--out", file)[0] == 0
    other = tmp_path / "other.py"
    other.write_text(TINY.replace("8, 16", "8, 32").replace("16, 8", "32, 8"))
    code, _, err = command("emit", f"{other}:build", "--plan", file, "--out", out)
    assert code in (2, 3) and err
    assert not out.exists()


def test_ctrl_c_exits_with_130(command, model, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(deciding, "load_model", interrupted)
    assert command("plan", model, "--cluster", "local:2")[0] == 130


def test_a_plan_for_gpus_that_runs_on_a_cpu_says_so_once(command, model, tmp_path, monkeypatch):
    monkeypatch.setattr(shardwright, "launch", lambda *_, **__: None)
    monkeypatch.setattr(shardwright.torch.cuda, "is_available", lambda: False)
    program = tmp_path / "program"
    note = "note: the plan is for 1x2 A100-80GB, and this machine has no GPU: it runs"
    plan = (model, "--cluster", "2xA100-80GB", "--pin", "data=2")
    assert command("emit", *plan, "--out", program)[0] == 0
    for words in (plan, [program]):
        code, _, error = command("run", *words)
        assert code == 0 and error.count(note) == 1 and "in 2 processes." in error
    assert command("run", model, "--cluster", "local:2")[2] == ""


def test_an_emitted_readme_names_its_files_and_sizes_of_small_models(command, model, tmp_path):
    program = tmp_path / "program"
    assert command("emit", model, "--cluster", "local:2", "--out", program)[0] == 0
    text = (program / "README.md").read_text()
    assert "0.00 GiB" not in text and "KiB of" in text
    for path in program.iterdir():
        assert path.name in text or path.name == "README.md"


def test_a_schedule_without_stages_is_noted(command, model):
    code, out, _ = command("plan", model, "--cluster", "local:2", "--pin", "schedule=gpipe")
    assert code == 0
    noted = "schedule=gpipe orders the work of pipeline ranks, and there is one" in out
    assert noted == ("pipeline=1" in out)


def test_a_whole_parameter_says_which_dims_are_odd(command, tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(TINY.replace("Linear(16, 8)", "Linear(16, 3)"))
    asked = ("--cluster", "local:2", "--pin", "tensor=2")
    out = command("plan", f"{path}:build", *asked)[1]
    assert "is held whole on the tensor axis: 3 is not divisible by 2" in out
    assert "3 is not divisible by 2, and a cut of 16 was not chosen" in out


def test_codes_are_listed(command):
    text = " ".join(command("--help")[1].split())
    for code in ("0 fine", "2 the request", "3 refused", "4 numbers", "130 interrupted", "143 "):
        assert code in text


def test_training_refuses_a_place_for_its_result_at_the_start(command, model, tmp_path):
    program = tmp_path / "program"
    assert command("emit", model, "--cluster", "local:1", "--out", program)[0] == 0
    with pytest.raises(RankFailed, match="x.pt can't be written: No such file or directory") as e:
        launch(program, argv=["--save", str(tmp_path / "no" / "x.pt")])
    assert e.value.exit_code == 2
