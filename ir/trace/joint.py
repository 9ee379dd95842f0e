"""Differentiates one captured piece and turns it into a `Block`.

Input: the fx nodes of a segment (functional, lifted), which of its inputs need gradients, and
names. Output: a `Block` whose nodes are forward then backward. The segment is run under autograd
inside `make_fx` on the fake tensors it was captured with, so sizes stay symbolic in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ir.errors import CaptureError
from ir.graph import Block
from ir.trace.adapters import (
    expression,
    is_size,
    make_fx,
    node_meta,
    preserve_meta,
    symbols_kept,
)
from ir.trace.convert import Converter
from ir.trace.normal import replay_target
from ir.trace.source import in_users_words, source_of


@dataclass(frozen=True)
class Segment:
    """A contiguous run of captured nodes: what it reads from outside and what others read."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def replay(
    segment: Segment, values: list[Tensor], sizes: Mapping[Any, Any] = MappingProxyType({})
) -> list[Tensor]:
    """Runs the segment's nodes on the given input tensors. `sizes`: what symbols are; several may
    be the same."""
    env: dict[fx.Node, Any] = dict(zip(segment.inputs, values, strict=True))
    own = {
        expression(size).xreplace(sizes): size for value in values for size in value.shape
        if isinstance(size, torch.SymInt)
    }  # fmt: skip

    def load(node: fx.Node) -> Any:
        return env[node] if node in env else _size(node.meta["val"], own, sizes)

    for node in segment.nodes:
        if not is_size(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), load)
            with node_meta(node):
                env[node] = replay_target(node.target)(*args, **kwargs)
    return [env[node] for node in segment.outputs]


def _size(value: Any, own: Mapping[Any, Any], sizes: Mapping[Any, Any]) -> Any:
    """A size computed before, in sizes that the tracer knows: of tensors at hand."""
    formula = expression(value)
    if not isinstance(formula, sympy.Basic):
        return value
    formula = formula.xreplace(sizes)
    if formula in own:
        return own[formula]
    for other, size in own.items():
        share = formula / other
        if share.is_Rational:
            return size * int(share.p) // int(share.q)
    above, below = formula.as_numer_denom()
    symbols = sorted(formula.free_symbols, key=str)
    known = all(symbol in own for symbol in symbols)
    if not known or not below.is_Integer or not above.is_polynomial(*symbols):
        return value
    compute = sympy.lambdify(symbols, above, modules=[{}])
    return compute(*(own[symbol] for symbol in symbols)) // int(below)


def differentiable_outputs(segment: Segment, needs: list[bool]) -> list[bool]:
    """Which outputs carry a gradient when the inputs marked in `needs` do."""
    with _mode(segment), torch.enable_grad():
        outputs = replay(segment, _primals(_fakes(segment), needs))
    return [out.requires_grad for out in outputs]


def differentiate(
    segment: Segment, needs: list[bool], carries: list[bool], sizes: dict[Any, Any], name: str,
    input_names: list[str],
) -> Block:  # fmt: skip
    """The joint forward and backward of a segment as a `Block` named `name`.

    `needs` marks inputs that want a gradient, `carries` outputs that receive one.
    """
    fakes = _fakes(segment)
    with _mode(segment):
        tangents = [
            torch.empty_like(node.meta["val"])
            for node, carry in zip(segment.outputs, carries, strict=True) if carry
        ]  # fmt: skip

    def step(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        leaves = _primals(primals, needs)
        with torch.enable_grad(), preserve_meta():
            outputs = replay(segment, leaves, sizes)
            wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
            roots = [out for out, carry in zip(outputs, carries, strict=True) if carry]
            grads = torch.autograd.grad(roots, wanted, tangents, allow_unused=True) if roots else ()
        return outputs, list(grads)

    with _mode(segment):
        try:
            joint = _without_writes(make_fx(step)(fakes, tangents), fakes, tangents)
        except RuntimeError as error:
            raise _refusal(segment, error) from error
    converter = Converter(joint.graph, sizes, input_names, needs, carries)
    return converter.block(name)


def _without_writes(
    joint: fx.GraphModule, fakes: list[Tensor], tangents: list[Tensor]
) -> fx.GraphModule:
    """The same program without writes in place, as some derivatives of torch's own have them (into
    zeros, for a transform of Fourier's): what only is written to would be taken to be of no use."""
    if not any(map(_writes, joint.graph.nodes)):
        return joint

    def run(*values: Any) -> Any:
        with preserve_meta():
            return fx.Interpreter(joint).run(*values)

    flat: fx.GraphModule = make_fx(torch.func.functionalize(run, remove="mutations"))(
        fakes, tangents
    )
    for node in filter(_writes, flat.graph.nodes):
        raise CaptureError(
            f"can't capture {source_of(node)}: its derivative writes in place ({node.target}). "
            "Write it with plain operations."
        )
    return flat


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _refusal(segment: Segment, error: RuntimeError) -> Exception:
    """Names the first call whose derivative fails by itself; else the error as it is."""
    said = _first_line(error)
    for node in segment.nodes:
        alone = Segment((node,), tuple(node.all_input_nodes), (node,))
        if _derivative_fails(alone) == said:
            source = source_of(node)
            return CaptureError(
                f"can't capture {source}: the derivative of {source.function or node.target} can't "
                f"be traced ({in_users_words(said)[:200]}). Write it with plain operations."
            )
    return error


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _derivative_fails(alone: Segment) -> str:
    """What torch says about the derivative of one call, empty if nothing."""
    if not all(isinstance(node.meta.get("val"), Tensor) for node in alone.inputs):
        return ""  # a size, or one of several results, which has none of its own
    floats = [node.meta["val"].is_floating_point() for node in alone.inputs]

    def gradients(*values: Tensor) -> Any:
        with torch.enable_grad():
            leaves = _primals(list(values), floats)
            out: Any = replay(alone, leaves)[0]
            first = out if isinstance(out, Tensor) else out[0]
            wanted = [leaf for leaf, used in zip(leaves, floats, strict=True) if used]
            return torch.autograd.grad(first.sum(), wanted, allow_unused=True)

    try:
        make_fx(gradients)(*_fakes(alone))
    except RuntimeError as error:
        return _first_line(error)
    return ""


def _fakes(segment: Segment) -> list[Tensor]:
    return [node.meta["val"] for node in segment.inputs]


@contextmanager
def _mode(segment: Segment) -> Iterator[None]:
    every = (*segment.inputs, *segment.nodes)
    mode = next(
        node.meta["val"].fake_mode for node in every
        if hasattr(node.meta.get("val"), "fake_mode")
    )  # fmt: skip
    with mode, symbols_kept():
        yield


def _primals(tensors: list[Tensor], needs: list[bool]) -> list[Tensor]:
    return [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
