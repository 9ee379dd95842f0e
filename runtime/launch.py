"""Starts one process per rank on this machine, without torchrun, and looks after them.

On the command line: `python -m runtime.launch FOLDER [--nproc N] [-- ARGUMENTS OF train.py]`.
Rank 0's output is passed on as it comes. The first rank that dies ends the run: the others are
killed at once, and its last words are the error. Nothing is left behind, also after Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TypeAlias

from runtime.arguments import count
from runtime.errors import RankFailed, UsageError, run_main
from runtime.layout import load_layout
from runtime.orphans import GRACE_S, LAUNCHER

LAST_LINES = 30
Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


def launch(
    folder: Path | str,
    nproc: int | None = None,
    argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs FOLDER/train.py on `nproc` ranks (None: as many as its layout.json says) to the end.

    `env` is added to this process's environment. RankFailed tells which rank died first, and how.
    """
    check_folder(Path(folder))
    script = str(Path(folder) / "train.py")
    run_ranks([sys.executable, script, *argv], nproc or _planned_ranks(folder), env)


def check_folder(folder: Path) -> None:
    """A damaged program is refused before its ranks start."""
    has_layout = (folder / "layout.json").exists()
    for name in ("train.py", "program.py") if has_layout else ("train.py",):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}. Give the folder of an emitted program.")
    beside = folder / "run.json"
    try:
        known = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{beside} is not JSON ({error}). Emit the program again.") from error
    if not isinstance(known, dict):
        raise UsageError(f"{beside} is no JSON object. Emit the program again.")


def run_ranks(command: Sequence[str], nproc: int, env: Mapping[str, str] | None = None) -> None:
    """Runs a command once per rank and waits until all have ended well."""
    if nproc < 1:
        raise UsageError(f"can't start {nproc} processes; give at least 1.")
    port = _free_port()
    with _Processes() as processes:
        for rank in range(nproc):
            processes.start(command, rank, _environment(rank, nproc, port, env or {}))
        processes.wait()


class _Processes:
    """The running ranks; leaving the block ends those that still run."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._last_lines: dict[int, deque[str]] = {}
        self._pumps: dict[int, threading.Thread] = {}
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()

    def start(self, command: Sequence[str], rank: int, env: Mapping[str, str]) -> None:
        """Starts a rank in a session of its own, so that its children can be ended with it."""
        with _held_interrupts():  # until the process is known to `__exit__`
            process = self._running[rank] = subprocess.Popen(
                list(command),
                env=dict(env),
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._last_lines[rank] = deque(maxlen=LAST_LINES)
            assert process.stderr is not None  # it is a pipe
            self._pumps[rank] = _start_thread(self._pump, rank, process.stderr)
        _start_thread(self._watch, rank, process)

    def wait(self) -> None:
        """Returns when all ranks have ended with code 0; else raises for the first that did not."""
        for _ in range(len(self._running)):
            rank, code = self._ended.get()
            if code == 0:
                continue
            self._pumps[rank].join(GRACE_S)
            words = "".join(self._last_lines[rank]).rstrip()
            head = f"rank {rank} {_how(code)}, and the other ranks were stopped."
            whole = f"{head} Its last output:\n{words}" if words else f"{head} {_unsaid(code)}"
            raise RankFailed(
                whole,
                rank=rank,
                exit_code=code if code > 0 else 1,
                unseen=f"{head} Its error is above." if self._is_shown(rank) else whole,
            )

    def _is_shown(self, rank: int) -> bool:
        """Whether rank 0, whose output is passed on, said what that rank said last."""
        said = self._last_lines[rank]
        return bool(said) and said[-1] in tuple(self._last_lines[0])

    def __enter__(self) -> "_Processes":
        self._previous = _exit_on_termination()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        alive = [process for process in self._running.values() if process.poll() is None]
        for process in alive:
            _signal_session(process, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        for process in alive:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_session(process, signal.SIGKILL)
        for rank, process in self._running.items():
            process.wait()
            self._pumps[rank].join(GRACE_S)
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _pump(self, rank: int, stream: IO[str]) -> None:
        """Keeps a rank's last lines and passes rank 0's on."""
        for line in stream:
            self._last_lines[rank].append(line)
            if rank == 0:
                sys.stderr.write(line)

    def _watch(self, rank: int, process: subprocess.Popen[str]) -> None:
        """Notes the order in which the ranks end."""
        self._ended.put((rank, process.wait()))


def _environment(rank: int, nproc: int, port: int, added: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, plus defaults that the caller's own settings override."""
    cores = os.cpu_count() or 1
    root = str(Path(__file__).resolve().parent.parent)
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(max(1, cores // nproc))}
    merged = {**defaults, **os.environ, **added}
    paths = [root, *filter(None, [merged.get("PYTHONPATH")])]
    return {
        **merged,
        "PYTHONPATH": os.pathsep.join(paths),  # so that train.py finds this runtime
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _planned_ranks(folder: Path | str) -> int:
    return load_layout(Path(folder) / "layout.json").mesh.world_size


def _how(code: int) -> str:
    """How a process with this return code, as of `subprocess`, came to its end."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"was killed by signal {-code}{names.get(-code, '')}"


def _unsaid(code: int) -> str:
    """What is known of a process that printed no error."""
    if code == -signal.SIGKILL:
        return "It printed no error: someone killed it, or the system for want of memory (dmesg)."
    return "It printed no error."


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start_thread(run: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, daemon=True)
    thread.start()
    return thread


def _signal_session(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Signals a process and its children, unless it has just ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """As `ir.interrupts.held_interrupts`, which no emitted program has: Ctrl-C inside counts when
    this is left, also where another thread takes it, and the started process never hears of it."""
    came: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGINT)
    is_heard = threading.current_thread() is threading.main_thread() and callable(handler)
    if is_heard:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if came:
            signal.raise_signal(signal.SIGINT)


def _exit_on_termination() -> Handler:
    """Makes SIGTERM end this process the orderly way, as Ctrl-C does, unless whoever called this
    sees to that; the handler before."""
    if threading.current_thread() is not threading.main_thread():
        return None  # only the main thread may set handlers
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    return signal.signal(signal.SIGTERM, leave)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m runtime.launch", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of an emitted program")
    parser.add_argument("--nproc", type=count, help="ranks to start (default: as planned)")
    parser.add_argument("argv", nargs="*", help="arguments for train.py, after --")
    given = parser.parse_args()
    launch(given.folder, given.nproc, given.argv)


if __name__ == "__main__":
    run_main(main)
