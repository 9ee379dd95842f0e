"""The front door's part for checks: `sw.check`, and the `check` command.

In: a model, a number of ranks or a cluster, decisions. Out: per plan how far its program is from
the plain model, all ranks in this process, in float64.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from torch import nn

from codegen import emit, load
from deciding import check_fixed_batch, one_paragraph, pins_of, rows_of, trace_loaded
from ir.cluster import Cluster
from ir.errors import Different, ShardwrightError, UsageError
from ir.graph import Graph
from ir.layout import Shard
from ir.plan import Plan, spmd
from ir.promote import WIDE, promote
from ir.spmd import Spmd
from ir.trace import find_loss
from planner import plan as plan_graph
from planner.pins import Pins, check_pins, meshes, read_pins
from planner.shortage import DoesNotFit
from runtime.compare import (
    ERRORS,
    Comparison,
    PromoteCasts,
    Run,
    Training,
    badness,
    compare,
    run_plain,
    run_program,
    widened,
    widened_batch,
)
from runtime.models import Loaded, load_model
from runtime.numberless import check_losses
from runtime.own_precision import own_precision_error
from runtime.rounding import NUDGES, nudged
from runtime.undropped import NothingDropped

SLOW = 1e6
"""Times slower than a core: what is sent and launched takes no time beside what is computed."""
EXIT_CODES = {"ok": 0, "refused": 3, "mismatch": 4}
UNKNOWN: dict[str, Any] = dict.fromkeys(("status", "plan", *ERRORS, "worst", "reason"))
MOST_RANKS = 128
"""Threads at once; 100 take half a minute for a small model."""
CONSTANTS = (
    "constants of the model depend on its dtype (an eps, say), so in float64 it is another one: "
    "compared with its one-device program, which is the model at its own precision, and to 1e-9 "
    "where both are traced in float64"
)
DROPPED = (
    "compared with its one-device program only, not with the model: dropout that can't be switched "
    "off is in it"
)
"""What a result says beside its numbers."""
WIDER = (
    " check computes in float64, where float32 takes twice the memory and bfloat16 four times: at "
    "its own precision the plan may fit. Give the devices so much more memory, or check with "
    "--devices."
)
"""What a refusal for memory says beside its numbers."""


def check(
    loaded: Loaded, devices: int | Cluster, *, pin: Mapping[str, Any] | None = None, steps: int = 2
) -> list[dict[str, Any]]:
    """Compare the program of a plan with the plain model, all ranks in this process, in float64.

    Without a mesh degree in `pin`, one result for every (pipeline, data, tensor) whose product is
    `devices`, planned for devices so slow that the tensor axis cuts all that it can. A result has
    status ("ok", "mismatch" or "refused"), plan, loss_rel_err, grad_rel_err, param_rel_err, worst
    and reason. Raises `UsageError` for pins that make no sense.
    """
    cluster = devices if isinstance(devices, Cluster) else _eager(Cluster.local(devices))
    if cluster.n_devices > MOST_RANKS:
        raise UsageError(
            f"check runs every rank as a thread of this process: at most {MOST_RANKS}, not "
            f"{cluster.n_devices}. A few devices show the same splits."
        )
    check_pins(read_pins(pin), cluster.n_devices)
    pin = dict(pin or {})
    checker = _Checker(loaded, steps)
    if pin.keys() & {"pipeline", "data", "tensor"}:
        check_pins(read_pins(pin), cluster.n_devices, checker.rows)
        check_fixed_batch(checker.graph, pin, cluster)
        return [checker.check(cluster, pin)]
    splits = [asdict(mesh) for mesh in meshes(Pins(), cluster.n_devices)]
    return [checker.check(cluster, pin | split) for split in splits]


class _Reference:
    """What programs of a model are compared with: `train` gives the run of a model."""

    def __init__(self, train: Callable[[nn.Module], Run], model: nn.Module, update: float) -> None:
        self.train, self.model, self.update = train, model, update

    @cached_property
    def plain(self) -> Run:
        return self.train(self.model)

    @cached_property
    def nudged(self) -> list[Run]:
        """Runs of copies that differ in a last bit: made where a difference may be rounding."""
        return [self.train(nudged(self.model, n)) for n in range(NUDGES)]

    def compare(self, found: Run) -> Comparison:
        plainly = compare(found, self.plain, update=self.update)
        if plainly.status == "ok":
            return plainly
        return compare(found, self.plain, update=self.update, nudged=self.nudged)


class _Checker:
    """Compares programs of one model with it, both in float64 with the model's casts promoted.

    Where a difference is above the tolerance, copies of the model that differ in a last bit say how
    far rounding moves each tensor. The program for one device stands for the plain model in two
    cases, and is compared with it at the model's own precision. Where the model drops out: masks
    come from the program's counter; that comparison is with nothing dropped. Where constants of the
    model depend on its dtype, such as the eps of an RMSNorm: the program has those of the model's
    own dtype and the model in float64 has others, which a trace in float64 confirms.
    """

    def __init__(self, loaded: Loaded, steps: int) -> None:
        own = trace_loaded(loaded)
        self.loaded = loaded
        self.graph, self.is_widened = promote(own), _is_narrow(own)
        self.rows = rows_of(loaded, self.graph)
        self.training = Training(steps)
        self.model = widened(loaded.model)
        self.batch = widened_batch(loaded.args), widened_batch(loaded.kwargs)
        self.loss = loaded.loss or find_loss
        self.note = ""
        self.alone = _Reference(self._run_alone, self.model, self.training.lr)
        if not _drops_out(own):
            self.reference = _Reference(self._run_plain, self.model, self.training.lr)
            self._check_own_precision(loaded, own)
        else:
            self.reference = self.alone
            self._check_with_nothing_dropped(loaded)
        plain = self.reference.plain  # a model that can't be trained is refused here
        check_losses(plain.losses, plain.gradients)

    def _check_with_nothing_dropped(self, loaded: Loaded) -> None:
        with NothingDropped():
            kept = trace_loaded(loaded)
            if _drops_out(kept):
                self.note = DROPPED
            else:
                self._check_own_precision(loaded, kept)

    def _run_plain(self, model: nn.Module) -> Run:
        return run_plain(model, *self.batch, self.loss, self.training)

    def _run_alone(self, model: nn.Module) -> Run:
        return self.run(self.graph, self.one_device(self.graph), model)

    def one_device(self, graph: Graph) -> Plan:
        return plan_graph(graph, Cluster.local(1), global_batch=self.rows)

    def _check_own_precision(self, loaded: Loaded, graph: Graph) -> None:
        """Refuses to go on if the one-device program is not the model at its own precision."""
        chosen = plan_graph(graph, Cluster.local(1), global_batch=self.rows)
        batch = loaded.args, loaded.kwargs
        wanted = run_plain(loaded.model, *batch, self.loss, Training(1), promote=False)
        found = run_program(*load(emit(graph, chosen)), loaded.model, *batch, Training(1))
        error = own_precision_error(found, wanted, loaded.model)
        if not error <= 1:  # unless it is all rounding
            copies = [nudged(loaded.model, n) for n in range(NUDGES)]
            moved = [run_plain(c, *batch, self.loss, Training(1), promote=False) for c in copies]
            error = own_precision_error(found, wanted, loaded.model, moved)
        if not error <= 1:
            raise Different(
                f"the one-device program of {loaded.name} differs from the model at the model's "
                f"own precision, {error:.3g} times what rounding explains. This is a defect of "
                "Shardwright; please report the model."
            )

    def run(self, graph: Graph, chosen: Plan, model: nn.Module) -> Run:
        return run_program(*load(emit(graph, chosen)), model, *self.batch, self.training)

    @cached_property
    def has_constants_of_its_dtype(self) -> bool:
        """Whether the one-device program differs from the model in float64, and the program of a
        trace in float64 does not."""
        if self.reference is self.alone or self.reference.compare(self.alone.plain).status == "ok":
            return False
        with PromoteCasts():
            wide = trace_loaded(Loaded(self.model, *self.batch, self.loaded.loss, self.loaded.name))
        found = self.run(wide, self.one_device(wide), self.model)
        return self.reference.compare(found).status == "ok"

    def check(self, cluster: Cluster, pin: Mapping[str, Any]) -> dict[str, Any]:
        note = self.note
        try:
            chosen = plan_graph(self.graph, cluster, global_batch=self.rows, pin=dict(pin))
            ran = self.run(self.graph, chosen, self.model)
            found = self.reference.compare(ran)
            if found.status != "ok" and self.has_constants_of_its_dtype:
                found, note = self.alone.compare(ran), CONSTANTS
        except ShardwrightError as error:
            asked = " ".join(f"{key}={value}" for key, value in pin.items())
            wider = WIDER if isinstance(error, DoesNotFit) and self.is_widened else ""
            why = one_paragraph(error) + wider
            return UNKNOWN | {"status": "refused", "plan": asked, "reason": why}
        said = found.to_json()
        reason = said["reason"] or "; ".join(filter(None, (note, self._left_out(chosen, cluster))))
        return UNKNOWN | said | {
            "status": found.status, "plan": str(chosen.mesh), "reason": reason or None
        }  # fmt: skip

    def _left_out(self, chosen: Plan, cluster: Cluster) -> str:
        """What a comparison does not show, though it was asked for."""
        mesh, said = chosen.mesh, []
        if mesh.size < cluster.n_devices:
            said.append(f"{cluster.n_devices - mesh.size} of {cluster.n_devices} ranks idle")
        if mesh.tensor > 1 and not _cuts_tensors(spmd(self.graph, chosen)):
            said.append("nothing is cut on the tensor axis: its ranks repeat each other")
        return ", ".join(said)


def _eager(cluster: Cluster) -> Cluster:
    """With devices so slow that whatever a plan can cut is worth cutting."""
    device = cluster.device
    peaks = tuple((dtype, rate / SLOW) for dtype, rate in device.peaks)
    bandwidth = device.memory_bandwidth_bytes_per_s / SLOW
    return replace(
        cluster, device=replace(device, peaks=peaks, memory_bandwidth_bytes_per_s=bandwidth)
    )


def _cuts_tensors(program: Spmd) -> bool:
    layouts = (layout for block in program.lowered for layout in block.layouts.values())
    return any(isinstance(layout.tensor, Shard) for layout in layouts)


def _is_narrow(graph: Graph) -> bool:
    """Whether float64 makes any of the model's state larger."""
    return any(item.type.dtype in WIDE for item in graph.state)


