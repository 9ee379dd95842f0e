"""The plan: every decision, its predicted cost, and how to read it from JSON.

A `Plan` is immutable, hashed and printed stably. Its JSON has a versioned schema that is checked
on load; loading executes nothing. `spmd(graph, plan)` gives the program that it stands for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.layout import PARTIAL, REPLICATE, Placement, Shard
from ir.lower import Degrees, Sharding
from ir.plan_schema import check_plan
from ir.predicted import Prediction, StageCost
from ir.schedules import Action, check_schedule, schedule_order, splits_backward
from ir.seats import seats_of
from ir.spmd import Spmd, StageCall, lower_all
from ir.strategies import strategies
from ir.variants import Variant, variants
from ir.whole_file import write_whole

FORMAT = "shardwright-plan/1"

Leaf: TypeAlias = "int | str | None"
"""A factor that is cut, "partial", or None for whole."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Decisions for one variant: a strategy number per node, a cut factor per boundary value.

    `keeps`: menu points, each a label and the forward values that are kept for backward; `hosts`:
    of those points that use host memory, the label and the values that are held there.
    """

    name: str
    nodes: tuple[int, ...]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    tangents: tuple[Leaf, ...]
    gradients: tuple[Leaf, ...]
    keeps: tuple[tuple[str, tuple[str, ...]], ...]
    hosts: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """`count` calls in a row from `first` on, with the menu point `keep`."""

    first: int
    count: int
    keep: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a search looked at: its candidates, how many of them were planned, and the power of ten
    of the number of plans that all stand for. `is_cut_short`: whether its time limit ended it."""

    candidates: int
    planned: int
    plans_log10: float
    is_cut_short: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions for one model on one cluster; see the module's docstring.

    `zero`: the ZeRO stage over the data axis, 0 to 3 (`ir.spmd.Spmd`). `offload`: what lies in
    host memory (`ir.offload`). `certificate`: of the search, if it was one.
    `graph` is the traced model, where the plan was made in this process; it is not saved.
    """

    model: str
    signature: str
    cluster: Cluster
    mesh: Mesh
    schedule: str
    micro_batches: int
    global_batch: int
    optimizer: str
    blocks: tuple[BlockPlan, ...]
    stages: tuple[tuple[Placed, ...], ...]
    prediction: Prediction
    approximations: tuple[str, ...] = ()
    text: str = ""
    zero: int = 0
    offload: str = "none"
    certificate: Certificate | None = None
    graph: Graph | None = field(default=None, compare=False, repr=False)

    @property
    def virtual_stages(self) -> int:
        """Stages per pipeline rank; stage s lies on rank s mod `mesh.pipeline`."""
        return len(self.stages) // self.mesh.pipeline

    @property
    def devices_idle(self) -> int:
        """Of the cluster; the ranks lie on the others as `ir.seats` says."""
        return self.cluster.n_devices - self.mesh.size

    @property
    def order(self) -> tuple[tuple[Action, ...], ...]:
        """What each pipeline rank computes in a step."""
        return schedule_order(
            self.schedule, ranks=self.mesh.pipeline, micro_batches=self.micro_batches,
            virtual_stages=self.virtual_stages,
        )  # fmt: skip

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.global_batch, self.mesh.data, self.mesh.tensor, self.micro_batches)

    @property
    def hash(self) -> str:
        """Twelve hex digits of the decisions and predictions."""
        return hashlib.sha256(self._body().encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"plan {self.hash}   {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` reads them back to an equal plan."""
        content: dict[str, Any] = json.loads(json.dumps(self._content()))  # lists for tuples
        return {"format": FORMAT, "hash": self.hash, **content}

    def _content(self) -> dict[str, Any]:
        # the cluster, which writes itself, is left out for a moment
        value = asdict(replace(self, cluster=None, graph=None))  # type: ignore[arg-type]
        del value["graph"]
        if not self.zero:  # as in plan files from before there was a choice: same bytes, same hash
            del value["zero"]
        if self.offload == "none":
            del value["offload"]
        if self.devices_idle:
            value["devices_idle"] = self.devices_idle
        if self.certificate is None:
            del value["certificate"]
        elif not self.certificate.is_cut_short:
            del value["certificate"]["is_cut_short"]
        for block in value["blocks"]:
            if not block["hosts"]:
                del block["hosts"]
        for stage in value["prediction"]["stages"]:
            for part in ("host_bytes", "capacity_bytes"):
                if not stage[part]:
                    del stage[part]
        return {**value, "cluster": self.cluster.to_json()}

    def _body(self) -> str:
        return json.dumps(self._content(), sort_keys=True)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, whole or not at all."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads and checks a plan; a file that is cut off, altered or of another version is a
        `UsageError` that says which."""
        try:
            value = json.loads(Path(path).read_text())
        except OSError as error:
            raise UsageError(f"can't read the plan {path}: {error.strerror}.") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path} is not a whole plan file ({error}). Was it cut off? Plan again."
            ) from error
        return Plan.from_json(value, str(path))

    @staticmethod
    def from_json(value: Any, where: str = "the plan") -> Plan:
        check_plan(value, FORMAT, where)
        plan = Plan(
            value["model"], value["signature"], Cluster.from_json(value["cluster"]),
            Mesh(**value["mesh"]), value["schedule"], value["micro_batches"],
            value["global_batch"], value["optimizer"],
            tuple(_block(b) for b in value["blocks"]),
            tuple(tuple(Placed(**p) for p in stage) for stage in value["stages"]),
            _prediction(value["prediction"]), tuple(value["approximations"]), value["text"],
            value.get("zero", 0), value.get("offload", "none"),
            Certificate(**value["certificate"]) if "certificate" in value else None,
        )  # fmt: skip
        if plan.hash != value["hash"]:
            raise UsageError(
                f"{where} was altered: its content has hash {plan.hash}, but it says "
                f"{value['hash']}. Plan again, with pins for the decisions that you want changed."
            )
        seats_of(plan.cluster, plan.mesh.size)
        if value.get("devices_idle", 0) != plan.devices_idle:
            raise UsageError(
                f"{where}: devices_idle is {value.get('devices_idle', 0)}, but {plan.mesh} leaves "
                f"{plan.devices_idle} of {plan.cluster}."
            )
        if len(plan.stages) % plan.mesh.pipeline or not plan.stages:
            raise UsageError(
                f"{where}: {len(plan.stages)} stages can't lie evenly on pipeline="
                f"{plan.mesh.pipeline} ranks."
            )
        check_schedule(plan.schedule, plan.mesh.pipeline, plan.micro_batches, plan.virtual_stages)
        return plan


def _block(value: dict[str, Any]) -> BlockPlan:
    keeps, hosts = (
        tuple((label, tuple(names)) for label, names in value.get(key, ()))
        for key in ("keeps", "hosts")
    )
    fields = {
        k: tuple(value[k]) for k in ("nodes", "inputs", "outputs", "tangents", "gradients")
    }  # fmt: skip
    return BlockPlan(value["name"], **fields, keeps=keeps, hosts=hosts)


def _prediction(value: dict[str, Any]) -> Prediction:
    stages = tuple(StageCost(**stage) for stage in value["stages"])
    return Prediction(**{**value, "stages": stages})


def signature(graph: Graph) -> str:
    """What identifies a traced model: sixteen hex digits of its text and its state."""
    state = "\n".join(f"{s.name} {s.names} {s.type} {s.trainable}" for s in graph.state)
    inputs = "\n".join(f"{i.name} {i.type} {i.batch_dim}" for i in graph.inputs)
    return hashlib.sha256(f"{graph}\n{state}\n{inputs}".encode()).hexdigest()[:16]


def encode(
    variant: Variant, sharding: Sharding, keeps: Mapping[str, frozenset[str]],
    hosts: Mapping[str, frozenset[str]],
) -> BlockPlan:  # fmt: skip
    """The decisions for a variant as numbers that JSON holds."""
    factors, block = variant.factors, variant.block
    leaves = list(factors.size)
    nodes = tuple(
        strategies(node, factors, leaves).index(sharding.chosen[node]) for node in block.nodes
    )

    def cuts(names: list[str], places: tuple[Placement, ...]) -> tuple[Leaf, ...]:
        return tuple(leaf_of(variant, n, p) for n, p in zip(names, places, strict=True))

    return BlockPlan(
        block.name, nodes, cuts(list(block.inputs), sharding.inputs),
        cuts(list(block.outputs), sharding.outputs),
        cuts([t for _, t in block.tangents], sharding.tangents),
        cuts([g for _, g in block.gradients], sharding.gradients),
        tuple((label, tuple(sorted(kept))) for label, kept in keeps.items()),
        tuple((label, tuple(sorted(names))) for label, names in hosts.items() if names),
    )  # fmt: skip


def leaf_of(variant: Variant, name: str, place: Placement) -> Leaf:
    if place == PARTIAL:
        return "partial"
    return variant.factors.leaf_of(name, place) if isinstance(place, Shard) else None


def decode(variant: Variant, plan: BlockPlan) -> Sharding:
    """The `Sharding` behind a `BlockPlan`; raises `UsageError` for numbers out of range."""
    factors, block = variant.factors, variant.block
    leaves = list(factors.size)
    if len(plan.nodes) != len(block.nodes):
        raise UsageError(f"the plan's block {plan.name} has another number of operations.")
    chosen = {}
    for node, number in zip(block.nodes, plan.nodes, strict=True):
        options = strategies(node, factors, leaves)
        if not 0 <= number < len(options):
            raise UsageError(f"the plan's block {plan.name}: no strategy {number} for {node.op}.")
        chosen[node] = options[number]

    def places(names: list[str], cuts: tuple[Leaf, ...]) -> tuple[Placement, ...]:
        return tuple(place_of(variant, n, c) for n, c in zip(names, cuts, strict=True))

    return Sharding(
        chosen, places(list(block.inputs), plan.inputs), places(list(block.outputs), plan.outputs),
        places([t for _, t in block.tangents], plan.tangents),
        places([g for _, g in block.gradients], plan.gradients),
    )  # fmt: skip


def place_of(variant: Variant, name: str, cut: Leaf) -> Placement:
    if cut is None:
        return REPLICATE
    if cut == "partial":
        return PARTIAL
    place = variant.factors.shard(name, int(cut))
    if place is None:
        raise UsageError(f"the plan cuts {name} along a factor that it does not have.")
    return place


def spmd(graph: Graph, plan: Plan) -> Spmd:
    """The program that a plan stands for; refuses a plan made for another model."""
    if signature(graph) != plan.signature:
        raise Refused(
            f"the plan was made for another model ({plan.model}, signature {plan.signature}); this "
            f"one is {graph.model} with signature {signature(graph)}. Plan this model."
        )
    if plan.zero >= 2 and plan.mesh.data > 1 and splits_backward(plan.schedule):
        raise Refused(
            f"the plan has zero={plan.zero} with schedule={plan.schedule}: gradients are scattered "
            "when a block's backward ends, and this schedule cuts it in halves. Plan with zero=1."
        )
    batch_flow = flow(graph)
    kinds = variants(graph, batch_flow)
    if len(kinds) != len(plan.blocks):
        raise UsageError("the plan has another number of blocks than the model.")
    shardings = tuple(decode(v, b) for v, b in zip(kinds, plan.blocks, strict=True))
    lowered = lower_all(graph, batch_flow, kinds, shardings, plan.degrees)
    variant_of = {call: n for n, kind in enumerate(kinds) for call in kind.calls}
    stages = tuple(
        tuple(
            StageCall(index, variant_of[index], placed.keep)
            for placed in stage for index in range(placed.first, placed.first + placed.count)
        )
        for stage in plan.stages
    )  # fmt: skip
    keeps = tuple({label: frozenset(names) for label, names in b.keeps} for b in plan.blocks)
    hosts = tuple({label: frozenset(names) for label, names in b.hosts} for b in plan.blocks)
    state = _state_places(graph, kinds, shardings)
    return Spmd(graph, plan.degrees, batch_flow, kinds, lowered, state, keeps, stages, plan.zero,
                plan.offload, hosts, plan.mesh.pipeline)  # fmt: skip


def _state_places(
    graph: Graph, kinds: tuple[Variant, ...], shardings: tuple[Sharding, ...]
) -> dict[str, Placement]:
    """Where each state tensor is cut: as the blocks that read it want it."""
    names = {state.name for state in graph.state}
    found: dict[str, Placement] = dict.fromkeys(sorted(names), REPLICATE)
    for kind, sharding in zip(kinds, shardings, strict=True):
        for index in kind.calls:
            arguments = graph.calls[index].arguments
            for value, place in zip(arguments, sharding.inputs, strict=True):
                if value in names:
                    found[value] = place
    return found
