"""Two and three Gloo processes run pipelines as threads do, without locking up.

With three, some state is shared by two stages and not by the third, in each of the three ways.
"""

import faulthandler
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from codegen import emit
from codegen.load import load
from ir.promote import promote
from ir.trace import trace
from runtime.compare import widened
from runtime.launch import run_ranks
from runtime.layout import load_layout
from runtime.processes import disconnect
from runtime.trainer import Trainer, connect, run_threads
from tests.numbers.schedule_model import TIED_ROWS, build_tied, plan_of

CUTS = {
    2: {"zero-bubble": (4,), "interleaved": (2, 4, 6)},
    3: {"1f1b": (3, 6), "zero-bubble": (3, 6), "interleaved": (1, 3, 4, 5, 6)},
}
"""By ranks and schedule, where the eight calls are cut into stages."""
MICRO, STEPS, TIMEOUT_S = 6, 2, 60.0


BATCH = build_tied()[1]
"""Drawn once: threads that seed the one generator of torch get in each other's way."""


def train(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    losses = [trainer.step(*BATCH).item() for _ in range(STEPS)]
    return losses, trainer.gather(), trainer.replica_differences()


def work(folder: Path) -> None:
    """What each process runs."""
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # one that waits for ever fails
    ranks = int(os.environ["WORLD_SIZE"])
    found = {}
    for schedule in CUTS[ranks]:
        path = folder / schedule / "program.py"
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        layout = load_layout(folder / schedule / "layout.json")
        found[schedule] = train(connect(program, layout, widened(build_tied()[0]), device="cpu"))
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    disconnect()


@pytest.mark.parametrize("ranks", list(CUTS))
def test_processes_equal_threads(tmp_path: Path, ranks: int) -> None:
    graph, expected = promote(trace(*build_tied())), {}
    for name, cuts in CUTS[ranks].items():
        virtual = (len(cuts) + 1) // ranks
        plan = plan_of(
            graph, name, ranks=ranks, virtual=virtual, micro=MICRO, rows=TIED_ROWS, cuts=cuts
        )
        program = emit(graph, plan)
        program.write(tmp_path / name)
        module, layout = load(program)
        expected[name] = run_threads(layout, module, widened(build_tied()[0]), ranks, train)[0]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run_ranks([sys.executable, __file__, str(tmp_path)], ranks, environment)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert all(differing == [] for _, _, differing in found.values())


if __name__ == "__main__":
    work(Path(sys.argv[1]))
