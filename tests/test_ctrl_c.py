"""Ctrl-C at any moment of a command: exit code 130, one line, whatever is computed or imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright

SLOW_TORCH = """
import threading, time
def wait():
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        time.sleep(0.01)
open("begun", "w").close()
"""
IMPORTS = {
    "slow": "wait()",
    "in exec": "exec('wait()')",  # Python then ends by the signal, whatever the exit code
    "swallowed": "try: wait()\nexcept BaseException: pass\nwait()",
    "turned into another error": "try: wait()\nexcept BaseException: raise ImportError('twice')",
    "with threads": "for _ in range(2): threading.Thread(target=wait).start()\nwait()",
}


def as_in_a_terminal() -> None:
    """What runs these tests may have Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("body", IMPORTS.values(), ids=IMPORTS)
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path, body):
    (tmp_path / "torch.py").write_text(SLOW_TORCH + body + "\n")
    path = os.pathsep.join([str(tmp_path), str(Path(shardwright.__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path}, preexec_fn=as_in_a_terminal,
    )  # fmt: skip
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=15)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "shardwright: interrupted\n")
