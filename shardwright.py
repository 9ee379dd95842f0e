"""The front door of Shardwright: the public names, and the command line.

In: a PyTorch model and a cluster. Out: a `Plan`, and the parallel training program that it stands
for. This is the only module that imports all four rooms.
"""

import sys

if __name__ == "__main__":  # before the imports below, which take seconds
    from shardwright_command import main as command

    sys.exit(command())

import argparse
import json
import os
import select
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any, TextIO

import torch

from calibration import add_calibrate_command
from checking import UNKNOWN, check, check_command
from codegen import Program, check_target, emit, load
from deciding import (
    FLAGS,
    MODEL,
    SEARCH,
    call_arguments,
    check_fixed_batch,
    check_marks,
    cluster_of,
    decide,
    one_paragraph,
    read_files,
    refuse_flags,
)
from explaining import add_explain_command, explain
from ir.cluster import Cluster
from ir.collector import paused_collector
from ir.errors import UsageError
from ir.graph import Graph
from ir.interrupts import INTERRUPTED, orderly_end
from ir.plan import Plan
from ir.topology import CPU
from ir.trace import trace
from ir.whole_file import check_writable
from planner import plan as plan_graph
from planner.limits import check_processes, check_time_limit
from planner.pins import check_pins, read_pins
from planner.row_cells import nearest
from planner.timeline import simulate_plan
from planner.trace_file import write_trace
from prediction import add_predict_command, predict
from runtime.launch import launch
from runtime.models import load_model
from runtime.trainer import Trainer, connect

__all__ = [
    "Cluster", "Graph", "Plan", "Program", "check", "compile", "emit", "explain", "load_model",
    "load_plan", "plan", "plan_graph", "predict", "trace",
]  # fmt: skip

OK, USAGE, REFUSED, DIFFERENT = 0, 2, 3, 4
load_plan = Plan.load


def plan(
    model: Any, cluster: Cluster | str, batch: Any, *, global_batch: int,
    loss: Callable[[Any], Any] | None = None, pin: Mapping[str, Any] | None = None,
    time_limit_s: float = inf, processes: int | None = None,
) -> Plan:  # fmt: skip
    """Decide how to train `model` on `cluster`; the same input gives the same plan.

    `batch` is what the model is called with: a dict of keyword arguments, a tuple of positional
    ones, or one tensor. `loss` makes the loss from the model's output, if that is not the loss
    already. `pin` fixes decisions: {"tensor": 2, "schedule": "gpipe", "zero": 1}. After
    `time_limit_s` the search ends with the best plan so far and its gap. On Linux it uses
    `processes` processes (by default one per core, four at most).
    """
    args, kwargs = call_arguments(batch)
    cluster = cluster_of(cluster)
    check_pins(read_pins(pin), cluster.n_devices, global_batch)
    check_time_limit(time_limit_s)
    check_processes(processes)
    graph = trace(model, args, kwargs, loss=loss)
    check_fixed_batch(graph, pin, cluster)
    made = plan_graph(
        graph, cluster, global_batch=global_batch, pin=pin, time_limit_s=time_limit_s,
        processes=processes,
    )  # fmt: skip
    return replace(made, graph=graph)


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
    if not isinstance(plan, Plan):
        raise UsageError(
            f"compile takes a plan, of sw.plan or sw.load_plan, and not a {type(plan).__name__}"
        )
    graph = plan.graph
    if graph is None:
        if batch is None:
            raise UsageError("a plan from a file holds no model: give compile an example batch")
        graph = trace(model, *call_arguments(batch), loss=loss)
    check_marks(graph, model)
    known = {*signature(connect).parameters, *signature(Trainer).parameters}
    if unknown := sorted(options.keys() - (known - {"program", "layout", "model", "transport"})):
        raise UsageError(f"compile has no option {unknown[0]!r}{nearest(unknown[0], known)}")
    module, layout = load(emit(graph, plan))
    trainer = connect(module, layout, model, **options)

    def step(batch: Any) -> Any:
        args, kwargs = call_arguments(batch)
        return trainer.step(*args, **kwargs)

    step.trainer = trainer  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return step


