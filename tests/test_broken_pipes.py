"""A closed reader of the output ends a command quietly; any other broken pipe does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright
from tests.test_cli import TINY

ROOT = Path(__file__).parents[1]
CHIP = ("--cluster", "2xL4", "--global-batch", "12")
KILLED_SEARCH = """
import os, signal, sys
from ir import workers
from planner import search
import shardwright

workers.usable_cores, search.SHORT_S = lambda: 3, 0.0
ask, calls, killed = workers.Workers.ask, [], []

def killing(self, requests, *rest):
    calls.append(len(requests))
    if len(calls) > 1:
        for process in (copy.process for copy in self._copies):
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed.append(process.pid)
    return ask(self, requests, *rest)

workers.Workers.ask = killing
code = shardwright.main(sys.argv[1:])
print(len(killed), file=sys.stderr)
sys.exit(code)
"""


def ran(*words: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True, timeout=120,
        **options,
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "tiny.py").write_text(TINY)
    return f"{tmp_path / 'tiny.py'}:build"


def test_a_closed_reader_ends_it_quietly(model: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    made = ran("-m", "shardwright", "plan", model, *CHIP, stdout=writer)
    os.close(writer)
    assert (made.returncode, made.stderr) == (0, "")


def test_another_broken_pipe_is_not_taken_for_that(model: str, monkeypatch) -> None:
    def broken(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(shardwright, "decide", broken)
    with pytest.raises(BrokenPipeError):
        shardwright.main(["plan", model, *CHIP])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")
def test_killed_copies_of_the_search_leave_the_plan_as_it_is(model: str, tmp_path: Path) -> None:
    paths = tmp_path / "killed.json", tmp_path / "whole.json"
    made = ran("-c", KILLED_SEARCH, "plan", model, *CHIP, "--out", str(paths[0]))
    assert made.returncode == 0 and made.stderr == "2\n", made.stderr
    assert shardwright.main(["plan", model, *CHIP, "--out", str(paths[1])]) == 0
    assert json.loads(paths[0].read_text()) == json.loads(paths[1].read_text())
