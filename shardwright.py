"""The front door of Shardwright: the public names, and the command line.

In: a PyTorch model and a cluster. Out: a `Plan`, and the parallel training program that it stands
for. This is the only module that imports all four rooms.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from calibration import add_calibrate_command
from codegen import Program, emit, load
from deciding import (
    DECISIONS,
    FLAGS,
    MODEL,
    call_arguments,
    decide,
    pins_of,
    rows_of,
    trace_loaded,
)
from explaining import add_explain_command, explain
from ir.cluster import Cluster
from ir.errors import Different, ShardwrightError, UsageError
from ir.graph import Graph
from ir.plan import Plan
from ir.promote import promote
from ir.trace import find_loss, trace
from planner import plan as plan_graph
from planner.pins import Pins, meshes
from planner.timeline import simulate_plan
from planner.trace_file import write_trace
from prediction import add_predict_command, predict
from runtime.compare import (
    ERRORS,
    Run,
    Training,
    badness,
    compare,
    own_precision_error,
    run_plain,
    run_program,
    widened,
    widened_batch,
)
from runtime.launch import launch
from runtime.models import Loaded, load_model
from runtime.trainer import connect

__all__ = [
    "Cluster", "Graph", "Plan", "Program", "check", "compile", "emit", "explain", "load_model",
    "load_plan", "plan", "plan_graph", "predict", "trace",
]  # fmt: skip

OK, USAGE, REFUSED, DIFFERENT, INTERRUPTED = 0, 2, 3, 4, 130
UNKNOWN: dict[str, Any] = dict.fromkeys(("status", "plan", *ERRORS, "worst", "reason"))
load_plan = Plan.load


def plan(
    model: Any, cluster: Cluster | str, batch: Any, *, global_batch: int,
    loss: Callable[[Any], Any] | None = None, pin: Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """Decide how to train `model` on `cluster`; the same input gives the same plan.

    `batch` is what the model is called with: a dict of keyword arguments, a tuple of positional
    ones, or one tensor. `loss` makes the loss from the model's output, if that is not the loss
    already. `pin` fixes decisions: {"tensor": 2, "schedule": "gpipe", "zero": 1}.
    """
    args, kwargs = call_arguments(batch)
    graph = trace(model, args, kwargs, loss=loss)
    return replace(plan_graph(graph, cluster, global_batch=global_batch, pin=pin), graph=graph)


def compile(  # the public name, as in torch.compile
    model: Any, plan: Plan, batch: Any = None, *, loss: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Callable[[Any], Any]:  # fmt: skip
    """Under torchrun: this rank's share of `model`, and a function from a batch to the loss.

    The function takes the global batch, in the form that `plan` was given, on every rank; its
    `trainer` attribute has gradients, metrics and `write_back`. A plan that was loaded from a file
    needs an example `batch` (and `loss`) to trace the model again. `options` go to
    `runtime.trainer.connect`: optimizer="adamw", optimizer_options, clip_norm, seed, device.
    """
    graph = plan.graph
    if graph is None:
        if batch is None:
            raise UsageError("a plan from a file holds no model: give compile an example batch")
        graph = trace(model, *call_arguments(batch), loss=loss)
    module, layout = load(emit(graph, plan))
    trainer = connect(module, layout, model, **options)

    def step(batch: Any) -> Any:
        args, kwargs = call_arguments(batch)
        return trainer.step(*args, **kwargs)

    step.trainer = trainer  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return step


def check(
    loaded: Loaded, devices: int | Cluster, *, pin: Mapping[str, Any] | None = None, steps: int = 2
) -> list[dict[str, Any]]:
    """Compare the program of a plan with the plain model, all ranks in this process, in float64.

    Without a mesh degree in `pin`, one result for every (pipeline, data, tensor) whose product is
    `devices`. A result has status ("ok", "mismatch" or "refused"), plan, loss_rel_err,
    grad_rel_err, param_rel_err, worst and reason.
    """
    checker = _Checker(loaded, steps)
    cluster = devices if isinstance(devices, Cluster) else Cluster.local(devices)
    pin = dict(pin or {})
    fixed = pin.keys() & {"pipeline", "data", "tensor"}
    splits = [{}] if fixed else [asdict(mesh) for mesh in meshes(Pins(), cluster.n_devices)]
    return [checker.check(cluster, pin | split) for split in splits]


class _Checker:
    """Compares programs of one model with it, both in float64 with the model's casts promoted.

    Where the model drops out, masks come from the program's counter, so the program for one device
    stands for the plain model.
    """

    def __init__(self, loaded: Loaded, steps: int) -> None:
        own = trace_loaded(loaded)
        self.graph = promote(own)
        self.rows = rows_of(loaded, self.graph)
        self.training = Training(steps)
        self.model = widened(loaded.model)
        self.batch = widened_batch(loaded.args), widened_batch(loaded.kwargs)
        nodes = (node for block in self.graph.blocks for node in block.nodes)
        if any(node.op == "dropout" for node in nodes):
            self.plain = self.run(plan_graph(self.graph, Cluster.local(1), global_batch=self.rows))
        else:
            loss = loaded.loss or find_loss
            self.plain = run_plain(self.model, *self.batch, loss, self.training)
            self._check_own_precision(loaded, own, loss)

    def _check_own_precision(self, loaded: Loaded, graph: Graph, loss: Callable[..., Any]) -> None:
        """Refuses to go on if the one-device program is not the model at its own precision."""
        chosen = plan_graph(graph, Cluster.local(1), global_batch=self.rows)
        batch = loaded.args, loaded.kwargs
        found = run_program(*load(emit(graph, chosen)), loaded.model, *batch, Training(1))
        wanted = run_plain(loaded.model, *batch, loss, Training(1), promote=False)
        error = own_precision_error(found, wanted, loaded.model)
        if not error <= 1:
            raise Different(
                f"the one-device program of {loaded.name} differs from the model at the model's "
                f"own precision, {error:.3g} times what rounding explains. This is a defect of "
                "Shardwright; please report the model."
            )

    def run(self, chosen: Plan) -> Run:
        return run_program(*load(emit(self.graph, chosen)), self.model, *self.batch, self.training)

    def check(self, cluster: Cluster, pin: Mapping[str, Any]) -> dict[str, Any]:
        try:
            chosen = plan_graph(self.graph, cluster, global_batch=self.rows, pin=dict(pin))
            found = compare(self.run(chosen), self.plain, update=self.training.lr)
        except ShardwrightError as error:
            asked = " ".join(f"{key}={value}" for key, value in pin.items())
            return UNKNOWN | {"status": "refused", "plan": asked, "reason": _paragraph(error)}
        return UNKNOWN | {"status": found.status, "plan": str(chosen.mesh), **found.to_json()}


# The command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors that a user can cause are one paragraph on stderr."""
    options = _parser().parse_args(argv)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a refusal says what torch would log
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        return _report(options, f"{error.filename}: {error.strerror}", USAGE)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int):
            raise
        return _report(options, _paragraph(error), code)


