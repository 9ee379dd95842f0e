"""Predicted against measured step times of emitted programs on this machine, after a calibration.

    python benchmarks/calibrated_demo.py [--cluster machine.yaml] [--write docs/accuracy.md]

Plans the two example models for 1, 2 and 4 processes, runs each program as `shardwright run` does,
and compares the median step time that it reports with the plan's. That step has the batch cut, the
schedule, the exchange of gradients, the update and the loss read back; making batches and printing
lie outside it. Prints a table; --write puts it between its markers in a page.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

import shardwright as sw
from calibration import calibrate
from runtime.launch import launch
from runtime.models import Loaded

HERE = Path(__file__).parent
MODELS = {
    "GPT-2, 0.8 M": HERE.parent / "examples" / "gpt2_bytes.py",
    "Llama, 0.1 M": HERE.parent / "examples" / "tiny_llama.py",
}
PLANS: tuple[tuple[int, Mapping[str, int]], ...] = (
    (1, {}),
    (2, {"data": 2}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (4, {"data": 2, "tensor": 2}),
    (4, {"pipeline": 2, "data": 2}),
)
BEGIN, END = "<!-- calibrated: begin -->", "<!-- calibrated: end -->"
WARM_UP = 5
"""Steps that are not counted: first allocations, first messages."""
BAR = 0.20


@dataclass(frozen=True, slots=True)
class Outcome:
    """One program: seconds per step, and what part of the cores other processes had meanwhile."""

    model: str
    plan: str
    predicted_s: float
    measured_s: float
    others: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Program:
    """An emitted program, and what its plan says."""

    model: str
    plan: str
    folder: Path
    predicted_s: float


def main() -> int:
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        outcomes = list(_outcomes(options, Path(folder)))
    text = report(outcomes, options)
    print(text)
    if options.write:
        _write(options.write, text)
    return 0


def _outcomes(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Every program once per round, so that all share the same times of day."""
    cluster = options.cluster or _calibrated(folder / "machine.yaml")
    programs = [
        program
        for name, path in MODELS.items()
        for program in _programs(name, path, cluster, folder)
    ]
    steps: dict[Path, list[tuple[list[float], float]]] = {}
    for number in range(options.rounds):
        for program in programs:
            print(f"round {number + 1}: {program.model}, {program.plan}", file=sys.stderr)
            found = _run(program, options.steps, folder / "log.jsonl")
            steps.setdefault(program.folder, []).append(found)
    for program in programs:
        runs = steps[program.folder]
        measured_s = median(s for times, _ in runs for s in times)
        others = sum(share for _, share in runs) / len(runs)
        yield Outcome(program.model, program.plan, program.predicted_s, measured_s, others)


def _calibrated(path: Path) -> Path:
    values, _ = calibrate((1, 2, 4), say=lambda line: print(line, file=sys.stderr))
    path.write_text(yaml.safe_dump(values, default_flow_style=None), encoding="utf-8")
    return path


def _programs(name: str, path: Path, cluster: Path, folder: Path) -> Iterator[Program]:
    """Traces a model, plans it in every way and writes the programs."""
    model = f"{path}:build"
    loaded: Loaded = sw.load_model(model, device="cpu")
    graph = sw.trace(loaded.model, loaded.args, loaded.kwargs, loss=loaded.loss, name=loaded.name)
    ids = loaded.kwargs["input_ids"]
    for processes, pin in PLANS:
        machine = sw.Cluster.parse(f"{processes}x{cluster}")
        plan = sw.plan_graph(graph, machine, global_batch=ids.shape[0], pin=pin)
        words = " ".join(f"{axis}={degree}" for axis, degree in pin.items()) or "1 process"
        out = folder / f"{path.stem}-{words.replace(' ', '-')}"
        sw.emit(graph, plan).for_model(model, seq=None).write(out, force=True)
        print(f"planned {name}, {words}: {plan.prediction.step_s * 1e3:.1f} ms", file=sys.stderr)
        yield Program(name, words, out, plan.prediction.step_s)


def _run(program: Program, steps: int, log: Path) -> tuple[list[float], float]:
    """Seconds of the counted steps, and the part of all cores that others used."""
    before = _cpu_seconds()
    launch(program.folder, argv=[f"--steps={steps + WARM_UP}", f"--log={log}", "--every=10000"])
    after = _cpu_seconds()
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    times = [line["step_s"] for line in lines[WARM_UP:]]
    busy_s, whole_s, own_s = (late - early for early, late in zip(before, after, strict=True))
    return times, max(0.0, busy_s - own_s) / max(whole_s, 1e-9)


def _cpu_seconds() -> tuple[float, float, float]:
    """Of all cores: busy and altogether, as /proc/stat counts; and of this process's children."""
    ticks = os.sysconf("SC_CLK_TCK")
    words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    counts = [int(word) / ticks for word in words]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(counts) - counts[3] - counts[4], sum(counts), used.ru_utime + used.ru_stime


def report(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """The table and the medians, as Markdown."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"A machine with {cores} cores, {options.rounds} rounds of {options.steps} steps each, "
        "calibrated just before. Others: the part of the cores that other processes used.",
        "",
        "| model | plan | predicted | measured | error | others |",
        "|---|---|---|---|---|---|",
    ]
    for item in outcomes:
        lines.append(
            f"| {item.model} | {item.plan} | {item.predicted_s * 1e3:.1f} ms "
            f"| {item.measured_s * 1e3:.1f} ms | {item.error:+.0%} | {item.others:.0%} |"
        )
    errors = [abs(item.error) for item in outcomes]
    within = sum(error <= BAR for error in errors)
    lines += ["", f"Median error {median(errors):.1%}; {within} of {len(errors)} within {BAR:.0%}."]
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", type=Path, help="what `calibrate` wrote (default: run it)")
    parser.add_argument("--steps", type=int, default=25, help="counted steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", type=Path, help="a page with markers to write the table into")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
