"""What offload changes in a program and its layout, and what it leaves alone."""

import ast
import json

from codegen import emit
from ir.graph import Graph
from ir.lower import Degrees
from ir.offload import staying_inputs
from ir.plan import Plan
from ir.recompute import kept_values
from ir.spmd import lower_all
from tests.codegen.program_checks import functions
from tests.hand_plan import (
    even_stages,
    hand_plan,
    keep_all,
    kinds_of,
    state_of,
    whole_shardings,
)
from tests.numbers.test_zero_numbers import prepared


def planned(offload: str, *, hosts: bool) -> tuple[Graph, Plan]:
    """A model with ties and repeated layers, everything kept, all that may be on the host."""
    graph, _, _ = prepared("special")
    degrees = Degrees(12, 2, 1, 2)
    batch_flow, kinds = kinds_of(graph)
    shardings = whole_shardings(kinds)
    lowered = lower_all(graph, batch_flow, kinds, shardings, degrees)
    keeps = keep_all(graph, kinds, lowered)
    far = [
        {"none": frozenset(kept_values(piece, keep["none"], state_of(graph, kind, piece)))
         - staying_inputs(graph, kind)}
        for kind, piece, keep in zip(kinds, lowered, keeps, strict=True)
    ]  # fmt: skip
    plan = hand_plan(
        graph, degrees, kinds, shardings, keeps, even_stages(graph, 1), offload=offload,
        hosts=far if hosts else (),
    )  # fmt: skip
    return graph, plan


def files(offload: str, *, hosts: bool = False) -> dict[str, str]:
    graph, plan = planned(offload, hosts=hosts)
    found = emit(graph, plan).files
    return {**found, "program.py": found["program.py"].replace(plan.hash, "")}


def test_optimizer_state_changes_the_layout_alone() -> None:
    near, far = files("none"), files("optimizer")
    assert near["program.py"] == far["program.py"]
    state = json.loads(far["layout.json"])["state"]
    assert [entry.get("hosted", False) for entry in state] == [e["trainable"] for e in state]
    assert "hosted" not in near["layout.json"]


def test_a_block_stores_when_it_ends_and_fetches_when_it_starts() -> None:
    near, far = (functions(files("activations", hosts=h)["program.py"]) for h in (False, True))
    assert near.keys() == far.keys()
    stored = fetched = 0
    for name, function in far.items():
        text = ast.unparse(function)
        if "store(" in text:
            assert name.endswith("_forward")
            assert "store(" in ast.unparse(function.body[-1])
            stored += 1
        if "fetch(" in text:
            lines = [ast.unparse(line) for line in function.body]
            start = next(i for i, line in enumerate(lines) if line.endswith("= saved"))
            assert lines[start + 1] == "del saved"
            assert lines[start + 2].endswith("= fetch(on_host)")
            assert lines[start + 3] == "del on_host"
            fetched += 1
        if name.startswith("stage"):
            assert text == ast.unparse(near[name])
    assert stored == fetched > 1


def test_the_program_imports_what_it_calls() -> None:
    assert "from runtime.host import fetch, store" in files("activations", hosts=True)["program.py"]
    assert "runtime.host" not in files("activations")["program.py"]
