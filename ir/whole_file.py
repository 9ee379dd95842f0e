"""Files that are written whole or not at all, at places that are known to take them.

Input: a path. Output: a file that takes the path's place once all of it is written. A place that
takes no file is a `UsageError` with the path and the reason, which can be had before any work.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ir.errors import UsageError


def check_writable(path: str | Path, source: str | Path | None = None) -> None:
    """Raises `UsageError` if no file can be written there; leaves nothing behind.

    `source`, which the file is made from, is not overwritten.
    """
    target = Path(path).resolve()
    try:
        if source is not None and target == Path(source).resolve():
            raise UsageError(f"{path} is what is read: write to another file.")
        if target.is_dir():
            raise UsageError(f"{path} is a folder: name a file in it.")
        if Path(path).exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{path} can't be written: no permission.")
        if not _is_special(path):
            check_folder(target.parent, path)
    except OSError as error:  # a name that is too long, say
        raise UsageError(f"{path} can't be written: {error.strerror}.") from error


def check_folder(folder: Path, path: str | Path) -> None:
    """Raises `UsageError` if no file can be made in `folder`, where `path` is to be."""
    if not folder.exists():
        raise UsageError(f"{path} can't be written: there is no folder {folder}.")
    if not folder.is_dir():
        raise UsageError(f"{path} can't be written: {folder} is a file, not a folder.")
    try:
        with tempfile.TemporaryFile(dir=folder):  # has no name, so none is left
            pass
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror} in {folder}.") from error


@contextmanager
def whole_file(path: str | Path, source: str | Path | None = None) -> Iterator[IO[str]]:
    """A text file to write to; `path` is as it was if anything fails before the end.

    A pipe or a device, such as /dev/stdout, is written to directly. Raises as `check_writable`
    does, also where writing fails: a full disk, say.
    """
    check_writable(path, source)
    target = Path(path).resolve()
    is_special = _is_special(path)
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    part = Path(path) if is_special else draft
    try:
        with part.open("w", newline="", encoding="utf-8") as handle:
            yield handle
        if not is_special:
            os.replace(part, target)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from error
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with whole_file(path) as handle:
        handle.write(text)


def _is_special(path: str | Path) -> bool:
    """Whether it is there and neither a file nor a folder: a pipe or a device."""
    return Path(path).exists() and not Path(path).is_file()
