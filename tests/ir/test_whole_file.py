"""Files are written whole or not at all, and places that take none are known beforehand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ir.errors import UsageError
from ir.whole_file import check_writable, whole_file, write_whole

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(("place", "said"), [
    ("folder", "folder is a folder: name a file in it"),
    ("nowhere/file", "can't be written: there is no folder .*nowhere"),
    ("old/file", "can't be written: .*old is a file, not a folder"),
    ("n" * 300, "can't be written: File name too long"),
    ("/proc/file", "/proc/file can't be written: No such file or directory in /proc"),
])  # fmt: skip
def test_a_place_that_takes_no_file_is_named_with_the_reason(tmp_path, place, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_text("before")
    for attempt in (check_writable, lambda path: write_whole(path, "after")):
        with pytest.raises(UsageError, match=said):
            attempt(tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == ["folder", "old"]


def test_asking_changes_nothing(tmp_path):
    (tmp_path / "old").write_text("before")
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "before"


def test_what_fails_half_way_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file") as handle:
        handle.write("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "before"


def test_a_disk_that_is_full_is_a_users_error():
    with pytest.raises(UsageError, match="/dev/full can't be written: No space left"):
        write_whole("/dev/full", "text")


def test_a_link_keeps_being_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_a_pipe_is_written_to():
    code = "from ir.whole_file import write_whole; write_whole('/dev/stdout', 'text')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "text")
