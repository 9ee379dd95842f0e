"""Imports an emitted program into this process, without leaving files behind.

Input: a `Program`. Output: the module of its program.py, and its layout tables. The program names
`runtime` itself; nothing here does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from codegen.emit import Program


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
