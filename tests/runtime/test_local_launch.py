"""Starting local processes: the first failure is the one that is told, and nothing is left over."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.errors import RankFailed, UsageError
from runtime.launch import launch, run_ranks
from runtime.orphans import LAUNCHER, end_without_launcher

ROOT = Path(__file__).parents[2]
SLEEPER = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(os.getpid()))
{body}
time.sleep(60)
"""


def sleeper(folder, body):
    """A command whose ranks note their process id, run `body` and sleep."""
    return [sys.executable, "-c", SLEEPER.format(body=body), str(folder)]


def wait_for_ranks(folder, count):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ids = [path.read_text() for path in folder.iterdir()]
        if len(ids) == count and all(ids):
            return [int(text) for text in ids]
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def computes(process_id):
    """As `is_running`, but nobody may have asked an ended one for its code."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so):
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_rank_gets_its_place(tmp_path, capfd):
    (tmp_path / "train.py").write_text(
        "import os, sys, runtime.errors\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME', 'X']\n"
        "line = ' '.join(os.environ[n] for n in names) + ' ' + ' '.join(sys.argv[1:])\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(line)\n"
        "print('hello from', os.environ['RANK'])\n"
    )
    launch(tmp_path, 2, [str(tmp_path / "out"), "--lr"], {"X": "y"})
    assert (tmp_path / "out1").read_text() == f"1 1 2 127.0.0.1 lo y {tmp_path}/out --lr"
    assert capfd.readouterr().out == "hello from 0\n"


def test_the_first_rank_to_die_is_told_and_the_others_are_killed(tmp_path):
    body = (
        "while len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\n"
        "if os.environ['RANK'] == '2': sys.exit('the disk is full')"
    )
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 2 ended with exit code 1.*\n.*disk is full") as e:
        run_ranks(sleeper(tmp_path, body), 3)
    assert (e.value.rank, e.value.exit_code) == (2, 3)
    assert time.monotonic() - began_s < 20
    assert not any(is_running(process_id) for process_id in wait_for_ranks(tmp_path, 3))


def test_a_rank_that_ignores_the_request_is_killed(tmp_path):
    body = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(RankFailed, match="rank 1 was killed by signal 9"):
        run_ranks(sleeper(tmp_path, body), 2)
    assert not any(is_running(process_id) for process_id in wait_for_ranks(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(tmp_path, number):
    code = f"""import signal
from runtime.launch import run_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
run_ranks({sleeper(tmp_path, "")!r}, 2)"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    ids = wait_for_ranks(tmp_path, 2)
    parent.send_signal(number)
    assert parent.wait(20) != 0
    assert not any(is_running(process_id) for process_id in ids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("catches", [False, True])
def test_ranks_end_when_their_launcher_is_killed(tmp_path, catches):
    """It could not end them any more."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    body = (
        "from runtime.orphans import end_without_launcher; end_without_launcher()\n"
        f"{ignore if catches else ''}"
        "open(sys.argv[1] + os.environ['RANK'], 'w')"
    )
    (tmp_path / "ids").mkdir()
    command = sleeper(tmp_path / "ids", body)
    code = f"from runtime.launch import run_ranks; run_ranks({command!r}, 2)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    ids = wait_for_ranks(tmp_path / "ids", 2)
    wait_until(lambda: {"ids0", "ids1"} <= {path.name for path in tmp_path.iterdir()})
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(computes, ids)))


def test_a_process_that_no_launcher_started_watches_nothing(monkeypatch):
    monkeypatch.delenv(LAUNCHER, raising=False)
    before = threading.active_count()
    end_without_launcher()
    assert threading.active_count() == before


def test_whoever_sees_to_sigterm_goes_on_to_see_to_it(tmp_path):
    """Such as a command, which says that it was ended."""
    code = (
        "import signal\nfrom ir.interrupts import Ended, orderly_end\n"
        "from runtime.launch import run_ranks\n"
        "try:\n    with orderly_end():\n"
        f"        run_ranks({sleeper(tmp_path, '')!r}, 2)\n"
        "except Ended as end:\n    print(end.exit_code)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    ids = wait_for_ranks(tmp_path, 2)
    parent.send_signal(signal.SIGTERM)
    assert parent.communicate(timeout=20)[0] == "143\n"
    assert not any(is_running(process_id) for process_id in ids)


def test_a_users_error_keeps_its_exit_code(tmp_path):
    (tmp_path / "train.py").write_text(
        "from runtime.errors import UsageError, run_main\n"
        "def main(): raise UsageError('the batch is too small.')\n"
        "run_main(main)\n"
    )
    with pytest.raises(RankFailed, match="error: the batch is too small") as e:
        launch(tmp_path, 1)
    assert e.value.exit_code == 2


def test_an_error_that_was_passed_on_is_not_printed_again(tmp_path, capfd):
    (tmp_path / "train.py").write_text(
        "import os, time\nfrom runtime.errors import UsageError, run_main\n"
        "def main():\n    time.sleep(2 * int(os.environ['RANK']))\n"
        "    raise UsageError('the batch is too small.')\nrun_main(main)\n"
    )
    run_main_of = f"from runtime.launch import launch; launch({str(tmp_path)!r}, 2)"
    code = f"from runtime.errors import run_main; run_main(lambda: exec({run_main_of!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("the batch is too small") == 1
    assert "rank 0 ended with exit code 2" in ended.stderr
    assert "Its error is above." in ended.stderr


@pytest.mark.parametrize(("nproc", "message"), [(2, "no train.py"), (0, "no train.py")])
def test_a_folder_without_a_program_is_refused(tmp_path, nproc, message):
    with pytest.raises(UsageError, match=message):
        launch(tmp_path, nproc)


PAIR = """
import os, signal, sys, time
import torch
from runtime.errors import run_main
from runtime.processes import connect_processes


def main():
    transport = connect_processes("cpu")
    group = transport.group((0, 1))
    for step in range(10_000):
        group.all_reduce(torch.ones(1), "sum")
        if step == 50 and transport.rank == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)


run_main(main)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_only_lost_its_peer_leaves_the_word_to_the_verdict(tmp_path, capfd, victim):
    (tmp_path / "train.py").write_text(PAIR)
    with pytest.raises(RankFailed) as failed:
        launch(tmp_path, 2, [str(victim)])
    assert str(failed.value).startswith(f"rank {victim} was killed by signal 9 (SIGKILL), and the")
    assert "want of memory" in str(failed.value)
    assert capfd.readouterr() == ("", "")


def test_a_rank_whose_peer_is_gone_says_so_where_nobody_ends_it(tmp_path):
    (tmp_path / "train.py").write_text(PAIR)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared["MASTER_PORT"] = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py", "1"], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **shared, "PYTHONPATH": str(ROOT), "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    (_, error), _ = (rank.communicate(timeout=60) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert error.startswith("error: rank 0 lost its connection to another rank, which ended")
    assert error.count("\n") == 1


def test_ctrl_c_of_a_program_is_one_word(tmp_path):
    (tmp_path / "train.py").write_text(
        "from runtime.errors import run_main\n"
        "def main(): raise KeyboardInterrupt\n"
        "run_main(main)\n"
    )
    with pytest.raises(RankFailed, match=r"exit code 130.*\ninterrupted$"):
        launch(tmp_path, 1)
