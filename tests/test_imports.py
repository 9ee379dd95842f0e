"""The rooms of the repository: who may import whom, what stays private, how long a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {  # room -> the rooms of ours that it may import
    "ir": {"ir"},
    "planner": {"planner", "ir"},
    "codegen": {"codegen", "ir"},
    "runtime": {"runtime"},
}
# these may import every room
DOORS = ("calibration", "checking", "deciding", "explaining", "prediction", "shardwright")
FRONT = {*DOORS, "tests", "examples", "benchmarks"}
OURS = ROOMS.keys() | FRONT
LONGEST = 400


def sources() -> list[Path]:
    """Every Python file of ours, relative to the root."""
    files = [Path(f"{name}.py") for name in DOORS]
    for folder in sorted(OURS - set(DOORS)):
        files += sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    return files


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module of `package` imports, also through importlib."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                kept = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*kept, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{name.name}") for name in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(func).rpartition(".")[2] in {"import_module", "__import__"}:
                    yield node.lineno, name


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of attributes on a name, else None."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            base = dotted(value)
            return base and f"{base}.{attr}"
    return None


def is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.endswith("__") for p in parts)


def torch_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> the torch module or object that an import bound to it."""
    bound = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {n.asname: n.name for n in node.names if n.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    return {name: full for name, full in bound.items() if full.split(".")[0] == "torch"}


def check_direction(path: Path, tree: ast.AST) -> Iterator[str]:
    """One line per import that crosses a wall."""
    room = path.parts[0]
    if room not in ROOMS:
        return
    for line, name in imported(tree, ".".join(path.parent.parts)):
        target = name.split(".")[0]
        if target in OURS and target not in ROOMS[room]:
            yield f"{path}:{line}: {room} may not import {target} ({name})"


def check_private(path: Path, tree: ast.AST) -> Iterator[str]:
    """One line per private torch name; only ir/trace may use them, and tests as oracles."""
    if path.parts[:2] == ("ir", "trace") or path.parts[0] == "tests":
        return
    for line, name in imported(tree, ".".join(path.parent.parts)):
        if is_private(name):
            yield f"{path}:{line}: {name} is private to torch; wrap it in ir/trace"
    bound = torch_names(tree)
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name and (first := name.split(".")[0]) in bound:
            full = bound[first] + name.removeprefix(first)
            if is_private(full) and not is_private(full.rpartition(".")[0]):
                yield f"{path}:{node.lineno}: {full} is private to torch; wrap it in ir/trace"


def check_size(path: Path, source: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines > LONGEST:
        yield f"{path}: {lines} lines, more than {LONGEST}; split it"


def check(path: Path, source: str) -> list[str]:
    """Everything that is wrong with one file."""
    tree = ast.parse(source)
    return [
        *check_direction(path, tree),
        *check_private(path, tree),
        *check_size(path, source),
    ]


def test_the_repository_keeps_its_rooms():
    files = sources()
    assert {path.parts[0] for path in files} >= {"ir", "planner", "codegen", "runtime", "tests"}
    found = [line for path in files for line in check(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("planner/a.py", "import codegen.emit", "planner may not import codegen"),
        ("planner/a.py", "def f():\n    import runtime.launch", "planner may not import runtime"),
        ("ir/trace/a.py", "import planner", "ir may not import planner"),
        ("codegen/a.py", "from runtime import program", "codegen may not import runtime"),
        ("codegen/a.py", "import_module('planner.x')", "codegen may not import planner"),
        ("runtime/a.py", "from ir.graph import Graph", "runtime may not import ir"),
        ("runtime/a.py", "import shardwright", "runtime may not import shardwright"),
        ("ir/ops/a.py", "from ...planner import x", "ir may not import planner"),
        ("runtime/a.py", "import torch._inductor.config", "torch._inductor.config is private"),
        ("runtime/a.py", "from torch import _C", "torch._C is private"),
        ("runtime/a.py", "import torch\ntorch._C._fft", "torch._C is private"),
        ("planner/a.py", "import torch.nn as n\nn._x(1)", "torch.nn._x is private"),
        ("runtime/a.py", "from torch import nn\nnn.Module._call(1)", "torch.nn.Module._call is"),
        ("ir/a.py", "x = 1\n" * 401, "401 lines, more than 400"),
    ],
)
def test_the_check_can_fail(file, source, complaint):
    found = check(Path(file), source)
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("planner/a.py", "from ir.graph import Graph\nfrom planner import cost\nfrom . import b"),
        ("ir/trace/a.py", "import torch._dynamo\nfrom ..graph import Graph"),
        ("runtime/a.py", "import torch\nprint(torch.__version__)\nself._torch._x"),
        ("shardwright.py", "import planner, codegen, runtime, ir"),
        ("examples/a.py", "import shardwright, runtime"),
    ],
)
def test_the_check_lets_the_rest_pass(file, source):
    assert check(Path(file), source) == []
