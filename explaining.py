"""The front door's part for explanations: `sw.explain`, and the `explain` command.

In: a model with a plan, or with a cluster to plan for; decisions and changes of the cluster to ask
about. Out: an `Explanation`, every number of which comes from planning again.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deciding import (
    DECISIONS,
    FLAGS,
    MODEL,
    Joined,
    ask,
    call_arguments,
    cluster_of,
    pins_of,
    planning_of,
    target_of,
)
from ir.cluster import Cluster
from ir.cluster_change import FORMS, changed, parse_changes
from ir.errors import UsageError
from ir.graph import Graph
from ir.plan import Plan
from ir.trace import trace
from planner.alternatives import decisions
from planner.explanation import Explanation, explain_request
from planner.limits import check_time_limit
from planner.pins import KEYS, check_pins, parse_pins, read_pins
from planner.timeline import simulate_plan
from planner.trials import Pinned, Request, Trials
from runtime.arguments import seconds

REFUSED = 3
TIME_LIMIT_S = 120


def explain(
    model: Any, plan: Plan | Cluster | str, batch: Any = None, *, global_batch: int | None = None,
    loss: Callable[[Any], Any] | None = None, pin: Mapping[str, Any] | None = None,
    why_not: Mapping[str, Any] | None = None, what_if: Mapping[str, str] | str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Explanation:  # fmt: skip
    """Why a plan is as it is: what the nearest other decisions and less tight constraints cost.

    `plan`: a plan of this model, or the cluster to plan for with `global_batch`; where nothing
    fits, the explanation says what is missing and what would fit. `why_not`: only these decisions,
    {"tensor": 4}. `what_if`: only this change of the cluster, {"memory": "+8GiB"} or
    "nodes=8,link.node=900". `pin`: decisions that stay fixed. All planning together takes
    `time_limit_s`; the explanation says what it cut short. `model` may be a traced `Graph`. A plan
    from a file needs an example `batch` (and `loss`) to trace the model again. Raises `UsageError`
    for what makes no sense, `Refused` for a plan of another model, or a request that has no plan
    for another reason than memory.
    """
    saved = plan if isinstance(plan, Plan) else None
    cluster = saved.cluster if saved else cluster_of(plan)
    rows = saved.global_batch if saved else global_batch
    if rows is None:
        raise UsageError("say with global_batch how many rows of a step are to be planned.")
    check_pins(read_pins(pin), cluster.n_devices, rows)
    read_pins(why_not)
    check_time_limit(time_limit_s)
    changes = _checked_changes(what_if, cluster)
    if saved is not None:
        _check_kept(saved, pin or {})
    graph = _graph(model, plan, batch, loss)
    request = Request(cluster, rows, dict(pin or {}))
    return _explained(graph, request, saved, why_not, changes, time_limit_s)


def _checked_changes(
    what_if: Mapping[str, Any] | str | None, cluster: Cluster
) -> dict[str, str] | None:
    """Changes that this cluster can have, as text."""
    if what_if is None:
        return None
    if not isinstance(what_if, str | Mapping):
        raise UsageError(f"changes are named, as {{'memory': '+8GiB'}}, not {what_if!r}.")
    if isinstance(what_if, str):
        changes = parse_changes(what_if)
    else:
        changes = {str(key): str(value) for key, value in what_if.items()}
    changed(cluster, changes)
    return changes


def _graph(model: Any, plan: Any, batch: Any, loss: Callable[[Any], Any] | None) -> Graph:
    if isinstance(model, Graph):
        return model
    if isinstance(plan, Plan) and plan.graph is not None:
        return plan.graph
    if batch is None:
        raise UsageError("give explain an example batch, as for plan, to trace the model with")
    return trace(model, *call_arguments(batch), loss=loss)


def _explained(
    graph: Graph, request: Request, plan: Plan | None, why_not: Pinned | None,
    changes: Mapping[str, str] | None, time_limit_s: float,
) -> Explanation:  # fmt: skip
    """A given plan is priced again, so that it is compared with like."""
    if plan is None:
        trials = Trials(planning_of(graph), time_limit_s)
        return explain_request(request, trials, why_not=why_not, changes=changes)
    priced = replace(plan, prediction=simulate_plan(graph, plan).prediction)
    trials = Trials(planning_of(graph, plan.optimizer), time_limit_s)
    told = explain_request(request, trials, plan=priced, why_not=why_not, changes=changes)
    return replace(told, given=plan)


def _check_kept(plan: Plan, pins: Pinned) -> None:
    """What stays fixed must be what the plan has."""
    read_pins(pins)
    now = decisions(plan)
    for key, value in pins.items():
        if now[key] != value:
            raise UsageError(
                f"pin {key}={value}: the plan has {key}={now[key]}, and a pin says what stays as "
                f"it is. Ask for another value with --why-not {key}={value}."
            )


def explain_command(options: argparse.Namespace) -> int:
    """`shardwright explain`: 3 where nothing fits, with the explanation all the same."""
    if not options.model.startswith("hf:") and Path(options.model).suffix == ".json":
        raise UsageError(
            f"{options.model}: a plan file holds no model, and to explain it is to plan again. "
            f"Write shardwright explain MODEL --plan {options.model}."
        )
    why_not = _decisions(options.why_not) if options.why_not is not None else None
    saved, cluster = target_of(options)
    changes = _checked_changes(options.what_if, cluster)
    if saved is not None:
        _check_kept(saved, pins_of(options))
    asked = ask(options)
    told = _explained(
        asked.graph, asked.request, asked.saved, why_not, changes, options.time_limit
    )
    print(json.dumps(told.to_json(), indent=1) if options.json else told)
    return 0 if told.fits else REFUSED


def _decisions(text: str) -> dict[str, int | str]:
    """--why-not, refused before any work is done."""
    try:
        found = parse_pins(text)
    except UsageError as error:
        raise UsageError(str(error).replace("--pin", "--why-not", 1)) from error
    if not found:
        raise UsageError(f"--why-not asks for nothing. Decisions are {', '.join(KEYS)}.")
    read_pins(found)
    return found


def add_explain_command(commands: Any) -> None:
    """The command's flags."""
    text = (
        "Explain a plan: what the nearest other decisions would cost, what holds it back; or, "
        "where nothing fits, what is missing and what would fit. Every number comes from planning "
        "again. The plan comes from --plan, or is made from the flags of `plan`."
    )
    command = commands.add_parser("explain", help=text.partition(": ")[0], description=text)
    command.add_argument("model", metavar="MODEL", help=MODEL)
    for flag in (*DECISIONS, "--plan"):
        command.add_argument(flag, **FLAGS[flag])
    why_not = "only what these decisions would cost, such as tensor=4 or schedule=gpipe,zero=1"
    command.add_argument("--why-not", action=Joined, metavar="KEY=VALUE,...", help=why_not)
    what_if = f"only what a change of the cluster would bring: {FORMS}"
    command.add_argument("--what-if", action=Joined, metavar="KEY=VALUE,...", help=what_if)
    command.add_argument(
        "--time-limit", type=seconds, default=TIME_LIMIT_S, metavar="SECONDS",
        help="all planning ends then; what was not tried is said (default %(default)s)",
    )  # fmt: skip
    command.add_argument("--json", **FLAGS["--json"])
    command.set_defaults(run=explain_command)