def _drops_out(graph: Graph) -> bool:
    return any(node.op == "dropout" for block in graph.blocks for node in block.nodes)


def check_command(options: argparse.Namespace) -> int:
    """`shardwright check`: 4 where numbers differ, 3 where no plan was found."""
    if options.cluster and options.devices:
        raise UsageError("--devices and --cluster both say how many ranks: give one of them")
    devices = Cluster.parse(options.cluster) if options.cluster else options.devices
    if devices is None:
        raise UsageError("say how many ranks with --devices N, or for which hardware: --cluster")
    loaded = load_model(options.model, seq=options.seq, batch=options.batch, device="cpu")
    results = check(loaded, devices, pin=pins_of(options), steps=options.steps or 2)
    worst = max(results, key=badness)
    if options.json:
        print(json.dumps({**worst, "combinations": results} if len(results) > 1 else worst))
    else:
        print("\n".join(_check_lines(loaded, results)))
    return EXIT_CODES[worst["status"]]


def _check_lines(loaded: Loaded, results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{loaded.name}: relative difference from the plain model, in float64"
    for result in results:
        head = f"{result['plan']:<28}  {result['status']:<8}"
        if result["loss_rel_err"] is None:
            yield f"{head}  {result['reason']}"
            continue
        loss, gradients, parameters = (result[key] for key in ERRORS)
        why = result["reason"] or f"worst: {result['worst']}"
        errors = f"loss {loss:.1e}  gradients {gradients:.1e}  parameters {parameters:.1e}"
        yield f"{head}  {errors}  {why}"
