"""The front door's part for decisions: from what was asked to a traced graph and its plan.

In: the flags that all commands share, or a model and a batch in Python. Out: the graph, and a plan
that was read or made. Where nothing fits, the error says what would.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ir.cluster import Cluster
from ir.collector import paused_collector
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.plan import Plan
from ir.trace import marks_of, trace
from planner import plan as plan_graph
from planner.explanation import first_remedies
from planner.explanation_text import remedy_text
from planner.pins import check_pins, parse_pins, read_pins
from planner.shortage import DoesNotFit
from planner.trials import Planning, Request, Trials
from runtime.arguments import count, filled, rate, seconds
from runtime.batch import tensor_leaves
from runtime.models import Loaded, load_model

REMEDIES_S = 10
"""Changes are looked for so long after a plan was found not to fit."""
MOST_REMEDIES = 2


@dataclass(frozen=True)
class Asked:
    """A model with its graph, and what is to be planned for it; `saved`: the plan of --plan."""

    loaded: Loaded
    graph: Graph
    request: Request
    saved: Plan | None = None


@paused_collector()
def ask(options: argparse.Namespace) -> Asked:
    """What the flags of a command say; what makes no sense is refused before the model is read."""
    saved, cluster = target_of(options)
    pin = pins_of(options)
    check_pins(read_pins(pin), cluster.n_devices, options.global_batch)
    loaded = load_model(options.model, seq=options.seq, batch=options.batch)
    graph = trace_loaded(loaded)
    check_fixed_batch(graph, pin, cluster)
    if saved is not None:
        return Asked(loaded, graph, Request(saved.cluster, saved.global_batch, pin), saved)
    rows = options.global_batch or rows_of(loaded, graph)
    return Asked(loaded, graph, Request(cluster, rows, pin))


def read_files(options: argparse.Namespace) -> list[str | None]:
    """What may be files among what a command reads, none of which it may overwrite."""
    model = options.model.removeprefix("hf:")
    file, _, _ = model.rpartition(":")
    return [None, file or model, *(getattr(options, key, None) for key in ("cluster", "plan"))]


def target_of(options: argparse.Namespace) -> tuple[Plan | None, Cluster]:
    """The plan of --plan, if there is one, and the cluster to plan for."""
    saved = _saved(options)
    if saved is not None:
        return saved, saved.cluster
    if not options.cluster:
        raise UsageError("say for which hardware with --cluster, such as 4x8xH100-SXM or local:4")
    return None, Cluster.parse(options.cluster)


def _saved(options: argparse.Namespace) -> Plan | None:
    """The plan of --plan; flags beside it that it has an answer to are refused."""
    if not getattr(options, "plan", None):
        return None
    refuse_flags(
        options, PLANNED, f"the plan in {options.plan} has its own. Plan again without --plan, or "
        "ask `shardwright explain` with --why-not or --what-if what another would cost.",
    )  # fmt: skip
    return Plan.load(options.plan)


def refuse_flags(options: argparse.Namespace, flags: Iterable[str], why: str) -> None:
    """Raises `UsageError` for the first of these flags that was given."""
    for flag in flags:
        if getattr(options, flag[2:].replace("-", "_"), None) is not None:
            raise UsageError(f"{flag}: {why}")


@paused_collector()
def decide(options: argparse.Namespace) -> tuple[Loaded, Graph, Plan]:
    """The model, its graph, and the plan: read from --plan, or made from the other flags."""
    if getattr(options, "plan", None):
        made = f"the plan in {options.plan} is made. Plan again to change it."
        refuse_flags(options, ["--pin", "--time-limit"], made)
    asked = ask(options)
    if asked.saved is not None:
        return asked.loaded, asked.graph, asked.saved
    limit_s = options.time_limit if options.time_limit is not None else inf
    planning = planning_of(asked.graph, time_limit_s=limit_s)
    try:
        return asked.loaded, asked.graph, planning(asked.request, inf)
    except DoesNotFit as error:
        raise Refused(f"{error} {_help(error, asked.request, planning)}") from error


def planning_of(
    graph: Graph, optimizer: str = "adamw", *, time_limit_s: float = inf
) -> Planning:
    """A function that plans requests for this graph, none for longer than `time_limit_s`."""
    return lambda request, left_s: plan_graph(
        graph, request.cluster, global_batch=request.global_batch, pin=request.pins,
        optimizer=optimizer, time_limit_s=min(time_limit_s, left_s),
    )  # fmt: skip


def _help(error: DoesNotFit, request: Request, planning: Planning) -> str:
    """What would fit, in one or two sentences."""
    found = first_remedies(error, request, Trials(planning, REMEDIES_S), MOST_REMEDIES)
    if not found:
        return "No change that fits was found at once; `shardwright explain` looks for longer."
    changes = "; or ".join(remedy_text(item) for item in found)
    return f"It would fit with {changes}. `shardwright explain` says more."


def cluster_of(cluster: Any) -> Cluster:
    """A cluster, or that of a spec."""
    if isinstance(cluster, str):
        return Cluster.parse(cluster)
    if not isinstance(cluster, Cluster):
        raise UsageError(
            f"a cluster is a Cluster or a spec such as '4x8xH100-SXM' or 'local:4', not {cluster!r}"
        )
    return cluster


def check_fixed_batch(graph: Graph, pin: Mapping[str, Any] | None, cluster: Cluster) -> None:
    """Pins that cut the batch of a model that works for one size only are refused, with why."""
    if graph.fixed_batch:
        check_pins(
            read_pins(pin), cluster.n_devices, has_batch=False, why_fixed=graph.fixed_batch
        )


def check_marks(graph: Graph, model: Any) -> None:
    """Raises `UsageError` for a model that is not as it was when it was traced."""
    now, then = dict.fromkeys(marks_of(model)), dict.fromkeys(graph.marks)
    added = [mark for mark in now if mark not in then]
    gone = [mark for mark in then if mark not in now]
    if then and (added or gone):
        is_now, was = (f"`{marks[0]}`" if marks else "nothing" for marks in (added, gone))
        raise UsageError(
            f"the model changed since it was planned: {is_now} is where {was} was. Plan it as it "
            "is to be trained."
        )


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with a batch: keyword arguments, positional ones, or one tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def trace_loaded(loaded: Loaded) -> Graph:
    """The graph of a model with its example batch and loss."""
    return trace(loaded.model, loaded.args, loaded.kwargs, loss=loaded.loss, name=loaded.name)


def rows_of(loaded: Loaded, graph: Graph) -> int:
    """The rows of the batch that the model came with."""
    leaves = [tensor for _, tensor in tensor_leaves((loaded.args, loaded.kwargs))]
    for item in graph.inputs:
        if item.batch_dim is not None:
            return leaves[item.index].shape[item.batch_dim]
    return leaves[0].shape[0] if leaves[0].dim() else 1


def pins_of(options: argparse.Namespace) -> dict[str, Any]:
    """--pin and --micro-batches as the decisions that they fix."""
    return parse_pins(options.pin or "", micro_batches=options.micro_batches)


def one_paragraph(error: BaseException | str) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())


class Joined(argparse.Action):
    """A comma-separated list that may be given in parts: none of them is forgotten."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


