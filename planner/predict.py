"""What a given configuration takes: pinned, laid out as frameworks do, priced as every plan is.

Input: a traced graph and a `Configuration`. Output: `Predicted`, with the program that was priced.
Stages hold equal numbers of layers; embedding and head count as a layer each where that makes them
equal. Tensor parallelism is the planner's own program under the habits of hand-written ones.
What the configuration leaves open is decided for it: the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

from ir.batch import flow
from ir.cluster import GIB
from ir.collector import paused_collector
from ir.deepen import layer_run
from ir.errors import UsageError
from ir.graph import Graph
from ir.lower import Degrees, Lowered
from ir.stage_devices import stage_devices
from ir.variants import Variant, variants
from planner.calibrated import PACES, Paces, cost_model
from planner.candidate import Evaluated, Workload, evaluate_stages
from planner.cost import CostModel
from planner.device_memory import DeviceMemory
from planner.fusion import is_fusable
from planner.habits import Habits
from planner.pieces import Pieces, pieces, whole
from planner.pins import Candidate, divisors
from planner.price import COLLECTIVES, NodeTimes
from planner.recompute import MenuPoint, everything, group_starts, named_point
from planner.rows import Configuration
from planner.sharding import ShardingResult, shard
from planner.stage_problem import Assignment, Choice
from planner.traits import Traits

OPEN_RECOMPUTE = ("none", "selective", "full")
"""What is tried where a configuration leaves recomputation open."""
OPEN_ZERO = (1, 3)
"""ZeRO stages that are tried where it is open: 2 holds no less than 3 and is no faster than 1."""
MICRO_BATCHES_SHARDED_FOR = 4
"""Parameters' reshards once per step count a quarter: more would change no sharding."""

