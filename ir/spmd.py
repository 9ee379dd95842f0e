"""The program of one rank, whole: lowered blocks, stages, state and what crosses between stages.

Input: a graph and the decisions (degrees, shardings, what is kept, stages). Output: `Spmd`, from
which codegen writes the program and the planner takes its bytes and seconds: one computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ir.batch import Flow, flow, needs_whole_batch
from ir.errors import Refused
from ir.graph import Block, Call, Graph, Node, State, TensorType
from ir.layout import DATA, PARTIAL, REPLICATE, TENSOR, Layout, Partial, Placement
from ir.lower import Degrees, Lowered, Sharding, local_type, lower
from ir.offload import offloads_optimizer
from ir.recompute import backward_nodes, kept_values, state_inputs
from ir.reshard import step
from ir.split import Split, split_backward
from ir.variants import Variant, variants


@dataclass(frozen=True, slots=True)
class StageCall:
    """A call placed on a stage; `keep` names the menu point of its variant."""

    index: int
    variant: int
    keep: str


@dataclass(frozen=True, slots=True)
class Message:
    """A value that one stage makes and another reads; `gradient` is what comes back, if it does."""

    value: str
    source: int
    target: int
    type: TensorType
    gradient: TensorType | None


@dataclass(frozen=True)
class Spmd:
    """One rank's program; `keeps[variant][label]` are the forward values held for backward.

    `zero`: the ZeRO stage, what the data axis divides (1 optimizer state, 2 gradients too, 3
    parameters too). `offload`: what lies in host memory (`ir.offload`); `hosts`, as `keeps`: which
    of the values held for backward. `ranks`: of the pipeline; stage s is on rank s mod `ranks`.
    """

    graph: Graph
    degrees: Degrees
    flow: Flow
    kinds: tuple[Variant, ...]
    lowered: tuple[Lowered, ...]
    state: dict[str, Placement]
    keeps: tuple[dict[str, frozenset[str]], ...]
    stages: tuple[tuple[StageCall, ...], ...]
    zero: int = 0
    offload: str = "none"
    hosts: tuple[dict[str, frozenset[str]], ...] = ()
    ranks: int = 1

    def call(self, placed: StageCall) -> Call:
        return self.graph.calls[placed.index]

    def block(self, placed: StageCall) -> Block:
        return self.kinds[placed.variant].block

    @cached_property
    def state_of(self) -> dict[str, State]:
        return {item.name: item for item in self.graph.state}

    def always(self, variant: int) -> frozenset[str]:
        """Inputs of a variant that are state."""
        call = self.graph.calls[self.kinds[variant].calls[0]]
        return state_inputs(self.lowered[variant], call.arguments, set(self.state_of))

    def backward(self, variant: int, keep: str) -> tuple[Node, ...]:
        kept = self.keeps[variant][keep]
        return backward_nodes(self.lowered[variant], kept, self.always(variant))

    def kept(self, variant: int, keep: str) -> tuple[str, ...]:
        return kept_values(self.lowered[variant], self.keeps[variant][keep], self.always(variant))

    def hosted(self, variant: int, keep: str) -> tuple[str, ...]:
        """Those of the kept values that lie in host memory."""
        chosen = self.hosts[variant].get(keep, frozenset()) if self.hosts else frozenset()
        return tuple(name for name in self.kept(variant, keep) if name in chosen)

    def split(self, variant: int, keep: str) -> Split:
        """The two halves of `backward`."""
        return split_backward(
            self.lowered[variant], self.keeps[variant][keep], self.always(variant)
        )  # fmt: skip

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """The stage of each call."""
        return {p.index: s for s, calls in enumerate(self.stages) for p in calls}

    @cached_property
    def placed(self) -> dict[int, StageCall]:
        return {p.index: p for calls in self.stages for p in calls}

    @cached_property
    def makers(self) -> dict[str, tuple[int, int]]:
        """(call, place among its results) of every value that a call makes."""
        return {
            name: (index, place)
            for index, call in enumerate(self.graph.calls)
            for place, name in enumerate(call.results)
        }

    @cached_property
    def has_gradient(self) -> set[str]:
        """Values for which some call gives a gradient."""
        found = set()
        for call in self.graph.calls:
            block = self.graph.blocks[call.block]
            given = {name for name, _ in block.gradients}
            found |= {
                v for n, v in zip(block.inputs, call.arguments, strict=True) if n in given
            }  # fmt: skip
        return found

    def gives_gradient(self, index: int, value: str) -> bool:
        """Whether a call gives a gradient for one of its arguments."""
        call = self.graph.calls[index]
        block = self.graph.blocks[call.block]
        given = {name for name, _ in block.gradients}
        pairs = zip(block.inputs, call.arguments, strict=True)
        return any(v == value and n in given for n, v in pairs)

    def local_type_of(self, value: str) -> TensorType:
        """The local type, per micro-batch, of a value that a call makes."""
        index, place = self.makers[value]
        lowered = self.lowered[self.placed[index].variant]
        return lowered.types[lowered.outputs[place]]

    def gradient_type_of(self, value: str) -> TensorType:
        """The local type of the gradient that the maker of a value takes."""
        index, place = self.makers[value]
        lowered = self.lowered[self.placed[index].variant]
        tangents = dict(lowered.block.tangents)
        return lowered.types[tangents[lowered.block.outputs[place]]]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Everything that crosses stages, once to each reader: from its maker, or where no gradient
        comes back from the reader before, on the same rank if there is one."""
        found: dict[tuple[str, int], bool] = {}
        for index, call in enumerate(self.graph.calls):
            target = self.stage_of[index]
            for value in call.arguments:
                if value in self.makers and self.stage_of[self.makers[value][0]] != target:
                    gradient = self.gives_gradient(index, value)
                    found[value, target] = found.get((value, target), False) or gradient
        readers: dict[str, list[int]] = {}
        for value, target in found:
            readers.setdefault(value, [self.stage_of[self.makers[value][0]]]).append(target)
        return tuple(
            Message(
                v, readers[v][0] if gradient else self._nearest(readers[v], t), t,
                self.local_type_of(v), self.gradient_type_of(v) if gradient else None,
            )
            for (v, t), gradient in found.items()
        )  # fmt: skip

    def is_near(self, message: Message) -> bool:
        """Whether a message stays on its rank."""
        return (message.target - message.source) % self.ranks == 0

    def _nearest(self, holders: Sequence[int], target: int) -> int:
        """The last stage before `target` that holds a value, of its own rank if one does."""
        before = [stage for stage in holders if stage < target]
        here = [stage for stage in before if (target - stage) % self.ranks == 0]
        return max(here or before)

    def stages_of_state(self, name: str) -> tuple[int, ...]:
        """The stages that hold a state tensor; an unused one lives on the first stage."""
        return tuple(sorted(self.stages_reading.get(name, (0,))))

    @cached_property
    def stages_reading(self) -> dict[str, set[int]]:
        """The stages whose calls read each graph-level value."""
        found: dict[str, set[int]] = {}
        for index, call in enumerate(self.graph.calls):
            for name in call.arguments:
                found.setdefault(name, set()).add(self.stage_of[index])
        return found

    def gradient_place(self, name: str) -> Placement:
        """The tensor-axis placement of a parameter's accumulated gradient."""
        return self.gradient_places.get(name, self.state[name])

    @cached_property
    def gradient_places(self) -> dict[str, Placement]:
        """Of every value of the graph that gets a gradient, as its first user makes it."""
        found: dict[str, Placement] = {}
        for variant, kind in enumerate(self.kinds):
            for index in kind.calls:
                call = self.graph.calls[index]
                names = dict(zip(kind.block.inputs, call.arguments, strict=True))
                for value, gradient in self.lowered[variant].gradients:
                    place = self.lowered[variant].layouts[gradient].tensor
                    found.setdefault(names[value], place)
        return found

    def state_type(self, name: str) -> TensorType:
        """The local type of a state tensor."""
        return self._local_state(self.state_of[name].type, self.state[name])

    def gradient_type(self, name: str) -> TensorType:
        return self._local_state(self.state_of[name].type, self.gradient_place(name))

    def _local_state(self, whole: TensorType, place: Placement) -> TensorType:
        """Layers have the same tensors."""
        key = (whole, place)
        if key not in self._local_types:
            self._local_types[key] = local_type(whole, Layout(tensor=place), self.degrees, 1)
        return self._local_types[key]

    @cached_property
    def _local_types(self) -> dict[tuple[TensorType, Placement], TensorType]:
        return {}

    def gradient_sync(self, name: str) -> list[tuple[str, str, Placement, Placement]]:
        """(collective, axis, from, to) that bring an accumulated gradient to its parameter.

        Once per step, an all_to_all is not worth a third kind of state: it is a gather and a cut.
        """
        steps = []
        have, want = self.gradient_place(name), self.state[name]
        kind = step(have, want)
        if kind is not None and self.degrees.tensor > 1:
            turns = kind == "all_to_all"
            middle = REPLICATE if turns else want
            steps.append(("all_gather" if turns else kind, TENSOR, have, middle))
            steps += [("shard", TENSOR, REPLICATE, want)] if turns else []
        if self.degrees.data > 1:
            steps.append(("all_reduce", DATA, PARTIAL, self.state[name]))
        return steps

    def zero_of(self, name: str) -> int:
        """The ZeRO stage of a state tensor; frozen parameters have nothing but themselves to
        divide, one data rank or no element leaves nothing to divide."""
        item = self.state_of[name]
        if item.kind != "parameter" or self.degrees.data == 1 or item.type.elements(1) == 0:
            return 0
        return self.zero if item.trainable or self.zero == 3 else 0

    def is_hosted(self, name: str) -> bool:
        """Whether a state tensor's optimizer state lies in host memory between steps."""
        return offloads_optimizer(self.offload) and self.state_of[name].trainable

    def gathered(self, placed: StageCall, phase: str) -> tuple[str, ...]:
        """The divided parameters that are gathered for a call's "prologue", "forward" or
        "backward": all of its block's, if the phase reads one of its inputs that are state."""
        lowered = self.lowered[placed.variant]
        nodes, handed = {
            "prologue": (lowered.prologue, lowered.early),
            "forward": (lowered.forward, lowered.outputs),
            "backward": (
                self.backward(placed.variant, placed.keep), tuple(g for _, g in lowered.gradients)
            ),
        }[phase]  # fmt: skip
        read = {name for node in nodes for name in node.inputs} | set(handed)
        if not read & self.always(placed.variant):
            return ()
        return tuple(name for name in self._state_read(placed) if self.zero_of(name) == 3)

    def scattered(self, placed: StageCall) -> tuple[str, ...]:
        """The parameters whose gradients a call's backward scatters in every micro-batch."""
        return tuple(
            name for name in self._state_read(placed)
            if self.state_of[name].trainable and self.zero_of(name) >= 2
        )  # fmt: skip

    def _state_read(self, placed: StageCall) -> list[str]:
        return [n for n in dict.fromkeys(self.call(placed).arguments) if n in self.state_of]

    def is_summed(self, value: str) -> bool:
        """Whether a value is a partial sum over data ranks and micro-batches."""
        return isinstance(self.flow.values[value], Partial)