MODEL = (
    "FILE.py:build (a function that returns model, args, kwargs; optional loss(output) beside it), "
    "hf:PATH/config.json, or hf:NAME such as hf:llama-3-8b"
)
CLUSTER = "the hardware: 4x8xH100-SXM (nodes x devices x kind), local:4, FILE.yaml, or 2xFILE.yaml"
PIN = (
    "fix decisions, comma-separated: pipeline=2, data=2, tensor=2, micro_batches=4, schedule=1f1b, "
    "gpipe, zero-bubble or interleaved (then also virtual_stages=2), recompute=none, selective or "
    "full, zero=0 to 3, offload=none, optimizer, activations or all; the rest is chosen"
)
TRACE = "write the simulated timeline of a step as JSON that ui.perfetto.dev opens"
FLAGS: dict[str, dict[str, Any]] = {
    "--seq": {"type": count, "metavar": "N", "help": "tokens per row (hf:, or a build(seq))"},
    "--batch": {"type": count, "metavar": "N", "help": "rows of the example batch (likewise)"},
    "--cluster": {"type": filled, "metavar": "SPEC", "help": CLUSTER},
    "--global-batch": {"type": count, "metavar": "N", "help": "rows of a step, over all devices"},
    "--micro-batches": {"type": count, "metavar": "M", "help": "fix the pieces of a step"},
    "--pin": {"type": filled, "action": Joined, "metavar": "KEY=VALUE,...", "help": PIN},
    "--time-limit": {
        "type": seconds, "metavar": "SECONDS",
        "help": "end the search, which begins after the model is traced, then: with the best plan "
        "so far and its gap, or refused if that is too short to plan any",
    },
    "--plan": {
        "type": filled, "metavar": "FILE",
        "help": "a plan written by `plan --out`, instead of planning",
    },
    "--out": {"type": filled, "metavar": "PATH", "help": "where to write"},
    "--trace": {"type": filled, "metavar": "FILE", "help": TRACE},
    "--force": {"action": "store_true", "help": "overwrite a program that is already there"},
    "--steps": {"type": count, "metavar": "N", "help": "training steps (run: 20, check: 2)"},
    "--lr": {"type": rate, "default": 1e-3, "help": "AdamW's rate (default %(default)s)"},
    "--devices": {"type": count, "metavar": "N", "help": "how many ranks"},
    "--json": {"action": "store_true", "help": "print JSON on stdout"},
}
PLANNED = ("--cluster", "--global-batch", "--micro-batches")
"""What every plan has an answer to."""
DECISIONS = ("--seq", "--batch", "--cluster", "--global-batch", "--micro-batches", "--pin")
SEARCH = (*DECISIONS, "--time-limit")
