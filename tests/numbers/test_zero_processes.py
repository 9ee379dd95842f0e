"""Four Gloo processes train under ZeRO as four threads do: two stages, two data ranks."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from codegen import emit
from codegen.load import load
from runtime.errors import run_main
from runtime.launch import run_ranks
from runtime.layout import load_layout
from runtime.processes import disconnect
from runtime.trainer import connect, run_threads
from tests.codegen.golden_plans import Adapted, zero3

ROOT = Path(__file__).parent.parent.parent
ZERO = (1, 2, 3)
OPTIONS = {"clip_norm": 0.1, "optimizer": "sgd", "optimizer_options": {"lr": 0.1, "momentum": 0.9}}


def model():
    torch.manual_seed(3)
    return Adapted()


def train(trainer):
    ids, labels = torch.arange(48).reshape(2, 8, 3) % 7
    losses = [trainer.step(ids, labels) for _ in range(3)]
    state = trainer.optimizer_state()
    return losses, trainer.gather(), state, trainer.gradient_norm, trainer.replica_differences()


def work(folder):
    """What each process runs; the programs were written by the test."""
    found = []
    for zero in ZERO:
        sys.path.insert(0, str(folder / str(zero)))
        sys.modules.pop("program", None)
        program = importlib.import_module("program")
        layout = load_layout(folder / str(zero) / "layout.json")
        found.append(train(connect(program, layout, model(), device="cpu", **OPTIONS)))
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    disconnect()


@pytest.fixture(scope="module")
def programs():
    return {zero: emit(*zero3(zero)) for zero in ZERO}


@pytest.fixture(scope="module")
def processes(programs, tmp_path_factory):
    """Results by rank and ZeRO stage."""
    folder = tmp_path_factory.mktemp("zero")
    for zero, program in programs.items():
        program.write(folder / str(zero))
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run_ranks([sys.executable, __file__, str(folder)], 4, environment)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("zero", ZERO)
def test_processes_give_the_numbers_of_threads(processes, programs, zero):
    module, layout = load(programs[zero])
    expected = run_threads(layout, module, model(), 4, train, **OPTIONS)[0]
    for found in processes:
        torch.testing.assert_close(found[ZERO.index(zero)], expected, rtol=1e-5, atol=1e-7)
        assert found[ZERO.index(zero)][-1] == []


if __name__ == "__main__":
    run_main(lambda: work(Path(sys.argv[1])))
