"""What an emitted program may contain: known imports, plain identifiers, and no dead tensors."""

import ast
import keyword
import os
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn
from torch.distributed.run import get_args_parser

from codegen import Program, emit
from codegen.load import load
from ir.errors import Refused
from ir.lower import Degrees
from ir.promote import promote
from ir.spmd import lower_all
from ir.trace import trace
from runtime.compare import Training, compare, run_plain, run_program, widened, widened_batch
from tests.codegen.golden_plans import PLANS
from tests.codegen.program_checks import (
    ALLOWED,
    WORD,
    functions,
    imported,
    is_block,
    misused,
    undeleted,
    words,
)
from tests.hand_plan import even_stages, hand_plan, keep_all, kinds_of, whole_shardings
from tests.numbers.random_models import ROWS, random_case
from tests.numbers.random_plans import random_plan

ROOT = Path(__file__).parents[2]
BUILTINS = {"float", "range", "reversed", "len"}


@lru_cache
def program_text(name: str) -> str:
    """A golden program, or a random plan of a random model."""
    if name in PLANS:
        return emit(*PLANS[name]()).files["program.py"]
    seed = int(name.removeprefix("random "))
    case = random_case(seed)
    graph, random = trace(case.model, case.args, loss=case.loss), Random(seed)
    while True:
        try:
            return emit(graph, random_plan(graph, ROWS, random)).files["program.py"]
        except Refused:
            continue


NAMES = [*PLANS, *(f"random {seed}" for seed in range(100, 106))]


@pytest.mark.parametrize("name", NAMES)
def test_programs_import_torch_and_the_runtime_only(name: str) -> None:
    assert imported(program_text(name)) <= ALLOWED


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_is_read_after_its_del(name: str) -> None:
    text = program_text(name)
    module_names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    blocks = {n: f for n, f in functions(text).items() if is_block(n)}
    assigned = {arg for f in blocks.values() for arg in _locals(f)}
    for function in blocks.values():
        assert misused(function, (module_names - assigned) | BUILTINS) == []


def _locals(function: ast.FunctionDef) -> set[str]:
    stored = {
        n.id for n in ast.walk(function)
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
    }
    return stored | {arg.arg for arg in function.args.args}


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_returned_or_deleted(name: str) -> None:
    for word, function in functions(program_text(name)).items():
        if is_block(word):
            assert undeleted(function) == set(), word


class Rude(nn.Module):
    """Modules and parameters with names that are keywords, quotes, line breaks and code."""

    NAMES = ("class", "a b", "x'y", "naïve", "import os; os", "line\nbreak", '"""', "None", "torch",
             "9", "__import__('os')")  # fmt: skip

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(4, 4))
        self.register_parameter('")\nraise SystemExit(1)#', nn.Parameter(torch.ones(4)))
        self.register_buffer("lambda", torch.zeros(4))

    def forward(self, x):
        for module in self.children():
            x = torch.tanh(module(x))
        buffer = self._buffers["lambda"]
        buffer.add_(x.detach().mean(0))
        return (x * self._parameters['")\nraise SystemExit(1)#'] + buffer).square().mean()


def rude_program() -> tuple[nn.Module, torch.Tensor, Program]:
    torch.manual_seed(0)
    model, x = Rude(), torch.randn(6, 4)
    graph = promote(trace(model, (x,), name='"""\nraise SystemExit(1)'))
    degrees = Degrees(6, 1, 1, 1)
    batch_flow, kinds = kinds_of(graph)
    shardings = whole_shardings(kinds)
    keeps = keep_all(graph, kinds, lower_all(graph, batch_flow, kinds, shardings, degrees))
    plan = hand_plan(graph, degrees, kinds, shardings, keeps, even_stages(graph, 2))
    return model, x, emit(graph, plan)


def test_names_never_become_code() -> None:
    files = rude_program()[2].files
    for name in ("program.py", "train.py"):
        ast.parse(files[name])
        for rude in ("SystemExit", "import os", "naïve", "\nbreak"):
            assert rude not in files[name]
    for name in ("launch.sh", "launch.slurm", "README.md"):
        assert "SystemExit" not in files[name]
    assert imported(files["program.py"]) <= ALLOWED
    for word in words(files["program.py"]):
        assert WORD.fullmatch(word) and not keyword.iskeyword(word)


def test_a_model_with_such_names_trains_right() -> None:
    model, x, program = rude_program()
    wide, args = widened(model), widened_batch((x,))
    plain = run_plain(wide, args, {}, lambda output: output, Training())
    found = run_program(*load(program), wide, args, {}, Training())
    assert compare(found, plain).status == "ok"


def test_torchrun_leaves_the_flags_of_train_py_alone() -> None:
    """Its own `--log-dir` would take `--log` for itself."""
    text = rude_program()[2].files["launch.slurm"]
    words = shlex.split(text.replace("\\\n", " ").replace("$@", "--log steps.txt"))
    after = words[words.index("torchrun") + 1 :]
    flags = [word for part in after for word in part.split()]
    found = get_args_parser().parse_args(flags)
    assert found.training_script.endswith("train.py")
    assert found.training_script_args == ["--log", "steps.txt"]


def test_launch_sh_tells_the_rank_that_failed_and_of_what(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(rude_program()[2].files["launch.sh"])
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit('the disk is full ' + sys.argv[1])\n"
        "time.sleep(60)\n"
    )
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(tmp_path / "launch.sh"), "--steps=2"]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 3
    assert ended.stderr == (
        "error: rank 1 ended with exit code 1, and the other ranks were stopped. Its last output:\n"
        "the disk is full --steps=2\n"
    )