def _paragraph(error: BaseException) -> str:
    return " ".join(str(error).split())


def _report(options: argparse.Namespace, reason: str, code: int) -> int:
    if options.json:
        known = UNKNOWN if options.run is _check_command else {}
        status = {USAGE: "usage", DIFFERENT: "mismatch"}.get(code, "refused")
        print(json.dumps({**known, "status": status, "reason": reason}))
    print(f"shardwright: {reason}", file=sys.stderr)
    return code


def _plan_command(options: argparse.Namespace) -> int:
    if options.out and options.trace and Path(options.out) == Path(options.trace):
        raise UsageError(f"--out and --trace are both {options.out}: give each a file of its own.")
    _, graph, chosen = decide(options)
    if options.out:
        chosen.save(options.out)
    if options.trace:
        write_trace(options.trace, chosen, simulate_plan(graph, chosen).timeline)
    print(json.dumps(chosen.to_json(), indent=1) if options.json else chosen)
    return OK


def _emit_command(options: argparse.Namespace) -> int:
    if not options.out:
        raise UsageError("say where to write the program with --out FOLDER")
    _, graph, chosen = decide(options)
    program = emit(graph, chosen).for_model(options.model, seq=options.seq)
    program.write(options.out, force=options.force)
    if options.json:
        files = sorted(program.files)
        print(json.dumps({"status": "ok", "plan": chosen.hash, "out": options.out, "files": files}))
    else:
        print(f"wrote {', '.join(sorted(program.files))}. Start it with {options.out}/launch.sh")
    return OK


def _run_command(options: argparse.Namespace) -> int:
    argv = [f"--steps={options.steps or 20}", f"--lr={options.lr}"]
    argv += ["--json"] if options.json else []
    if Path(options.model).is_dir():
        launch(options.model, argv=argv)
        return OK
    _, graph, chosen = decide(options)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        program = emit(graph, chosen).for_model(options.model, seq=options.seq)
        program.write(folder, force=True)
        launch(folder, argv=argv)
    return OK


def _check_command(options: argparse.Namespace) -> int:
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
    return {"ok": OK, "mismatch": DIFFERENT, "refused": REFUSED}[worst["status"]]


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


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], tuple[str, ...], str]] = {
    "plan": (
        _plan_command,
        (*DECISIONS, "--out", "--trace"),
        "Decide how to train a model on a cluster, and print the decisions with what they cost. "
        "Needs neither the cluster nor the weights. --out saves the plan, --trace its timeline.",
    ),
    "emit": (
        _emit_command,
        (*DECISIONS, "--plan", "--out", "--force"),
        "Write the training program of a plan as a folder of readable Python that starts with "
        "launch.sh. The plan comes from --plan, or is made from the flags of `plan`.",
    ),
    "run": (
        _run_command,
        (*DECISIONS, "--plan", "--steps", "--lr"),
        "Train over processes on this machine, started and watched here. MODEL may be the folder "
        "of an emitted program. If a rank dies, the others are stopped and its error is shown.",
    ),
    "check": (
        _check_command,
        ("--seq", "--batch", "--devices", "--cluster", "--micro-batches", "--pin", "--steps"),
        "Compare a plan's program with the plain model: loss, every gradient, parameters after "
        "the steps, buffers, replicas. All ranks run in this process, in float64. Without mesh "
        "degrees in --pin, every split of the devices is tried. Exit code 4: numbers differ.",
    ),
}
EPILOG = """examples:
  shardwright plan hf:llama-3-8b --cluster 4x8xH100-SXM --seq 8192 --global-batch 512
  shardwright explain hf:gpt2 --cluster 8xA100-80GB --global-batch 64 --why-not pipeline=2
  shardwright run examples/gpt2_bytes.py:build --cluster local:4 --steps 20
  shardwright check examples/tiny_llama.py:build --devices 4

exit codes: 0 fine, 2 the request makes no sense as written, 3 refused with a reason (no plan
fits, the model can't be captured), 4 numbers differ"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwright",
        description="Plan, emit, run and check parallel training programs for PyTorch models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, flags, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text.partition(". ")[0], description=text)
        command.add_argument("model", metavar="MODEL", help=MODEL)
        for flag in (*flags, "--json"):
            command.add_argument(flag, **FLAGS[flag])
        command.set_defaults(run=run)
    add_explain_command(commands)
    add_predict_command(commands)
    add_calibrate_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
