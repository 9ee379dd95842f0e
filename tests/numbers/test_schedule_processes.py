"""Two Gloo processes run interleaved and zero-bubble programs as threads do, without locking up."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

from codegen import emit
from codegen.load import load
from runtime.compare import widened
from runtime.launch import run_ranks
from runtime.layout import load_layout
from runtime.processes import disconnect
from runtime.trainer import Trainer, connect, run_threads
from tests.numbers.schedule_model import ROWS, build, plan_of, traced

SCHEDULES = {"interleaved": 2, "zero-bubble": 1}  # stages per rank
STEPS = 2


def train(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    _, args = build()
    losses = [trainer.step(*args).item() for _ in range(STEPS)]
    return losses, trainer.gather(), trainer.replica_differences()


def work(folder: Path) -> None:
    """What each process runs."""
    found = {}
    for schedule in SCHEDULES:
        path = folder / schedule / "program.py"
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        layout = load_layout(folder / schedule / "layout.json")
        found[schedule] = train(connect(program, layout, widened(build()[0]), device="cpu"))
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    disconnect()


def test_processes_equal_threads(tmp_path: Path) -> None:
    graph, expected = traced(), {}
    for name in SCHEDULES:
        plan = plan_of(graph, name, ranks=2, virtual=SCHEDULES[name], micro=4, rows=ROWS)
        program = emit(graph, plan)
        program.write(tmp_path / name)
        module, layout = load(program)
        expected[name] = run_threads(layout, module, widened(build()[0]), 2, train)[0]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run_ranks([sys.executable, __file__, str(tmp_path)], 2, environment)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert all(differing == [] for _, _, differing in found.values())


if __name__ == "__main__":
    work(Path(sys.argv[1]))