# The command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors that a user can cause are one paragraph on stderr."""
    options = _parser().parse_args(argv)
    try:
        with orderly_end():
            code = options.run(options)
            sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt as end:
        return getattr(end, "exit_code", INTERRUPTED)
    except BrokenPipeError:
        if not _has_lost_reader(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        if error.filename is None:
            raise
        return _report(options, f"{error.filename}: {error.strerror}", USAGE)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int):
            raise
        return _report(options, error, code)


def _has_lost_reader(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose reader, such as `head`, has seen enough and is gone."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # what is looked for is told unasked
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # a stream without a file, or closed
        return False


def _report(options: argparse.Namespace, error: Exception | str, code: int) -> int:
    reason = one_paragraph(error)
    if options.json:
        known = UNKNOWN if options.run is check_command else {}
        status = {USAGE: "usage", DIFFERENT: "mismatch"}.get(code, "refused")
        print(json.dumps({**known, "status": status, "reason": reason}))
    print(f"shardwright: {getattr(error, 'unseen', reason)}", file=sys.stderr)
    return code


@paused_collector()
def _plan_command(options: argparse.Namespace) -> int:
    files = [Path(name) for name in (options.out, options.trace) if name]
    if len({file.resolve() for file in files}) < len(files):
        raise UsageError(f"--out and --trace are both {options.out}: give each a file of its own.")
    for file in files:
        for source in read_files(options):
            check_writable(file, source)
    _, graph, chosen = decide(options)
    if options.out:
        chosen.save(options.out)
    if options.trace:
        write_trace(options.trace, chosen, simulate_plan(graph, chosen).timeline)
    print(json.dumps(chosen.to_json(), indent=1) if options.json else chosen)
    return OK


@paused_collector()
def _emit_command(options: argparse.Namespace) -> int:
    if not options.out:
        raise UsageError("say where to write the program with --out FOLDER")
    check_target(options.out, force=options.force)
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
        own = f"{options.model} is an emitted program, which has its plan, model and sizes."
        refuse_flags(options, (*SEARCH, "--plan"), own)
        plan_file = Path(options.model) / "plan.json"
        if plan_file.is_file():
            _say_where(Plan.load(plan_file))
        launch(options.model, argv=argv)
        return OK
    _refuse_missing_folder(options.model)
    _, graph, chosen = decide(options)
    _say_where(chosen)
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        program = emit(graph, chosen).for_model(options.model, seq=options.seq)
        program.write(folder, force=True)
        launch(folder, argv=argv)
    return OK


def _refuse_missing_folder(name: str) -> None:
    """A name that can only be that of a folder, and there is none."""
    file = Path(name.partition(":")[0])
    if name.startswith("hf:") or file.suffix == ".py" or file.exists():
        return
    raise UsageError(
        f"there is no folder {name}. `run` takes the folder of a program that `emit` wrote, or a "
        f"model: {MODEL}."
    )


def _say_where(plan: Plan) -> None:
    """Once, if a plan for GPUs is run without any."""
    if plan.cluster.device.name != CPU and not torch.cuda.is_available():
        who = "one process" if plan.mesh.size == 1 else f"{plan.mesh.size} processes"
        print(
            f"note: the plan is for {plan.cluster}, and this machine has no GPU: it runs on its "
            f"CPU, in {who}. The numbers are the plan's, the seconds are not.",
            file=sys.stderr, flush=True,
        )  # fmt: skip


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], tuple[str, ...], str]] = {
    "plan": (
        _plan_command,
        (*SEARCH, "--out", "--trace"),
        "Decide how to train a model on a cluster, and print the decisions with what they cost. "
        "Needs neither the cluster nor the weights. --out saves the plan, --trace its timeline.",
    ),
    "emit": (
        _emit_command,
        (*SEARCH, "--plan", "--out", "--force"),
        "Write the training program of a plan as a folder of readable Python that starts with "
        "launch.sh. The plan comes from --plan, or is made from the flags of `plan`.",
    ),
    "run": (
        _run_command,
        (*SEARCH, "--plan", "--steps", "--lr"),
        "Train over processes on this machine, started and watched here. MODEL may be the folder "
        "of an emitted program. If a rank dies, the others are stopped and its error is shown.",
    ),
    "check": (
        check_command,
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
fits, the model can't be captured, a rank died), 4 numbers differ, 130 interrupted (Ctrl-C),
143 ended by SIGTERM; 1 is a defect of Shardwright, with a traceback"""


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

