"""The front door's part for calibration: measures this machine, or reads nccl-tests, into a file.

In: counts of processes, outputs of nccl-tests. Out: a YAML file that every `--cluster` accepts. The
measuring is done by `runtime.measure` in processes started as those of a program are; here its rows
become curves, and curves that are too noisy are left out, so that the catalogue prices them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from ir.calibration import Calibration, Collective
from ir.calibration_file import calibration_values
from ir.cluster import Cluster
from ir.device import find_device
from ir.errors import UsageError
from ir.nccl_tests import read_nccl_tests
from ir.topology import CPU, ram_bytes
from ir.whole_file import check_writable, write_whole
from ir.yaml_values import load_yaml
from runtime.arguments import filled
from runtime.launch import run_ranks
from runtime.stopwatch import NOISE_LIMIT

GIB = 2**30
BUSY = 1.15
"""Slowdown by other work that is worth a warning."""
REACH_BYTES = 2**20
"""A curve that ends below says nothing about rates."""
PROCESSES = (1, 2, 4)
"""Run at once where nothing else is asked for."""
Row = Mapping[str, Any]
Say = Callable[[str], None]


def calibrate(
    processes: Sequence[int], *, quick: bool = False, say: Say = print
) -> tuple[dict[str, Any], list[str]]:
    """The values of a cluster file for this machine, and what was too noisy to be in it.

    `processes`: how many run at once; each count is measured by that many.
    """
    cores = len(os.sched_getaffinity(0))
    device = _device_name()
    timings, collectives, left_out = [], [], []
    made_with = f"torch {torch.__version__}"
    for count in sorted(set(processes)):
        start_s = time.perf_counter()
        say(f"{count} process{'es' if count > 1 else ''} at once:")
        found = _measured(count, quick=quick)
        measured, noisy = timings_of(found["rows"], count, found["threads"])
        timings += [measured] if measured["kernels"] or measured["products"] else []
        groups, noisy_groups = collectives_of(found["rows"], count)
        collectives += groups
        if not found["complete"]:
            noisy.append(
                f"{count} processes: time was up after {len(found['rows'])} measurements; the rest "
                "keeps the catalogue's value. Calibrate while the machine does nothing else"
            )
        if found["busy"] > BUSY:
            say(
                f"  other work made the processes {found['busy']:.2f} times slower meanwhile: "
                "collectives come out too slow. Calibrate while the machine does nothing else"
            )
        left_out += noisy + noisy_groups
        seconds = time.perf_counter() - start_s
        spread = median(row["spread"] for row in found["rows"])
        say(
            f"  {len(found['rows'])} measurements in {seconds:.0f} s, median spread {spread:.0%}, "
            f"each process is {found['slowdown']:.2f} times as slow as alone, "
            f"{len(noisy + noisy_groups)} curves left out"
        )
    is_cpu = device == CPU
    calibration = Calibration.from_json(
        {"cores": cores if is_cpu else 0, "timings": timings, "collectives": collectives}
    )
    head: dict[str, Any] = {"device": device, "devices_per_node": max(processes)}
    if is_cpu:
        head["memory_GiB"] = round(ram_bytes() / GIB, 2)
    return {**head, **calibration_values(calibration, made_with, left_out)}, left_out


def _device_name() -> str:
    """The catalogue's name of the GPUs here, or CPU."""
    if not torch.cuda.is_available():
        return CPU
    return Cluster.detect().device.name


def _measured(count: int, *, quick: bool) -> dict[str, Any]:
    """What that many ranks measured together."""
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "runtime.measure", f"--out={out}"]
        run_ranks([*command, *(["--quick"] if quick else [])], count)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def timings_of(
    rows: Iterable[Row], processes: int, threads: int
) -> tuple[dict[str, Any], list[str]]:
    """The rows of kernels as the file's `timings`, and what was left out for noise."""
    kernels, products, left_out = [], [], []
    measured = (row for row in rows if "kernel" in row)
    for (name, dtype, batch, head_dim), group in _grouped(
        measured, "kernel", "dtype", "batch", "head_dim"
    ):
        words = [name, dtype, f"batch {batch}" if batch else "", _depth(head_dim)]
        what = f"{' '.join(word for word in words if word)} in {processes} processes"
        if noise := _noise(group, what):
            left_out.append(noise)
        elif not _reaches(name, group):
            left_out.append(f"{what}: time was up; the catalogue's value is kept")
        elif name == "product":
            sizes = sorted({row["size"][0] for row in group})
            us = [row["us"] for row in sorted(group, key=lambda row: row["size"])]
            products.append({"dtype": dtype, "batch": batch, "sizes": sizes, "us": us})
        else:
            head = {"head_dim": head_dim} if head_dim else {}
            kernels.append({"name": name, **head, **_curve(group)})
    found = {
        "processes": processes, "threads": threads, "kernels": kernels, "products": products,
    }  # fmt: skip
    return found, left_out


def _reaches(name: str, group: Sequence[Row]) -> bool:
    """Whether a grid is whole, and a curve goes to where time grows with size."""
    if name == "product":
        return len(group) == len({row["size"][0] for row in group}) ** 3
    return name == "view" or max(row["size"] for row in group) >= REACH_BYTES


