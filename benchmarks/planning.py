"""Seconds, memory and proven gap of planning the models that the project's goals name.

    python benchmarks/planning.py [--only llama-3-8b] [--write docs/accuracy.md]

Every plan is made in a process of its own: import, trace and search are all in its seconds, by the
wall clock and by the processor's. Prints a table; --write puts it between its markers in a page.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- planning: begin -->", "<!-- planning: end -->"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a cluster, and the seconds that its plan may take on two cores."""

    name: str
    model: str
    cluster: str
    global_batch: int
    seq: int | None
    goal_s: float


CASES = (
    Case("llama-3-8b", "hf:llama-3-8b", "4x8xH100-SXM", 512, 8192, 15),
    Case("llama-3-405b", "hf:llama-3-405b", "2048x8xH100-SXM", 2048, 8192, 30),
    Case("gpt3-175b", "hf:gpt3-175b", "128x8xA100-80GB", 1536, 2048, 20),
    Case("resnet152", f"{HERE / 'vision.py'}:resnet152", "1x8xA100-80GB", 256, None, 20),
    Case("unet", f"{HERE / 'vision.py'}:unet", "1x8xA100-80GB", 64, None, 20),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", choices=[case.name for case in CASES])
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    rows = [measured(case) for case in CASES if options.only in (None, case.name)]
    text = "\n".join([
        "| model | devices | wall | processor | memory | step | gap | candidates | plan |",
        "|---|---|---|---|---|---|---|---|---|", *rows,
    ])  # fmt: skip
    print(text)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return 0


def measured(case: Case) -> str:
    """One row, from a process of its own."""
    command = [
        sys.executable, "-m", "shardwright", "plan", case.model, "--cluster", case.cluster,
        "--global-batch", str(case.global_batch), "--json",
    ]  # fmt: skip
    command += ["--seq", str(case.seq)] if case.seq else []
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
    wall_s, after = time.monotonic() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    plan = json.loads(done.stdout)
    seconds, mesh = plan["prediction"], plan["mesh"]
    gap = seconds["step_s"] / seconds["bound_s"] - 1
    degrees = " ".join(f"{axis}={degree}" for axis, degree in mesh.items())
    devices = mesh["pipeline"] * mesh["data"] * mesh["tensor"]
    return (
        f"| {case.name} | {devices:,} | {wall_s:.1f} s of {case.goal_s:g} | {busy_s:.1f} s "
        f"| {after.ru_maxrss * 1024 / GIB:.2f} GiB at most | {seconds['step_s']:.4g} s | {gap:.1%} "
        f"| {plan['certificate']['candidates']:,} | {degrees} {plan['schedule']} |"
    )


if __name__ == "__main__":
    sys.exit(main())
