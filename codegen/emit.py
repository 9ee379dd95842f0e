"""Emits a plan as a folder of readable Python.

Input: a traced graph and a plan for it. Output: a `Program`: file name -> text. The same plan
gives the same bytes. Nothing from outside becomes code: names are sanitised, and names of the
model's tensors stay in layout.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

import jinja2

from codegen.block_text import BlockText
from codegen.groups import Group, stage_groups
from codegen.host_text import FUNCTIONS as HOST_FUNCTIONS
from codegen.stage_text import StageText
from codegen.tables import layout_tables
from codegen.zero_text import FUNCTIONS as ZERO_FUNCTIONS
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.names import Namer
from ir.plan import Plan, spmd
from ir.quantities import size
from ir.schedules import splits_backward
from ir.seats import seats_of
from ir.spmd import Spmd
from ir.stage_devices import are_unlike, places_text
from ir.whole_file import check_folder

FILES = (
    "program.py", "layout.json", "plan.json", "train.py", "run.json", "launch.sh", "launch.slurm",
    "README.md",
)  # fmt: skip
"""Of an emitted program."""
LARGEST_CONSTANT = 4096
"""Elements of a captured constant that are still written into the program."""


@dataclass(frozen=True)
class Program:
    """An emitted program; `files` maps a file name to its text."""

    files: dict[str, str]
    ranks: int

    def for_model(self, model: str, *, seq: int | None) -> Program:
        """Adds run.json: the model and the sizes that train.py takes if it is not told others."""
        path, colon, function = model.partition(":")
        local = colon and path != "hf"
        name = f"{Path(path).resolve()}:{function}" if local else model
        text = json.dumps({"model": name, "seq": seq}, indent=1) + "\n"
        return replace(self, files={**self.files, "run.json": text})

    def write(self, folder: str | Path, *, force: bool = False) -> Path:
        """Writes all files, or none: refuses a folder that holds something unless `force`."""
        check_target(folder, force=force)
        target = Path(folder)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        except OSError as error:
            raise UsageError(f"can't write into {target.parent}: {error.strerror}.") from error
        try:
            draft.chmod(0o755)
            for name, text in self.files.items():
                (draft / name).write_text(text)
                if name.endswith(".sh"):
                    (draft / name).chmod(0o755)
            _move(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target


def check_target(folder: str | Path, *, force: bool = False) -> None:
    """Raises `UsageError` if no program can be written there; can be asked before planning."""
    target = Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise UsageError(f"{folder} is a file; give a folder to emit into.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(
            f"{folder} is not empty; emitting would mix two programs. Give another folder, or "
            "--force to replace the files that the program consists of."
        )
    for name in FILES:
        if (target / name).is_dir():
            raise UsageError(f"{target / name} is a folder where a file belongs; move it away.")
    there = next(parent for parent in target.parents if parent.exists())
    for place in (there, target) if target.exists() else (there,):
        check_folder(place, folder)


def _move(draft: Path, target: Path) -> None:
    """Puts a finished draft in place; existing other files of the target stay."""
    if not target.exists():
        draft.rename(target)
        return
    for path in draft.iterdir():
        os.replace(path, target / path.name)


def emit(graph: Graph, plan: Plan) -> Program:
    """The program of `plan`; raises `Refused` if the plan was made for another model."""
    whole = spmd(graph, plan)
    groups = tuple(stage_groups(whole, s) for s in range(len(whole.stages)))
    tables = layout_tables(whole, groups, plan)
    files = {
        "plan.json": json.dumps(plan.to_json(), indent=1) + "\n",
        "layout.json": json.dumps(tables, indent=1) + "\n",
        "program.py": program_text(whole, groups, plan),
    }
    where = seats_of(plan.cluster, plan.mesh.size)
    unlike = are_unlike(plan.cluster, plan.mesh)
    facts = {
        "plan": plan, "ranks": plan.mesh.size, "model": plan.model, "hash": plan.hash,
        "per_node": where.per_node, "nodes": where.nodes, "idle": plan.devices_idle,
        "used": where.text(plan.cluster),
        "places": places_text(plan.cluster, plan.mesh, "pipeline rank") if unlike else "",
        "peak": size(plan.prediction.peak_bytes), "capacity": size(plan.prediction.capacity_bytes),
    }  # fmt: skip
    for name in ("train.py", "launch.sh", "launch.slurm", "README.md"):
        files[name] = _template(f"{name}.jinja").render(**facts)
    return Program(files, plan.mesh.size)


@cache
def _template(name: str) -> jinja2.Template:
    text = resources.files("codegen").joinpath("templates", name).read_text()
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.from_string(text)


def program_text(whole: Spmd, groups: tuple[tuple[Group, ...], ...], plan: Plan) -> str:
    """program.py: the blocks, then the stages that call them."""
    splits = splits_backward(plan.schedule)
    blocks = _blocks(whole, groups, splits=splits)
    stages = [
        StageText(whole, s, groups[s], blocks, splits=splits) for s in range(len(whole.stages))
    ]
    lines: list[str] = []
    for block in blocks.values():
        lines += block.lines()
    for stage in stages:
        lines += stage.lines()
    body = "\n".join(lines)
    return "\n".join([
        *_head(plan, body), *_constants(whole), "", "", body.rstrip("\n"), "", "", "STAGES = (",
        *(stage.entry() for stage in stages), ")", "",
    ])  # fmt: skip


def _blocks(
    whole: Spmd, groups: tuple[tuple[Group, ...], ...], *, splits: bool
) -> dict[tuple[int, str], BlockText]:
    """One text per (variant, menu point) in use, in order of first use."""
    namer = Namer()
    texts: dict[tuple[int, str], BlockText] = {}
    for stage in groups:
        for group in stage:
            key = (group.variant, group.keep)
            if key not in texts:
                name = namer(whole.kinds[group.variant].block.name, default="block")
                texts[key] = BlockText(whole, *key, name, splits=splits)
    return texts


def _head(plan: Plan, body: str) -> list[str]:
    mesh = plan.mesh
    imports = [
        name for name in ("all_gather", "all_reduce", "all_to_all", "first", "reduce_scatter",
                          "shard") if f" {name}(" in body
    ]  # fmt: skip
    lines = [
        '"""One training step on '
        f"pipeline={mesh.pipeline} data={mesh.data} tensor={mesh.tensor}, plan {plan.hash}.",
        "",
        "Each block has a forward and a backward in the shapes of one rank; stages call them.",
        "Behind each line: the local shape, and which dims are cut over which mesh axis.",
        '"""',
        "",
        "from types import SimpleNamespace",
        "",
        "import torch",
        "",
    ]
    if "ops." in body.replace("torch.ops.", ""):
        lines.append("from runtime import ops")
    if imports:
        lines.append(f"from runtime.collectives import {', '.join(imports)}")
    hosting = [name for name in HOST_FUNCTIONS if f" {name}(" in body or f"({name}(" in body]
    if hosting:
        lines.append(f"from runtime.host import {', '.join(hosting)}")
    lines.append("from runtime.program import Stage")
    if " dropout(" in body:
        lines.append("from runtime.random import dropout")
    divided = [name for name in ZERO_FUNCTIONS if f" {name}(" in body]
    if divided:
        lines.append(f"from runtime.zero import {', '.join(divided)}")
    return lines


def _constants(whole: Spmd) -> list[str]:
    """Tensors that tracing captured as constants, by name."""
    held = [state for state in whole.graph.state if state.kind == "constant"]
    if not held:
        return []
    lines = ["", "CONSTANTS = {"]
    for state in held:
        if state.data.numel() > LARGEST_CONSTANT:
            raise Refused(
                f"the model captures a constant tensor of {state.data.numel()} elements; make it a "
                "registered buffer, so that it is not written into the program."
            )
        values, dtype = _literal(state.data.tolist()), state.type.dtype
        lines.append(f'    "{state.names[0]}": torch.tensor({values}, dtype=torch.{dtype}),')
    return [*lines, "}"]


def _literal(values: object) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(map(_literal, values)) + "]"
    text = repr(values)
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text
