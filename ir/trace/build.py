"""Builds the `Graph` of a training step: capture, cut, differentiate, name.

Input: a model, example arguments and an optional `loss(output)`. Output: a `Graph`. Distinct
blocks are differentiated in reverse order, so that each knows which of its outputs receive a
gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
from torch import Tensor, fx, nn

from ir.collector import paused_collector
from ir.errors import CaptureError, ShardwrightError
from ir.graph import BATCH, Graph, Input, State
from ir.names import Namer
from ir.trace.adapters import FxNode, one_convolution_kernel, open_batches_of_matrices
from ir.trace.block import body_nodes, capture_record, has_state_of_others, last_texts, result_name
from ir.trace.capture import Capture, capture, explain
from ir.trace.convert import tensor_type
from ir.trace.copied import meanwhile
from ir.trace.fixed_batch import with_reason
from ir.trace.fold import Entangled, Recorder, families, marks_of, named_state
from ir.trace.gradients import Piece, blocks_of
from ir.trace.joint import Segment
from ir.trace.masks import recognise_masks
from ir.trace.members import DryRun, refuse_unlike
from ir.trace.positions import check_positions
from ir.trace.quiet import quiet_torch
from ir.trace.refusals import refuse_batch, refuse_model, refuse_shared_memory
from ir.trace.repeated import refuse_carried
from ir.trace.segment import common_path, live_nodes, segment, split
from ir.trace.step import SMALLEST_TRACED_BATCH, Leaf, Step, leaves_of, plain_values
from ir.trace.unchanged import unchanged


@paused_collector()
@quiet_torch()
def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
) -> Graph:
    """Traces one training step of `model`; tensors may live on the meta device.

    Dim 0 of every tensor argument as long as the first one's is taken as the batch. Raises
    `CaptureError` with the module and source line of what can't be captured.
    """
    kwargs = dict(kwargs or {})
    refuse_model(model)
    refuse_shared_memory(model)
    leaves, batch = leaves_of(model, args, kwargs)
    refuse_batch(leaves, batch)
    step = Step(model, args, kwargs, loss)
    with unchanged(model):  # also by members that are captured alone
        graph = _trace(step, leaves, batch, name or type(model).__name__)
    if step.report.changed:
        refuse_carried(step, leaves, _factor(leaves, batch))
    if updated := [name for state in graph.state if state.update for name in state.names]:
        refuse_shared_memory(model, updated)
    return replace(graph, plain=plain_values(args, kwargs), marks=marks_of(model))


def _trace(step: Step, leaves: list[Leaf], batch: int, title: str) -> Graph:
    """With any number of rows, or as few inputs of one number as that takes."""
    first: CaptureError | None = None
    last: CaptureError | None = None
    for candidate in _batch_guesses(leaves):
        try:
            with one_convolution_kernel(), open_batches_of_matrices():
                graph = _graph(step, candidate, batch, title)
                return with_reason(graph, step, leaves, first)
        except CaptureError as error:
            first, last = first or error, error
        except ShardwrightError:
            raise
        except Exception as error:
            raise explain(error, step) from error
    assert last is not None
    raise last  # with the batch as it is: what no number of rows would mend


def _batch_guesses(leaves: list[Leaf]) -> list[list[Leaf]]:
    """All leaves of the batch's length batched; each but the first unbatched; a fixed batch."""
    batched = [i for i, leaf in enumerate(leaves) if leaf.rows is not None]
    guesses = [leaves]
    for drop in batched[1:]:
        leaf = replace(leaves[drop], rows=None)
        guesses.append([*leaves[:drop], leaf, *leaves[drop + 1 :]])
    return [*guesses, [replace(leaf, rows=None) for leaf in leaves]]


def _factor(leaves: list[Leaf], batch: int) -> int:
    """Times the rows of the example that are traced."""
    is_fixed = all(leaf.rows is None for leaf in leaves)
    return 1 if is_fixed else max(1, math.ceil(SMALLEST_TRACED_BATCH / batch))


