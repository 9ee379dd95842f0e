"""Four Gloo processes do what the threads do: every collective, and training the tiny program."""

import os
import sys
import time
from pathlib import Path

import pytest
import tiny_program as tiny
import torch
from collective_cases import check_cases, run_cases

from runtime.errors import RankFailed, Refused, UsageError, run_main
from runtime.launch import run_ranks
from runtime.processes import ENVIRONMENT, connect_processes, disconnect
from runtime.trainer import connect, run_threads

FOLDER = Path(__file__).parent


def train(trainer):
    losses = [trainer.step(ids, target=target) for ids, target in tiny.batches(3)]
    return {
        "losses": losses,
        "values": trainer.gather(),
        "differing": trainer.replica_differences(),
        "size": trainer.metrics["size"],
    }


def work(folder):
    """What each process runs."""
    cases = run_cases(connect_processes("cpu", timeout_s=60))
    found = []
    for schedule in ("1f1b", "gpipe"):
        layout = tiny.layout(schedule, 4, data=1)
        options = {"clip_norm": 0.5, "seed": tiny.SEED, "device": "cpu"}
        found.append(train(connect(tiny, layout, tiny.TinyModel(), **options)))
    torch.save((cases, found), Path(folder) / f"{os.environ['RANK']}.pt")
    disconnect()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Results by rank: (collective cases, trainings)."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
    run_ranks([sys.executable, __file__, str(folder)], 4, environment)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def test_collectives_are_right(processes):
    check_cases([cases for cases, _ in processes])


def test_training_equals_the_threads(processes):
    for number, schedule in enumerate(("1f1b", "gpipe")):
        layout = tiny.layout(schedule, 4, data=1)
        model, options = tiny.TinyModel(), {"clip_norm": 0.5, "seed": tiny.SEED}
        expected = run_threads(layout, tiny, model, 4, train, **options)[0]
        for _, found in processes:
            torch.testing.assert_close(found[number], expected, rtol=1e-12, atol=1e-14)
            assert found[number]["differing"] == []


def test_the_rank_that_failed_is_told_and_not_one_that_waited_for_it():
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 ended[\s\S]*out of cheese") as e:
        run_ranks([sys.executable, __file__, "fail"], 2)
    assert e.value.exit_code == 3
    assert time.monotonic() - began_s < 40


def test_a_group_waits_no_longer_than_it_may():
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 0 ended"):
        run_ranks([sys.executable, __file__, "sleep"], 2)
    assert time.monotonic() - began_s < 60


def sleep():
    """Rank 1 never comes to what rank 0 waits for."""
    transport = connect_processes("cpu", timeout_s=10)
    group = transport.group((0, 1))
    if transport.rank == 1:
        time.sleep(120)
    group.all_reduce(torch.ones(1), "sum")


def fail():
    """Rank 1 gives up while rank 0 waits for it."""
    transport = connect_processes("cpu", timeout_s=60)
    group = transport.group((0, 1))
    if transport.rank == 1:
        raise Refused("out of cheese")
    group.all_reduce(torch.ones(1), "sum")


@pytest.mark.parametrize(
    ("variables", "device", "message"),
    [({}, "cpu", "RANK is not set"), (dict.fromkeys(ENVIRONMENT, "1"), "tpu", "not .cpu. or")],
)
def test_a_process_that_was_not_launched_is_told_how(monkeypatch, variables, device, message):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        connect_processes(device)


if __name__ == "__main__":
    tasks = {"fail": fail, "sleep": sleep}
    run_main(tasks.get(sys.argv[1], lambda: work(sys.argv[1])))
