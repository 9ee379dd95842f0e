"""Checks of an emitted program's syntax tree: what it imports, names, and deletes."""

import ast
import re
from collections.abc import Iterator

ALLOWED = {
    "torch", "types", "runtime", "runtime.collectives", "runtime.host", "runtime.program",
    "runtime.random", "runtime.zero",
}  # fmt: skip
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PASSED = {"ctx", "w", "g", "mesh", "early", "call", "saved", "pending"}


def functions(text: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def imported(text: str) -> set[str]:
    """The modules that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def words(text: str) -> Iterator[str]:
    """Every name, attribute and argument of a program."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                yield word
            case ast.keyword(arg=str(word)) | ast.FunctionDef(name=word):
                yield word


def read_names(node: ast.AST) -> set[str]:
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }


def written_names(node: ast.AST) -> set[str]:
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def is_block(name: str) -> bool:
    return not name.startswith("stage")


def misused(function: ast.FunctionDef, module_names: set[str]) -> list[str]:
    """Names of a block function read after their `del` or before they are set."""
    alive = {arg.arg for arg in function.args.args} | module_names
    wrong = []
    for statement in function.body:
        if isinstance(statement, ast.Delete):
            gone = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            wrong += [f"line {statement.lineno}: del {n}" for n in gone - alive]
            alive -= gone
            continue
        wrong += [f"line {statement.lineno}: {n}" for n in read_names(statement) - alive]
        alive |= written_names(statement)
    return wrong


def undeleted(function: ast.FunctionDef) -> set[str]:
    """Tensors of a block function that are alive at its end, not returned, not the prologue's."""
    alive = {arg.arg for arg in function.args.args}
    returned: set[str] = set()
    for statement in function.body:
        match statement:
            case ast.Delete(targets=targets):
                alive -= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.Return():
                returned |= read_names(statement)
            case ast.Assign(value=ast.Name(id="early")):
                pass
            case _:
                alive |= written_names(statement)
    return alive - returned - PASSED
