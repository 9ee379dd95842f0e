"""Where a traced node comes from: the module path and the line of the user's code.

Input: an fx node with the metadata of torch.export. Output: a `Source`. One call of the user, such
as batch_norm, becomes several nodes; all have its name.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch

from ir.graph import Source
from ir.trace.adapters import FxNode

TORCH_HOME = str(Path(torch.__file__).parent)
OWN_HOME = str(Path(__file__).parent)
PYTHON_HOME = sysconfig.get_path("stdlib")


def source_of(node: FxNode) -> Source:
    """Module path, `file:line` and function of the user's code behind a traced node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = path.removeprefix("model").removeprefix(".")
    function = (node.meta.get("torch_fn") or ("", ""))[1].rpartition(".")[2]
    for text in reversed((node.meta.get("stack_trace") or "").splitlines()):
        text = text.strip()
        if text.startswith("File") and TORCH_HOME not in text and OWN_HOME not in text:
            file, line = text.split('"')[1], text.split("line ")[1].split(",")[0]
            name = file.rsplit("/", 1)[-1]
            return Source(path, f"{name}:{line}" if line.isdigit() else name, function)
    return Source(path, "", function)


def in_users_words(text: str) -> str:
    """Tensors without memory, which torch captures with, are plain ones to the user."""
    return re.sub(r"\bFakeTensor\b", "Tensor", text).replace("fake tensor", "tensor")
