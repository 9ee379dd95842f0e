"""Golden text of programs. To rewrite it: `python -m tests.codegen.test_golden_programs`."""

from pathlib import Path

import pytest

from codegen import emit
from tests.codegen.golden_plans import PLANS

GOLDEN = Path(__file__).parent.parent / "golden"


def golden_text(name: str) -> str:
    return emit(*PLANS[name]()).files["program.py"]


@pytest.mark.parametrize("name", PLANS)
def test_the_text_of_a_program(name: str) -> None:
    assert golden_text(name) == (GOLDEN / f"{name}.py.txt").read_text()


@pytest.mark.parametrize("name", PLANS)
def test_the_same_plan_gives_the_same_bytes(name: str) -> None:
    first, second = emit(*PLANS[name]()), emit(*PLANS[name]())
    assert first.files == second.files


if __name__ == "__main__":
    for written in PLANS:
        (GOLDEN / f"{written}.py.txt").write_text(golden_text(written))