def _graph(step: Step, leaves: list[Leaf], batch: int, title: str) -> Graph:
    """The graph, with families folded where nothing but their calls in order goes between them."""
    factor = _factor(leaves, batch)
    make = partial(_Builder, step, leaves, factor, title)
    groups = families(step.model)
    if groups:
        with suppress(Entangled), unchanged(step.model):
            return _folded(make, groups, DryRun(step, leaves, factor, batch * factor))
    return make(Recorder(step.model, [], batch * factor)).graph()


def _folded(
    make: Callable[[Recorder], _Builder], groups: list[tuple[str, ...]], dry: DryRun
) -> Graph:
    """What it takes for granted about members of families is seen to meanwhile."""
    with meanwhile(partial(dry.last_texts_of_every, groups)) as last_texts_of_every:
        try:
            builder = make(dry.recorder(groups, "record"))
            graph = builder.graph()
        except Entangled:
            raise
        except Exception:
            if last_texts_of_every() is not None:
                raise
        else:
            if (last := last_texts_of_every()) is not None:
                refuse_unlike(builder.recorder.records, builder.captures, last)
                return graph
    builder = make(dry.recorder(groups, "every"))
    graph = builder.graph()
    records = builder.recorder.records
    refuse_unlike(records, builder.captures, last_texts(records))
    return graph


