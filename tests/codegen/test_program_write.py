"""Writing a program: all of its files or none."""

import json
from pathlib import Path

import pytest

from codegen import Program
from ir.errors import UsageError

PROGRAM = Program({"program.py": "STAGES = ()\n", "launch.sh": "#!/bin/sh\n"}, 1)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_folder_holds_the_files(tmp_path: Path) -> None:
    folder = PROGRAM.write(tmp_path / "new" / "folder")
    assert names(folder) == set(PROGRAM.files)
    assert (folder / "launch.sh").stat().st_mode & 0o111
    assert names(tmp_path / "new") == {"folder"}


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    assert names(PROGRAM.write(tmp_path)) == set(PROGRAM.files)


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty.*--force"):
        PROGRAM.write(tmp_path)
    assert names(tmp_path) == {"mine.txt"}


def test_force_replaces_the_program_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "program.py").write_text("old")
    PROGRAM.write(tmp_path, force=True)
    assert names(tmp_path) == {"mine.txt", *PROGRAM.files}
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert (tmp_path / "program.py").read_text() == PROGRAM.files["program.py"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = Program({"program.py": "fine", "layout.json": None}, 1)  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        broken.write(tmp_path / "folder")
    assert names(tmp_path) == set()


def test_a_folder_in_the_place_of_a_file_stops_before_anything_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").mkdir()
    (tmp_path / "program.py").write_text("old")
    with pytest.raises(UsageError, match="launch.sh"):
        PROGRAM.write(tmp_path, force=True)
    assert (tmp_path / "program.py").read_text() == "old"


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(UsageError, match="is a file"):
        PROGRAM.write(tmp_path / "file")
    with pytest.raises(UsageError, match="can't be written: .*file is a file, not a folder"):
        PROGRAM.write(tmp_path / "file" / "folder")


def test_run_json_names_a_model_file_by_its_whole_path(tmp_path: Path) -> None:
    program = PROGRAM.for_model("model.py:build", seq=None)
    assert json.loads(program.files["run.json"])["model"].endswith("/model.py:build")
