"""Turns an emitted program into a running trainer, in this process.

Input: a model, its plan and, under torchrun, the process' rank. Output: the trainer of the emitted
module. The program is imported like any module; `runtime` is named by the program, not here.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen.emit import Program, emit
from ir.graph import Graph
from ir.plan import Plan


def load(program: Program) -> tuple[ModuleType, dict[str, Any]]:
    """(the imported program.py, the parsed layout.json) of an emitted program."""
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(program.files["program.py"])
        layout = json.loads(program.files["layout.json"])
        name = f"shardwright_program_{layout['plan']}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module, layout


def compile(  # noqa: A001  (the public name, as in torch.compile)
    graph: Graph, plan: Plan, model: Any, connect: Callable[..., Any], **options: Any
) -> Any:
    """Emits, imports and connects: `connect(module, layout, model, **options)` is the runtime's."""
    module, layout = load(emit(graph, plan))
    return connect(module, layout, model, **options)