def early_inputs(graph: Graph, batch_flow: Flow, variant: Variant) -> frozenset[str]:
    """Inputs of a variant that exist before the first micro-batch (only if it is called once)."""
    if len(variant.calls) > 1:
        return frozenset()
    call = graph.calls[variant.calls[0]]
    return frozenset(
        name for name, value in zip(variant.block.inputs, call.arguments, strict=True)
        if value in batch_flow.early
    )  # fmt: skip


def lower_all(
    graph: Graph, batch_flow: Flow, kinds: tuple[Variant, ...], shardings: tuple[Sharding, ...],
    degrees: Degrees,
) -> tuple[Lowered, ...]:  # fmt: skip
    """Lowers every variant; refuses to cut the batch where that would change the numbers."""
    if degrees.rows > 1 and all(item.batch_dim is None for item in graph.inputs):
        raise Refused(
            f"{graph.model} works for one batch size only, so its batch can't be cut over data "
            "ranks or micro-batches; plan with data=1 and micro_batches=1."
        )
    if degrees.micro_batches > 1:
        reason = needs_whole_batch(graph, batch_flow)
        if reason:
            raise Refused(f"{reason}; plan with micro_batches=1.")
    return tuple(
        lower(v.block, v.spread, s, degrees, early_inputs(graph, batch_flow, v))
        for v, s in zip(kinds, shardings, strict=True)
    )


__all__ = ["Message", "Spmd", "StageCall", "early_inputs", "flow", "lower_all", "variants"]
