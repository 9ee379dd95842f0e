"""Captures a module as a flat functional graph of lifted operations.

Input: a module whose forward takes tensors and returns a flat list of tensors, and examples of
those tensors with their batch dims. Output: a `Capture`: an fx graph on fake tensors without
mutation, its placeholders tied to state or inputs, and the map from torch's size symbols to
expressions in `BATCH`.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from ir.errors import CaptureError, ShardwrightError
from ir.graph import BATCH
from ir.trace.adapters import (
    FakeTensorMode,
    expression,
    make_fx,
    preserve_meta,
    remembering_no_shapes,
    symbols_kept,
)
from ir.trace.calls import OtherCalls
from ir.trace.interpret import Lift, unlifted
from ir.trace.lengths import symbolic_lengths
from ir.trace.quiet import unprinted
from ir.trace.reasons import chain, reason_of
from ir.trace.source import OWN_HOME, PYTHON_HOME, TORCH_HOME, source_of
from ir.trace.unchanged import unchanged


@dataclass
class Capture:
    """A captured forward. `state` and `inputs` map placeholder names to their origin."""

    graph: fx.Graph
    state: dict[str, str]
    inputs: dict[str, int]
    constants: dict[str, Tensor]
    outputs: list[fx.Node]
    updates: dict[str, fx.Node]
    sizes: dict[sympy.Symbol, Any]
    guards: list[sympy.Basic] = field(default_factory=list)


def capture(module: nn.Module, examples: list[Tensor], batch_dims: list[dict[int, Any]]) -> Capture:
    """Exports `module(*examples)`; `batch_dims[i]` maps a symbolic dim to its size in `BATCH`."""
    shapes = tuple(
        dict.fromkeys(dims, torch.export.Dim.AUTO) if dims else None for dims in batch_dims
    )
    try:
        with (
            unchanged(module), _no_custom_derivatives(), OtherCalls(), unprinted(),
            remembering_no_shapes(), symbolic_lengths(module),
        ):  # fmt: skip
            program = torch.export.export(
                module, tuple(examples), dynamic_shapes={"tensors": shapes}, strict=False
            )
        return _functional(program, batch_dims)
    except ShardwrightError:
        raise
    except Exception as error:
        nested = next((e for e in chain(error) if isinstance(e, ShardwrightError)), None)
        raise nested or explain(error, module) from error


@contextmanager
def _no_custom_derivatives() -> Iterator[None]:
    """Refuses a user's torch.autograd.Function: export keeps its forward but loses its backward.
    Its `apply` may have been stored before, so what that calls first is replaced."""
    function = torch.autograd.function
    original: Any = function._is_setup_context_defined

    def look(setup_context: Any) -> bool:
        cls = sys._getframe(1).f_locals["cls"]
        if not cls.__module__.startswith("torch."):
            raise CaptureError(
                f"{cls.__module__}.{cls.__qualname__} is a torch.autograd.Function: its own "
                "backward can't be captured. Write it with plain operations, whose derivatives "
                "torch knows."
            )
        return bool(original(setup_context))

    function._is_setup_context_defined = look
    try:
        yield
    finally:
        function._is_setup_context_defined = original


def _functional(
    program: torch.export.ExportedProgram, batch_dims: list[dict[int, Any]]
) -> Capture:
    """Removes mutation and rewrites to lifted operations in one pass."""
    module = program.graph_module
    _refuse_hidden_writes(module)
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta["val"] for node in holders]
    mode = next(f.fake_mode for f in fakes if hasattr(f, "fake_mode"))
    counter = [0]
    with mode, symbols_kept(), torch.no_grad():
        flat = _lifted(module, fakes, counter)
        if unlifted(flat.graph):
            flat = _lifted(flat, fakes, counter)
    nodes = [node for node in flat.graph.nodes if node.op == "placeholder"]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["val"] = fake
    origin = {new.name: old.name for new, old in zip(nodes, holders, strict=True)}
    return _bind(program, flat, origin, batch_dims, mode)


def _lifted(module: fx.GraphModule, fakes: list[Tensor], counter: list[int]) -> fx.GraphModule:
    def run(*tensors: Tensor) -> Any:
        with preserve_meta():
            return Lift(module, counter=counter).run(*tensors)

    flat: fx.GraphModule = make_fx(torch.func.functionalize(run, remove="mutations"))(*fakes)
    return flat


def _bind(
    program: torch.export.ExportedProgram, flat: fx.GraphModule, origin: dict[str, str],
    batch_dims: list[dict[int, Any]], mode: FakeTensorMode,
) -> Capture:  # fmt: skip
    signature = program.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    user = [name for name in signature.user_inputs if isinstance(name, str)]
    state = {new: named[old] for new, old in origin.items() if old in named}
    inputs = {new: user.index(old) for new, old in origin.items() if old in user}
    constants = {
        new: program.constants[lifted[old]] for new, old in origin.items() if old in lifted
    }
    updates = {}
    for node in list(flat.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            holder = node.args[0].name
            if holder in constants:
                _refuse_constant_write(lifted.get(origin.get(holder, ""), "a tensor"))
            updates[holder] = node.args[1]
            flat.graph.erase_node(node)
        elif node.op == "get_attr":
            constants[node.name] = getattr(flat, node.target)
            node.meta["val"] = mode.from_tensor(constants[node.name])
    output = next(node for node in flat.graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    sizes = _size_map(flat, inputs, batch_dims)
    shapes = mode.shape_env
    assert shapes is not None
    guards = [g.expr.subs(shapes.replacements).subs(sizes) for g in shapes.guards]
    return Capture(
        flat.graph, state, inputs, constants, list(results), updates, sizes,
        [g for g in guards if g.free_symbols == {BATCH}],
    )  # fmt: skip


def _refuse_constant_write(name: str) -> None:
    raise CaptureError(
        f"forward writes in place into {name.removeprefix('model.').removeprefix('block.')}, which "
        "is neither a parameter nor a buffer: in an emitted program it would stay as it is. Make "
        "it a buffer with register_buffer."
    )


def _size_map(
    flat: fx.GraphModule, inputs: dict[str, int], batch_dims: list[dict[int, Any]]
) -> dict[Any, Any]:
    found = {}
    for node in flat.graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        for dim, size in batch_dims[inputs[node.name]].items():
            symbol = expression(node.meta["val"].shape[dim])
            if isinstance(symbol, sympy.Symbol):
                found[symbol] = size
    return found


def _refuse_hidden_writes(module: fx.GraphModule) -> None:
    """A write under no_grad into a tensor that carries a gradient can't be kept apart from it."""
    for node in module.graph.nodes:
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
            continue
        inner = getattr(module, node.args[1].target)
        holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        buffers = {
            h for h, operand in zip(holders, node.args[2:], strict=True)
            if _root(operand).op == "placeholder" and not _root(operand).name.startswith("p_")
        }  # fmt: skip
        for write in inner.graph.nodes:
            schema = getattr(write.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            root = _root(write.args[0])
            if root.op == "placeholder" and root not in buffers:
                raise CaptureError(
                    f"{source_of(write)} writes in place under torch.no_grad() into a tensor that "
                    "is part of the gradient. Write to a copy, or outside no_grad."
                )


def _root(node: fx.Node) -> fx.Node:
    """Follows views and in-place writes back to the tensor whose memory they share."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(a.alias_info for a in schema.arguments):
            return node
        node = node.args[0]
    return node


def explain(error: BaseException, module: nn.Module) -> CaptureError:
    """Names the user's module, line and a way out for whatever torch.export raised."""
    return CaptureError(
        f"can't capture {place_of(error, module)}. {_running_average(error) or reason_of(error)}"
    )


def _running_average(error: BaseException) -> str:
    """Why a BatchNorm without a momentum can't be captured, if the error comes from one."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        held = frame.f_locals.get("self")
        has_statistics = isinstance(held, nn.Module) and hasattr(held, "running_mean")
        if has_statistics and getattr(held, "momentum", 0) is None:
            return (
                f"A {type(held).__name__} with momentum=None weighs a batch by how many there have "
                "been, a value that is read while it runs. Give it a momentum, such as 0.1."
            )
    return ""


def place_of(error: BaseException, module: nn.Module) -> str:
    """The user's module and line that an error comes from."""
    return place_in(traceback.walk_tb(error.__traceback__), module)


def place_in(frames: Iterable[tuple[FrameType, int]], module: nn.Module) -> str:
    """The user's module and line among frames, the innermost of which is the last."""
    frames = [(f, line) for f, line in frames if not _foreign(f.f_code.co_filename)]
    if not frames:
        return "the model"
    names = {id(part): path for path, part in module.named_modules()}
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    held = frame.f_locals.get("self")
    path = names.get(id(held), "")
    owner = type(held).__name__ if isinstance(held, nn.Module) else ""
    code = linecache.getline(file, line).strip()
    label = path.removeprefix("model").removeprefix(".")
    module_text = f"module '{label}' ({owner})" if label else "the top module"
    module_text += f" ({owner})" if owner and not label else ""
    return f"{module_text}, {Path(file).name}:{line}: `{code}`"


def _foreign(file: str) -> bool:
    return file.startswith((TORCH_HOME, OWN_HOME, "<")) or (
        file.startswith(PYTHON_HOME) and "site-packages" not in file
    )