@dataclass(frozen=True)
class Decided:
    """What a configuration leaves open: its column, the value taken and those tried."""

    column: str
    value: int | str
    tried: tuple[int | str, ...]


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step and its parts, and the fullest device. `traits`: with open ones decided.

    `usd_per_step`: 0 where the cluster's price is not known. `decided`: what had several values.
    `memory`: bytes of the peak by what holds them.
    """

    step_s: float
    peak_GiB: float
    fits: bool
    compute_s: float
    exposed_comm_s: float
    bubble_s: float
    optimizer_s: float
    recompute: str
    traits: Traits
    evaluated: Evaluated
    usd_per_step: float = 0.0
    decided: tuple[Decided, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Predictor:
    """Predicts many configurations; shares what depends on the graph and local shapes only."""

    paces: Paces = PACES
    works: dict[int, Workload] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    shardings: dict[tuple[Any, ...], ShardingResult] = field(default_factory=dict)

    @paused_collector()
    def predict(self, graph: Graph, wanted: Configuration) -> Predicted:
        """The configuration with what it leaves open decided: the fastest that fits.

        Raises `UsageError` where the model can't have this configuration.
        """
        tried = _open(graph, wanted)
        best: Predicted | None = None
        for values in product(*tried.values()):
            option = dict(zip(tried, values, strict=True))
            found = self._priced(graph, replace(wanted, **option))
            if best is None or _order(found) < _order(best):
                decided = (
                    Decided(column, option[column], several)
                    for column, several in tried.items() if len(several) > 1
                )  # fmt: skip
                best = replace(found, decided=tuple(decided))
        assert best is not None
        return best

    def _priced(self, graph: Graph, wanted: Configuration) -> Predicted:
        work = self._work(graph, wanted)
        traits = replace(
            wanted.traits, zero_stage=wanted.zero_stage or 0,
            virtual_stages=wanted.virtual_stages or 1,
        )  # fmt: skip
        cost = cost_model(wanted.cluster, wanted.mesh, traits, self.paces)
        candidate = Candidate(wanted.mesh, wanted.micro_batches, "1f1b", wanted.rows)
        label = _label(wanted)
        found = self._pieces(work, candidate, cost, wanted)
        stages = _stages(work, wanted, found, label)
        evaluated = evaluate_stages(work, candidate, found, cost, stages)
        cost_s = evaluated.prediction
        memory = DeviceMemory(evaluated, cost)
        parts = memory.reading_bytes(wanted.memory_kind)
        if memory.fits:  # what an allocator caches gives way
            devices = stage_devices(wanted.cluster, wanted.mesh)
            most = max(device.memory_bytes for device in devices)
            if (over := sum(parts.values()) - most) > 0:
                parts["allocator"] = parts.get("allocator", 0.0) - over
        return Predicted(
            cost_s.step_s, sum(parts.values()) / GIB, memory.fits,
            cost_s.compute_s, cost_s.exposed_comm_s, cost_s.bubble_s, cost_s.optimizer_s, label,
            traits, evaluated, wanted.cluster.usd_per_hour * cost_s.step_s / 3600, memory=parts,
        )  # fmt: skip

    def _work(self, graph: Graph, wanted: Configuration) -> Workload:
        key = id(graph)
        if key not in self.works:
            batch_flow = flow(graph)
            kinds = variants(graph, batch_flow)
            self.graphs[key] = graph  # alive, so that its id stays its own
            self.works[key] = Workload(graph, batch_flow, kinds, 0, wanted.optimizer)
        return replace(self.works[key], global_batch=wanted.global_batch)

    def _pieces(
        self, work: Workload, candidate: Candidate, cost: CostModel, wanted: Configuration
    ) -> Pieces:
        result = self._sharding(work, candidate, cost, wanted)
        layers = _labels(_label(wanted))

        def menu_of(
            kind: Variant, lowered: Lowered, times: NodeTimes, always: frozenset[str]
        ) -> tuple[MenuPoint, ...]:
            labels = layers if len(kind.calls) > 1 else _labels("none")
            return _menu(lowered, times, always, labels)

        return pieces(work.graph, work.flow, work.kinds, result, candidate.degrees, cost, menu_of)

    def _sharding(
        self, work: Workload, candidate: Candidate, cost: CostModel, wanted: Configuration
    ) -> ShardingResult:
        """The best of those that hand-written programs have; the same for every data degree."""
        tensor = candidate.mesh.tensor
        if tensor == 1:
            return whole(work.graph, work.kinds)
        key = (
            id(work.graph), tensor, wanted.rows, wanted.sequence_cuts, wanted.cluster.device.name,
        )  # fmt: skip
        if key not in self.shardings:
            count = MICRO_BATCHES_SHARDED_FOR
            degrees = Degrees(wanted.rows * count, 1, tensor, count)
            habits = Habits(True, wanted.sequence_cuts is False, wanted.sequence_cuts is True)
            self.shardings[key] = shard(work.graph, work.kinds, degrees, cost, habits=habits)
        return self.shardings[key]


def _open(graph: Graph, wanted: Configuration) -> dict[str, tuple[Any, ...]]:
    """The values of what the configuration leaves open, by its column."""
    found: dict[str, tuple[Any, ...]] = {}
    if wanted.virtual_stages is None:
        per_rank, rest = divmod(len(layer_run(graph)), wanted.mesh.pipeline)
        found["virtual_stages"] = (*divisors(per_rank),) if per_rank and not rest else (1,)
    if not wanted.recompute:
        found["recompute"] = OPEN_RECOMPUTE[OPEN_RECOMPUTE.index(wanted.least_recompute) :]
    if wanted.zero_stage is None:
        found["zero_stage"] = OPEN_ZERO if wanted.mesh.data > 1 else (0,)
    return found


def _order(found: Predicted) -> tuple[bool, float]:
    """What fits first, then the fastest; of what does not fit the smallest."""
    return (not found.fits, found.step_s if found.fits else found.peak_GiB)


def _label(wanted: Configuration) -> str:
    """The menu point of the layers."""
    if wanted.recompute == "selective":
        return wanted.modules
    return wanted.recompute or "none"


def _labels(label: str) -> tuple[str, ...]:
    """The menu points that a block with this one needs."""
    return ("none", "full") if label == "every-2nd-layer" else (label,)


def _menu(
    lowered: Lowered, times: NodeTimes, always: frozenset[str], labels: tuple[str, ...]
) -> tuple[MenuPoint, ...]:
    """Everything kept; core attention, cheap operations or all of it again."""
    storage, fused = times.storage, times.cost.traits.fused_elementwise
    kept = everything(lowered, storage, always)
    sets = {
        "none": kept, "core_attn": kept - _made_by_attention(lowered),
        "op": _made_by_products(lowered), "full": frozenset[str](),
    }  # fmt: skip
    inner = kept - _read_by_products(lowered) - _made_outside_groups(lowered)
    inner |= kept & _gathered(lowered)

    def point(label: str, values: frozenset[str]) -> MenuPoint:
        found = named_point(lowered, storage, times, always, label, values)
        if not (fused and values & inner):
            return found
        # fused kernels make their inner values again in registers: no bytes, and no time either;
        # what was gathered is gathered again under the product of the input's gradient
        outer = values - inner
        outer |= group_starts(lowered, values & inner, outer, ("all_gather",))
        small = named_point(lowered, storage, times, always, label, outer)
        return replace(small, forward=found.forward, backward=found.backward)

    return tuple(point(label, sets[label]) for label in labels)


def _made_by_attention(lowered: Lowered) -> frozenset[str]:
    """What core attention hands to backward besides its result, which the next product reads."""
    return frozenset(
        name for node in lowered.forward if node.op == "attention" for name in node.outputs[1:]
    )


def _gathered(lowered: Lowered) -> frozenset[str]:
    """Gathered activations, and what memory-bound operations made of them."""
    found: set[str] = set()
    for node in lowered.forward:
        follows = is_fusable(node, COLLECTIVES) and found.intersection(node.inputs)
        if node.op == "all_gather" or follows:
            found |= set(node.outputs)
    return frozenset(found)


def _read_by_products(lowered: Lowered) -> frozenset[str]:
    """What products and attention read in backward."""
    ops = ("einsum", "attention_backward", "cross_entropy_backward")
    return frozenset(n for node in lowered.backward if node.op in ops for n in node.inputs)


def _made_outside_groups(lowered: Lowered) -> frozenset[str]:
    """Results that fused memory-bound kernels start from: they make their inner values again."""
    makers = (node for node in lowered.forward if not is_fusable(node, COLLECTIVES))
    return frozenset(name for node in makers for name in node.outputs)


def _made_by_products(lowered: Lowered) -> frozenset[str]:
    """Results of attention, of every second product and of collectives: torch's per-op policy."""
    products = [node for node in lowered.forward if node.op == "einsum"]
    kept = {name for node in products[::2] for name in node.outputs}
    ops = ("attention", "all_reduce", "reduce_scatter")
    kept |= {name for node in lowered.forward if node.op in ops for name in node.outputs}
    return frozenset(kept)


