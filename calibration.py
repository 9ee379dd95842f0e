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

from ir.calibration import Calibration
from ir.calibration_file import calibration_values
from ir.cluster import Cluster
from ir.errors import UsageError
from ir.measured_elsewhere import HARDWARE, cluster_values, described_by, measured_on
from ir.nccl_tests import NcclTests, read_nccl_tests
from ir.topology import CPU, ram_bytes
from ir.whole_file import check_writable, write_whole
from ir.yaml_values import read_text
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
        f"{what}: its medians are uncertain by {noise:.1%} (at most {NOISE_LIMIT:.0%}; spread of "
        f"repeats {spread:.0%}); the catalogue's value is kept"
    )


def _curve(group: Sequence[Row]) -> dict[str, Any]:
    points = sorted((row["size"], row["us"]) for row in group)
    return {"bytes": [size for size, _ in points], "us": [us for _, us in points]}


def _depth(head_dim: int) -> str:
    return f"head_dim {head_dim}" if head_dim else ""


def with_nccl_tests(
    values: dict[str, Any], read: Sequence[NcclTests]
) -> tuple[dict[str, Any], list[str]]:
    """A cluster file's values with the collectives of nccl-tests outputs, and what these replace.

    Of several measurements of one group the last counts: an output before what the file holds, and
    among the outputs the one that is named last.
    """
    held: list[tuple[str, Row]] = [("the file", row) for row in values.get("collectives", [])]
    notes = []
    for found in read:
        (added,) = Calibration(0, (), (found.collective,)).to_json()["collectives"]
        for earlier in [pair for pair in held if _same(pair[1], added)]:
            held.remove(earlier)
            if earlier[1] != added:
                notes.append(
                    f"{added['op']} of {added['members']} ranks, {added['members_near']} near each "
                    f"other: {found.name} counts and replaces what {earlier[0]} says"
                )
        held.append((found.name, added))
    base = (
        values if "format" in values else {**values, **calibration_values(Calibration(0), "", [])}
    )
    words = [word for word in str(base.get("made_with", "")).split(", ") if word]
    made_with = ", ".join(dict.fromkeys([*words, "nccl-tests"]))
    new = {**base, "made_with": made_with, "collectives": [row for _, row in held]}
    return new, notes


def _same(one: Row, other: Row) -> bool:
    return all(one[key] == other[key] for key in ("op", "processes", "members", "members_near"))


def read_output(path: Path) -> NcclTests:
    """What nccl-tests printed into a file."""
    return read_nccl_tests(read_text(path), path.name)


def hardware_here(processes: Sequence[int]) -> Cluster:
    """The GPUs that nccl-tests outputs without `--cluster` are of; `UsageError` if none is here."""
    if _device_name() == CPU:
        raise UsageError(
            "--nccl-tests: nccl-tests are of GPUs, and none is found here (by torch and NVML), so "
            "this machine would be measured as a CPU. " + HARDWARE
        )
    here = Cluster.detect()
    per_node = max(*processes, here.devices_per_node)
    nodes = here.n_devices // here.devices_per_node
    return Cluster.parse(f"{nodes}x{per_node}x{here.device.name}")


def shown_use(path: Path, values: Mapping[str, Any], cluster: Cluster) -> str:
    """How commands take the file; `NxFILE` only where it can be said of this one."""
    whole, per_node = f"Use it as --cluster {path}", cluster.devices_per_node
    if {"levels", "topology", "machine"} & set(values) or per_node == 1:
        return whole
    fewer = per_node // 2
    nodes = cluster.n_devices // per_node
    on_nodes = f" on each of {nodes} nodes" if nodes > 1 else ""
    devices = "1 device" if fewer == 1 else f"{fewer} devices"
    return f"{whole}, or --cluster {fewer}x{path} for {devices}{on_nodes}"


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
    path = Path(options.out)
    read = [read_output(Path(file)) for file in options.nccl_tests or ()]
    notes = [note for found in read for note in found.notes]
    processes = options.processes or PROCESSES
    values: dict[str, Any] = {}
    if options.cluster:
        if not read:
            raise UsageError("--cluster describes hardware elsewhere: add --nccl-tests FILE of it")
        values, hardware = cluster_values(options.cluster, path)
    elif read:
        hardware = hardware_here(processes)
    if read:
        read, compared = measured_on(hardware, read)
        notes += compared
    if not options.cluster:
        values, left_out = calibrate(processes, quick=options.quick, say=say)
    if read:
        values, replaced = with_nccl_tests(values, read)
        notes += replaced
    cluster = described_by(values, path)  # what is written can be read
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100)
    write_whole(path, text)
    for line in notes:
        say(f"note: {line}")
    for line in left_out:
        say(f"left out: {line}")
    say(f"wrote {path}: {cluster}. {shown_use(path, values, cluster)}")
    if options.json:
        told = {"status": "ok", "out": str(path), "left_out": left_out, "notes": notes}
        print(json.dumps(told))
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
