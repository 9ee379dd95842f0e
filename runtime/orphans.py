"""Ends a rank whose launcher was killed and can end it no more.

Input: the environment of `runtime.launch`, which names the launcher's process. A rank looks once a
second whether that is still its parent.
"""

import os
import signal
import threading
import time

LAUNCHER = "SHARDWRIGHT_LAUNCHER"
"""The environment variable with the number of the process that started the ranks."""
LOOK_S = 1.0
GRACE_S = 2.0  # between the request to end and the kill


def end_without_launcher() -> None:
    """Watches from now on, in a thread; does nothing in a process that no launcher started."""
    number = os.environ.get(LAUNCHER, "")
    if number.isdecimal() and os.getpgrp() == os.getpid():
        threading.Thread(target=_watch, args=(int(number),), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(os.getpid(), number)
        time.sleep(GRACE_S)
