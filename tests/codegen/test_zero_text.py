"""What ZeRO changes in a program and its layout, and what it leaves alone."""

import ast
import json
from functools import cache

from codegen import emit
from tests.codegen.golden_plans import zero3
from tests.codegen.program_checks import functions


@cache
def program(zero: int) -> tuple[str, list[dict]]:
    """(program.py without the plan's hash, the state table) of the golden plan at a ZeRO stage."""
    graph, plan = zero3(zero)
    files = emit(graph, plan).files
    return files["program.py"].replace(plan.hash, ""), json.loads(files["layout.json"])["state"]


def test_the_first_stage_changes_the_layout_alone() -> None:
    assert program(1)[0] == program(0)[0]
    assert {entry["zero"] for entry in program(0)[1]} == {0}


def test_frozen_parameters_are_divided_as_parameters_are() -> None:
    frozen = [
        [entry["zero"] for entry in program(zero)[1] if not entry["trainable"]]
        for zero in (1, 2, 3)
    ]
    trained = [
        [entry["zero"] for entry in program(zero)[1] if entry["trainable"]] for zero in (1, 2, 3)
    ]
    assert frozen == [[0] * 4, [0] * 4, [3] * 4]
    assert trained == [[1] * 9, [2] * 9, [3] * 9]


def test_blocks_are_the_same_at_every_stage() -> None:
    texts = [functions(program(zero)[0]) for zero in range(4)]
    for text in texts[1:]:
        for name, function in text.items():
            if not name.startswith("stage"):
                assert ast.unparse(function) == ast.unparse(texts[0][name])


def test_nothing_is_gathered_for_a_backward_that_reads_no_weight() -> None:
    text = program(3)[0]
    assert "embed_backward(ctx, w.embed, grads, saved.pop()" in text
    assert "layers_backward(ctx, gather(w.layers[i], ctx.mesh), grads, saved.pop()" in text


def test_the_second_stage_scatters_and_gathers_nothing() -> None:
    text = program(2)[0]
    assert "gather(" not in text.replace("all_gather(", "")
    assert text.count("grads = zeros(") == text.count("scatter_add(g.") == 4
