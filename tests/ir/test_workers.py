"""Requests answered in several processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ir.errors import Refused
from ir.workers import Workers, ahead

ROOT = Path(__file__).parents[2]


def in_one_thread(call: str) -> str:
    """What a function of this module prints, in a process that can be copied."""
    code = f"import test_workers; test_workers.{call}"
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    made = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0 and not made.stderr, made.stderr
    return made.stdout


def started(processes: int = 2) -> Workers:
    found = Workers(Counter(), processes)
    found.start()
    assert len(found._copies) == processes - 1
    return found


class Counter:
    """Answers (key, how often that key was asked before, the process)."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, key: str) -> tuple[str, int, int]:
        if key == "refused":
            raise Refused("the reason")
        if key == "killed" and self.counts.get("a main process") is None:
            os.kill(os.getpid(), signal.SIGKILL)
        self.counts[key] = self.counts.get(key, -1) + 1
        return key, self.counts[key], os.getpid()


def print_answers() -> None:
    with started() as workers:
        asked = [(key, key) for key in "abcabca"]
        found = [answer for _ in range(2) for answer in workers.answers(asked)]
        print(*(f"{key}{count}" for key, count, _ in found), len({pid for *_, pid in found}))
        owners = {key: {pid for k, _, pid in found if k == key} for key in "abc"}
        print(*(len(pids) for pids in owners.values()))


def test_each_key_has_one_process_and_all_processes_are_used() -> None:
    assert in_one_thread("print_answers()").split("\n") == [
        "a0 b0 c0 a1 b1 c1 a2 a3 b2 c2 a4 b3 c3 a5 2", "1 1 1", "",
    ]  # fmt: skip


def print_refusal() -> None:
    with started() as workers:
        try:
            workers.answers([("a", "a"), ("b", "refused"), ("c", "c")])
        except Refused as error:
            print(error, *(count for _, count, _ in workers.answers([("a", "a"), ("b", "b")])))


def test_an_error_of_a_copy_is_raised_here_and_the_others_were_answered() -> None:
    assert in_one_thread("print_refusal()") == "the reason 1 0\n"


def print_killed() -> None:
    with started() as workers:
        workers.serve.counts["a main process"] = 0
        found = workers.answers([("a", "a"), ("b", "b"), ("c", "killed"), ("d", "d")])
        found += workers.answers([("c", "c")])
        print(*(f"{key}{count}" for key, count, _ in found), {pid for *_, pid in found}
              == {os.getpid()})


def test_what_a_killed_copy_did_not_answer_is_answered_here() -> None:
    assert in_one_thread("print_killed()") == "a0 b0 killed0 d0 c0 False\n"


def print_in_flight(kill: bool) -> None:
    """Two lists are asked for before the first answers are waited for."""
    with started() as workers:
        workers.serve.counts["a main process"] = 0
        first = workers.ask([("a", "a"), ("b", "b"), ("a", "killed" if kill else "a")])
        second = workers.ask([("b", "b"), ("a", "a"), ("c", "c")])
        found = [*workers.finish(first), *workers.finish(second)]
        print(*(f"{key}{count}" for key, count, _ in found))


def test_what_is_asked_later_is_answered_later() -> None:
    assert in_one_thread("print_in_flight(False)") == "a0 b0 a1 b1 a2 c0\n"


def print_started_late() -> None:
    with Workers(Counter(), 2) as workers:
        first = workers.ask([("a", "a"), ("b", "b")])
        workers.start()
        later = workers.ask([(key, key) for key in "acbd"])
        found = [answer for asked in (first, later) for answer in workers.finish(asked)]
    print(*(f"{key}{count}" for key, count, _ in found))
    print(*(pid == os.getpid() for *_, pid in found))


def test_copies_made_while_something_is_asked_take_other_keys() -> None:
    told = in_one_thread("print_started_late()").split("\n")
    assert told[0] == "a0 b0 a1 c0 b1 d0"
    words = told[1].split(" ")
    assert [words[n] for n in (0, 1, 2, 4)] == ["True"] * 4 and "False" in (words[3], words[5])


def test_a_killed_copy_leaves_all_that_it_was_asked() -> None:
    """Here nothing was asked of a yet."""
    assert in_one_thread("print_in_flight(True)") == "a0 b0 killed0 b1 a0 c0\n"


class Thing:
    """Equal to itself only."""


THINGS = Thing(), Thing()


def print_shared() -> None:
    with Workers(lambda thing: (thing, THINGS[1], os.getpid()), 2, shared=THINGS) as workers:
        workers.start()
        found = workers.answers([("a", THINGS[0]), ("b", THINGS[0])])
        print(*((first is THINGS[0], second is THINGS[1]) for first, second, _ in found))
        print(len({pid for *_, pid in found}))


def test_shared_objects_stay_the_same() -> None:
    assert in_one_thread("print_shared()") == "(True, True) (True, True)\n2\n"


def refuse() -> None:
    raise Refused("the reason")


def print_ahead() -> None:
    here = os.getpid()
    with ahead(os.getpid) as other, ahead(refuse) as refused, ahead(lambda: refuse) as local:
        print(other() != here, local() is refuse)
        try:
            refused()
        except Refused as error:
            print(error)
    with ahead(lambda: [lambda: here]) as not_copied, ahead(lambda: time.sleep(60)):
        print(not_copied()[0]() == here)


def test_a_function_is_called_ahead() -> None:
    """Also one that fails, whose answer can't be copied, or that nobody waits for."""
    assert in_one_thread("print_ahead()").split("\n") == ["True True", "the reason", "True", ""]


def print_late() -> None:
    with started() as workers:
        print(workers.answers([("a", "a"), ("b", "b")], until_s=time.monotonic() - 1))


def test_requests_after_the_time_are_not_begun() -> None:
    assert in_one_thread("print_late()") == "[None, None]\n"


def print_gone() -> None:
    workers = started(3)
    print(*(copy.process.pid for copy in workers._copies), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")
def test_copies_end_with_a_killed_process() -> None:
    code = "import test_workers; test_workers.print_gone()"
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    made = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    copies = [int(word) for word in made.stdout.split()]
    assert len(copies) == 2
    until_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in copies) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not [pid for pid in copies if Path(f"/proc/{pid}").exists()]


def test_one_process_answers_alone() -> None:
    with Workers(Counter(), 1) as workers:
        workers.start()
        found = workers.answers([("a", "a"), ("a", "a")])
    assert found == [("a", 0, os.getpid()), ("a", 1, os.getpid())]
