"""Ctrl-C ends a block whatever becomes of its exception, and leaves cleaning up alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from ir import interrupts
from ir.interrupts import INTERRUPTED, TERMINATED, Ended, held_interrupts, orderly_end
from runtime import launch

WAIT_S = 20.0


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def interrupt_another_thread() -> None:
    """The system gives a process's signal to any thread that has it not blocked."""
    done = threading.Event()
    other = threading.Thread(target=done.wait, daemon=True)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    other.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.pthread_kill(other.ident, signal.SIGINT)
    done.set()


def wait() -> None:
    """As a search does; an exception of a handler gets through."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.01)


class Swallower:
    """Loses what is raised in it, as destructors do."""

    def __del__(self) -> None:
        interrupt()


def swallowed_by_a_library() -> None:
    with suppress(BaseException):
        interrupt()


def swallowed_by_a_destructor() -> None:
    Swallower()


def turned_into_another_error() -> None:
    try:
        interrupt()
    except BaseException:
        raise ImportError("cannot load module more than once per process") from None


@pytest.fixture(autouse=True)
def terminal():
    """Ctrl-C as in a terminal, also where these tests run with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "happens", [swallowed_by_a_library, swallowed_by_a_destructor, turned_into_another_error]
)
def test_a_lost_interrupt_is_raised_again(happens, capfd):
    began_s = time.monotonic()
    with pytest.raises(Ended) as ended, orderly_end():
        happens()
        wait()
    assert ended.value.exit_code == INTERRUPTED
    assert time.monotonic() - began_s < WAIT_S / 2
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_that_comes_too_late_to_stop_anything_is_told():
    with pytest.raises(Ended), orderly_end(), suppress(KeyboardInterrupt):
        interrupt()


def test_cleaning_up_is_not_disturbed():
    cleaned = []

    def clean() -> None:
        try:
            raise OSError("no such folder")
        except OSError:
            interrupt()
            time.sleep(0.5)  # several looks, and a second Ctrl-C
        cleaned.append(True)

    with pytest.raises(Ended), orderly_end():
        try:
            interrupt()
        finally:
            clean()
    assert cleaned


def test_what_goes_on_in_a_handler_is_not_cleaning_up(monkeypatch):
    monkeypatch.setattr(interrupts, "CLEANING_S", 0.3)
    began_s = time.monotonic()
    with pytest.raises(Ended), orderly_end():
        try:
            interrupt()
        except BaseException:
            wait()
    assert 0.3 < time.monotonic() - began_s < WAIT_S / 2


def test_sigterm_has_its_own_code_and_the_first_signal_counts():
    with pytest.raises(Ended) as ended, orderly_end():
        try:
            interrupt(signal.SIGTERM)
        finally:
            interrupt()
    assert ended.value.exit_code == TERMINATED


def test_errors_in_destructors_are_told_again_afterwards():
    before = sys.unraisablehook
    with pytest.raises(Ended), orderly_end():
        interrupt()
    assert sys.unraisablehook == before


def test_handlers_are_afterwards_as_before_and_an_ignored_signal_stays_ignored():
    with orderly_end():
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with orderly_end():
        interrupt()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize("send", [interrupt, interrupt_another_thread])
def test_a_held_interrupt_counts_afterwards_and_children_never_hear_of_it(send):
    sleeper = [sys.executable, "-c", "input(); print('well')"]
    is_left = False
    with pytest.raises(Ended), orderly_end():
        with held_interrupts():
            child = subprocess.Popen(
                sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            send()
            child.send_signal(signal.SIGINT)
            time.sleep(0.05)
            is_left = True
        raise AssertionError("the interrupt came to nothing")
    assert is_left
    assert child.communicate("\n", timeout=WAIT_S)[0] == "well\n"


def test_a_rank_is_known_before_an_interrupt_counts(monkeypatch):
    """Else nobody would end it."""
    start = subprocess.Popen

    def interrupted(*args, **options):
        process = start(*args, **options)
        interrupt_another_thread()
        time.sleep(0.05)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    ranks = launch._Processes()
    with pytest.raises(KeyboardInterrupt), ranks:
        ranks.start([sys.executable, "-c", "import time; time.sleep(60)"], 0, os.environ)
    assert ranks._running[0].returncode == -signal.SIGTERM


def test_a_signal_that_is_seen_as_the_block_ends_starts_no_timer(monkeypatch):
    """It would end the process when the handler of its alarm is gone."""
    stop = signal.setitimer

    def stop_and_interrupt(*times):
        stop(*times)
        monkeypatch.undo()
        interrupt()

    with pytest.raises(Ended), orderly_end():
        monkeypatch.setattr(signal, "setitimer", stop_and_interrupt)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