class _Builder:
    """One trace; see the module's docstring."""

    def __init__(
        self, step: Step, leaves: list[Leaf], factor: int, title: str, recorder: Recorder
    ) -> None:
        self.step, self.leaves, self.factor, self.title = step, leaves, factor, title
        self.recorder = recorder
        self.captures: dict[Any, Capture] = {}
        self.namer = Namer()
        self.input_names = [self.namer(leaf.name, default="input") for leaf in leaves]
        self.state: dict[str, State] = {}
        self.by_tensor: dict[Any, str] = {}
        self.tensors = dict(named_state(step.model))
        self.updates: dict[str, str] = {}
        self.changed_by_members: dict[int, set[str]] = {}  # buffers, by the number of the piece
        self.pieces: list[Piece] = []

    def graph(self) -> Graph:
        top = self._capture_all()
        for record in self.recorder.records:
            if record.variant not in self.captures:
                body = self.captures[record.variant] = capture_record(record)
                if has_state_of_others(body, self.tensors.values()):
                    raise Entangled
        outputs = self._lay_out(top)
        trainable = {s.name for s in self.state.values() if s.trainable}
        blocks, calls, needs = blocks_of(self.pieces, trainable, outputs[0])
        guards = [*top.guards, *(g for c in self.captures.values() for g in c.guards)]
        state = [self._final(s, needs) for s in self.state.values()]
        if not any(s.trainable for s in state):
            raise CaptureError(
                f"{self.title} has nothing to train: the loss depends on no parameter that "
                "requires a gradient."
            )
        inputs = [
            Input(n, i, leaf.path, self.input_types[i], 0 if leaf.rows is not None else None)
            for i, (n, leaf) in enumerate(zip(self.input_names, self.leaves, strict=True))
        ]
        metrics = tuple(zip(self.step.report.metrics, outputs[1:], strict=True))
        return check_positions(recognise_masks(Graph(
            self.title, tuple(inputs), tuple(state), tuple(blocks), tuple(calls), outputs[0],
            metrics, tuple(dict.fromkeys(guards)),
        )))  # fmt: skip

    # capture

    def _capture_all(self) -> Capture:
        """Everything but what is in members of families."""
        examples = [leaf.example(self.factor) for leaf in self.leaves]
        dims = [{0: BATCH} if leaf.rows is not None else {} for leaf in self.leaves]
        top = self._top(examples, dims)
        self.input_types = [tensor_type(leaf.tensor, {}) for leaf in self.leaves]
        for node in top.graph.nodes:
            if node.name in top.inputs:
                kind = tensor_type(node.meta["val"], top.sizes)
                index = top.inputs[node.name]
                self.input_types[index] = kind
                if not any(isinstance(s, sympy.Basic) for s in kind.shape):
                    self._static(self.leaves[index], index)
        return top

    def _top(self, examples: list[Tensor], dims: list[dict[int, Any]]) -> Capture:
        """Each parameter that export sees takes it milliseconds: those inside of members, which
        nothing else was seen to read, are hidden from it. One that is read all the same would
        become a constant; where there are constants, it is to see all."""
        if self.recorder.hidden:
            try:
                top = self._exported(examples, dims, self.recorder.hidden)
                if not top.constants:
                    return top
            except Entangled:
                raise
            except CaptureError:
                pass
        return self._exported(examples, dims, ())

    def _exported(
        self, examples: list[Tensor], dims: list[dict[int, Any]], hidden: tuple[str, ...]
    ) -> Capture:
        with self.recorder.installed("opaque"), self.step.hiding(hidden):
            top = capture(self.step, examples, dims)
            self.recorder.check_all_called()
            return top

    def _static(self, leaf: Leaf, index: int) -> None:
        if leaf.rows is not None and index == 0:
            raise CaptureError(
                f"the model fixes its batch size to {leaf.rows * self.factor}: `{leaf.name}` can't "
                "have another number of rows. Make the model work for any batch size."
            )
        self.leaves = [
            replace(x, rows=None) if i == index else x for i, x in enumerate(self.leaves)
        ]

    # lay out

    def _lay_out(self, top: Capture) -> list[str]:
        """Names every graph-level value and lists the pieces; returns the output values."""
        values: dict[fx.Node, str] = {}
        for name, _ in named_state(self.step.model):
            self._state(name)
        for node in top.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                values[node] = self._origin(node, top, "model.")
        live = live_nodes(top.graph, [*top.outputs, *top.updates.values()])
        for item in split(live, top.sizes):
            if isinstance(item, list):
                self._flat_piece(item, values, top)
            else:
                self._folded_piece(item, values)
        on_top = {}
        for holder, node in top.updates.items():
            self._refuse_input_write(holder, top)
            place = next(n for n in values if n.name == holder)
            if node in values:
                on_top[values[place]] = values[node]
        self._check_order(on_top)
        self.updates |= on_top
        return [values[node] for node in top.outputs]

    def _check_order(self, changed_on_top: Collection[str]) -> None:
        """Members of families are called without regard to what others do to their buffers."""
        users: dict[str, set[int]] = defaultdict(set)
        for number, piece in enumerate(self.pieces):
            for word in piece.arguments:
                users[word].add(number)
        changed = {word for words in self.changed_by_members.values() for word in words}
        for number, words in self.changed_by_members.items():
            for word in words:
                users[word].add(number)
        of_members = self.changed_by_members.keys()
        if any(len(users[word]) > 1 for word in changed) or any(
            word in changed or users[word] & of_members for word in changed_on_top
        ):
            raise Entangled

    def _refuse_input_write(self, holder: str, top: Capture) -> None:
        if holder in top.inputs:
            name = self.leaves[top.inputs[holder]].name
            raise CaptureError(
                f"the model writes in place into its argument `{name}`: the caller's batch would "
                "change with every step. Write to a copy of it."
            )

    def _origin(self, node: fx.Node, source: Capture, prefix: str, path: str = "") -> str:
        if node.name in source.inputs:
            return self.input_names[source.inputs[node.name]]
        if node.name in source.state:
            relative = source.state[node.name].removeprefix(prefix)
            return self._state(f"{path}.{relative}" if path else relative)
        return self._constant(source.constants[node.name])

    def _state(self, full_name: str) -> str:
        tensor = self.tensors[full_name]
        if id(tensor) not in self.by_tensor:
            names = tuple(n for n, t in self.tensors.items() if t is tensor)
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            trainable = kind == "parameter" and tensor.requires_grad
            word = self.namer("s_" + names[0])
            self.by_tensor[id(tensor)] = word
            self.state[word] = State(word, names, kind, tensor_type(tensor, {}), trainable)
        return self.by_tensor[id(tensor)]

    def _constant(self, tensor: Tensor) -> str:
        key = (tuple(tensor.shape), str(tensor.dtype), str(tensor.tolist()))
        if key not in self.by_tensor:
            word = self.namer("constant")
            self.by_tensor[key] = word
            self.state[word] = State(word, (word,), "constant", tensor_type(tensor, {}), False,
                                     data=tensor.detach().cpu())  # fmt: skip
        return self.by_tensor[key]

    def _flat_piece(self, nodes: list[fx.Node], values: dict[fx.Node, str], top: Capture) -> None:
        piece = segment(nodes)
        outputs = tuple(
            n for n in nodes
            if isinstance(n.meta["val"], Tensor)
            and (n in piece.outputs or n in top.outputs or n in top.updates.values())
        )  # fmt: skip
        piece = Segment(piece.nodes, piece.inputs, outputs)
        path = common_path(nodes)
        values |= {node: self.namer(node.name) for node in outputs}
        names = [self._local_name(values[n], path) for n in piece.inputs]
        held = [self._held(values[n]) for n in piece.inputs]
        self.pieces.append(
            Piece(piece, top.sizes, held, [values[n] for n in piece.inputs],
                   [values[n] for n in outputs], path, path or "main", names)
        )  # fmt: skip

    def _folded_piece(self, call: FxNode, values: dict[fx.Node, str]) -> None:
        record = self.recorder.records[int(call.args[1])]
        body = self.captures[record.variant]
        nodes = body_nodes(body)
        holders = [n for n in body.graph.nodes if n.op in ("placeholder", "get_attr")]
        used = {source for node in nodes for source in node.all_input_nodes}
        inputs = tuple(n for n in holders if n in used)
        arguments = [
            values[call.args[0][body.inputs[n.name]]] if n.name in body.inputs
            else self._origin(n, body, "block.", record.path)
            for n in inputs
        ]  # fmt: skip
        if len(set(arguments)) < len(arguments):
            raise Entangled(f"{record.path} has one value twice")
        results, outputs = [], []
        changed = self.changed_by_members[len(self.pieces)] = set[str]()
        for user in call.users:
            node = body.outputs[user.args[1]]
            if node in holders:
                values[user] = values[call.args[0][body.inputs[node.name]]]
                continue
            if node not in outputs:
                outputs.append(node)
                results.append(self.namer(result_name(node, body, record)))
            values[user] = results[outputs.index(node)]
        for holder, node in body.updates.items():
            place = next(n for n in holders if n.name == holder)
            if node not in outputs:
                outputs.append(node)
                results.append(self.namer(holder + "_new"))
            word = self._origin(place, body, "block.", record.path)
            self.updates[word] = results[outputs.index(node)]
            changed.add(word)
        names = [
            self._local_name(a, record.path)
            if n.name not in body.inputs else record.names[body.inputs[n.name]]
            for n, a in zip(inputs, arguments, strict=True)
        ]  # fmt: skip
        held = [self._held(a) for a in arguments]
        name = record.path.rsplit(".", 1)[0]
        self.pieces.append(
            Piece(Segment(tuple(nodes), inputs, tuple(outputs)), body.sizes, held, arguments,
                   results, record.path, name, names)
        )  # fmt: skip

    def _held(self, value: str) -> str:
        """What kind of value an input is: equal pieces must agree in it."""
        state = self.state.get(value)
        return "value" if state is None else f"{state.kind}{state.trainable}"

    def _local_name(self, value: str, path: str) -> str:
        """A parameter's name without the path that it shares with its block."""
        if value not in self.state:
            return value
        full = self.state[value].names[0]
        relative = full.removeprefix(path + ".") if path else full
        return relative.removeprefix(".")

    def _final(self, state: State, wanted: set[str]) -> State:
        trainable = state.trainable and state.name in wanted
        update = self.updates.get(state.name)
        return State(state.name, state.names, state.kind, state.type, trainable, update, state.data)