def _stages(
    work: Workload, wanted: Configuration, found: Pieces, label: str
) -> Assignment:
    """Equal stages: which calls, with which menu point, run on each."""
    variant_of = work.variant_of
    order = [variant_of[i] for i in range(len(work.graph.calls))]
    runs = [(variant, len(list(group))) for variant, group in groupby(order)]
    layers = max(range(len(runs)), key=lambda r: runs[r][1])
    counts = layers_per_stage(runs[layers][1], wanted.mesh.pipeline, wanted.traits.rest)
    stages = []
    for stage, count in enumerate(counts):
        choices = []
        if stage == 0:
            choices += [Choice(r, 0, runs[r][1]) for r in range(layers)]
        choices += _layer_choices(found, runs[layers][0], layers, count, label)
        if stage == len(counts) - 1:
            choices += [Choice(r, 0, runs[r][1]) for r in range(layers + 1, len(runs))]
        stages.append(tuple(choices))
    return tuple(stages)


def _layer_choices(
    found: Pieces, variant: int, run: int, count: int, label: str
) -> list[Choice]:
    labels = [point.label for point in found.menus[variant]]
    if label == "every-2nd-layer":
        again = count // 2
        parts = [("full", again), ("none", count - again)]
    else:
        parts = [(label, count)]
    return [Choice(run, labels.index(name), n) for name, n in parts if n]


def layers_per_stage(layers: int, stages: int, rest: str = "middle") -> list[int]:
    """Equal shares; else embedding and head count as layers, unless the rest goes to the last
    stages; else as `planner.traits.RESTS` say.

    >>> layers_per_stage(8, 4), layers_per_stage(78, 4), layers_per_stage(5, 3)
    ([2, 2, 2, 2], [19, 20, 20, 19], [1, 2, 2])
    >>> layers_per_stage(32, 5, "last"), layers_per_stage(32, 6, "filled")
    ([6, 6, 6, 7, 7], [6, 6, 6, 6, 6, 2])
    """
    if layers % stages == 0:
        return [layers // stages] * stages
    if layers + 2 < stages:
        raise UsageError(f"{layers} layers can't fill {stages} pipeline stages")
    if stages > 1 and (layers + 2) % stages == 0 and rest != "last":
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    each, left = divmod(layers, stages)
    if rest == "filled":
        counts = [min(each + 1, layers - s * (each + 1)) for s in range(stages)]
        if counts[-1] < 1:
            raise UsageError(
                f"{layers} layers, {each + 1} on a stage, do not reach the last of {stages} stages"
            )
        return counts
    last = rest == "last"
    first = stages - left if last else min(stages - left, max(1, (stages - left) // 2))
    return [each + (first <= s < first + left) for s in range(stages)]