def collectives_of(rows: Iterable[Row], processes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of collectives as the file's `collectives`, and what was left out for noise."""
    found, left_out = [], []
    for (op, members), group in _grouped((row for row in rows if "op" in row), "op", "members"):
        if noise := _noise(group, f"{op} of {members} in {processes} processes"):
            left_out.append(noise)
            continue
        place = {"op": op, "processes": processes, "members": members, "members_near": members}
        found.append({**place, **_curve(group)})
    return found, left_out


def _grouped(rows: Iterable[Row], *keys: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows that have the same values of the keys, in the order of their first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())


def _noise(group: Sequence[Row], what: str) -> str:
    """Why the points of a curve say too little; empty if they don't."""
    noise = median(row["noise"] for row in group)
    if noise <= NOISE_LIMIT:
        return ""
    spread = median(row["spread"] for row in group)
    return (
        f"{what}: its medians are uncertain by {noise:.0%} (at most {NOISE_LIMIT:.0%}; spread of "
        f"repeats {spread:.0%}); the catalogue's value is kept"
    )


def _curve(group: Sequence[Row]) -> dict[str, Any]:
    points = sorted((row["size"], row["us"]) for row in group)
    return {"bytes": [size for size, _ in points], "us": [us for _, us in points]}


def _depth(head_dim: int) -> str:
    return f"head_dim {head_dim}" if head_dim else ""


def with_nccl_tests(values: dict[str, Any], read: Sequence[Collective]) -> dict[str, Any]:
    """A cluster file's values with the collectives of nccl-tests outputs; these count first."""
    added = Calibration(0, (), tuple(read)).to_json()["collectives"]
    kept = [c for c in values.get("collectives", []) if not any(_same(c, new) for new in added)]
    base = (
        values if "format" in values else {**values, **calibration_values(Calibration(0), "", [])}
    )
    made_with = ", ".join(word for word in (base["made_with"], "nccl-tests") if word)
    return {**base, "made_with": made_with, "collectives": [*added, *kept]}


def _same(one: Row, other: Row) -> bool:
    return all(one[key] == other[key] for key in ("op", "processes", "members", "members_near"))


def read_output(path: Path) -> Collective:
    """What nccl-tests printed into a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: {error}.") from error
    return read_nccl_tests(text, path.name)


def cluster_values(spec: str) -> dict[str, Any]:
    """A cluster file's values for hardware that is described and not measured."""
    if spec.endswith((".yaml", ".yml")):
        return load_yaml(Path(spec))
    cluster = Cluster.parse(spec)
    if cluster.device.name == CPU:
        raise UsageError(f"--cluster {spec}: nccl-tests are of GPUs; name those, as 4x8xH100-SXM.")
    per_node = cluster.devices_per_node
    find_device(cluster.device.name.partition(":")[0])
    nodes = cluster.n_devices // per_node
    return {"device": cluster.device.name, "nodes": nodes, "devices_per_node": per_node}


def calibrate_command(options: argparse.Namespace) -> int:
    """`shardwright calibrate`: writes the file, and says what was left out of it."""
    out = sys.stderr if options.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    left_out: list[str] = []
    for flag, given in (("--quick", options.quick), ("--processes", options.processes)):
        if options.cluster and given:
            raise UsageError(
                f"{flag}: with --cluster nothing is measured, it takes nccl-tests outputs alone. "
                "Leave one of the two out."
            )
    if not options.out.endswith((".yaml", ".yml")):
        raise UsageError(f"--out {options.out}: a cluster file is called .yaml, as machine.yaml.")
    check_writable(options.out)
    read = [read_output(Path(file)) for file in options.nccl_tests or ()]
    if options.cluster:
        if not options.nccl_tests:
            raise UsageError("--cluster describes hardware elsewhere: add --nccl-tests FILE of it")
        values = cluster_values(options.cluster)
    else:
        values, left_out = calibrate(options.processes or PROCESSES, quick=options.quick, say=say)
    if options.nccl_tests:
        values = with_nccl_tests(values, read)
    path = Path(options.out)
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100)
    write_whole(path, text)
    cluster = Cluster.parse(str(path))  # what is written can be read
    for line in left_out:
        say(f"left out: {line}")
    say(f"wrote {path}: {cluster}. Use it as --cluster {path}, or --cluster 2x{path} for 2 devices")
    if options.json:
        print(json.dumps({"status": "ok", "out": str(path), "left_out": left_out}))
    return 0


def process_counts(text: str) -> tuple[int, ...]:
    """An argument such as 1,2,4."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,2,4")
    return tuple(int(word) for word in words)


def add_calibrate_command(commands: Any) -> None:
    """The command's flags."""
    text = (
        "Measure this machine: matrix products by shape, memory-bound kernels by size, optimizer "
        "updates, collectives by size and group, with 1, 2 and 4 processes at once, over Gloo or "
        "NCCL. Writes a cluster file that --cluster of every command accepts. Takes a few minutes "
        "on a machine that does nothing else; what is too noisy is said and left out."
    )
    command = commands.add_parser("calibrate", help=text.partition(":")[0], description=text)
    command.add_argument(
        "--out", type=filled, metavar="FILE", default="machine.yaml", help="(%(default)s)"
    )
    command.add_argument(
        "--processes", type=process_counts, metavar="N,...",
        help="how many run at once (default 1,2,4); plans can be for these",
    )  # fmt: skip
    command.add_argument("--quick", action="store_true", help="fewer sizes; under a minute")
    command.add_argument(
        "--nccl-tests", nargs="+", metavar="FILE", help="outputs of all_reduce_perf and its sisters"
    )
    command.add_argument(
        "--cluster", metavar="SPEC",
        help="measure nothing: write nccl-tests into a file of this hardware",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON on stdout")
    command.set_defaults(run=calibrate_command)
