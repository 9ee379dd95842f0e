"""One rank of a calibration: times kernels and collectives while the other ranks do the same.

Started once per rank by `runtime.launch.run_ranks`, as the ranks of a program are, so that threads
and neighbours are those of a program. Input: --out, --quick. Output: rank 0 writes a JSON file with
a row per measurement (times, spread, noise) and prints its progress.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from runtime.collective_calls import QUICK_SIZES, SIZES, GroupCall, collective_calls
from runtime.errors import run_main
from runtime.kernel_calls import QUICK, Call, Sizes, company, kernel_calls, product_calls
from runtime.processes import ProcessTransport, connect_processes, disconnect
from runtime.stopwatch import Agree, Sample, Stopwatch, alone, slowdown

CUDA_DTYPES = ("bfloat16", "float16")
BLOCK_S, TIME_SLICE_S = 0.004, 0.012
"""Blocks of kernels and of collectives: the latter wait for each other, for some time slices."""
BUDGET_S, QUICK_BUDGET_S = 0.08, 0.04
"""Of one measurement; some 300 are made, or 100."""
LIMIT_S, QUICK_LIMIT_S = 50.0, 12.0
"""After these seconds of kernels, and of collectives, the rest is not measured: a machine that is
so busy says little."""
SHARING_S, SHARING_EVERY = 0.2, 16
"""How long all ranks compute at once to see what each gets of the cores, and after how many
measurements again."""


@dataclass(frozen=True, slots=True)
class Found:
    """A row per measurement; how much longer ranks take than they compute while nothing else runs;
    how much longer still they took meanwhile; whether all was measured before time was up."""

    rows: list[dict[str, Any]]
    slowdown: float
    busy: float
    complete: bool


def measure(transport: ProcessTransport, *, quick: bool) -> Found:
    """All measurements that fit in the time.

    A rank with one thread is timed by the processor's time for it, which nobody else's work is
    part of, and every time is multiplied by the ranks' least slowdown; several threads wait for
    each other, so that only the wall clock sees what they take.
    """
    others = company(transport.device)
    watch = _kernel_watch(transport, others, quick=quick)
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    factors: list[float] = []
    calls = _kernels(transport, quick=quick)
    if watch.clock is time.thread_time:
        calls = _sampling(calls, watch.agree, others, factors)
    kernels = _timed(calls, watch, transport, limit_s)
    shared = min(factors, default=1.0)
    group_watch = Stopwatch(
        TIME_SLICE_S, watch.budget_s, agree=watch.agree, between=watch.between, finish=watch.finish
    )
    groups = _timed(_groups(transport, quick=quick), group_watch, transport, limit_s)
    rows = [{**row, "us": row["us"] * shared} for row in kernels if row is not None]
    rows += [row for row in groups if row is not None]
    busy = median(factors) / shared if factors else 1.0
    return Found(rows, shared, busy, len(rows) == len(kernels) + len(groups))


def _timed(
    calls: Iterator[Call | GroupCall], watch: Stopwatch, transport: ProcessTransport, limit_s: float
) -> list[dict[str, Any] | None]:
    """A row per call; None for the first that there was no time for."""
    rows: list[dict[str, Any] | None] = []
    end_s = time.perf_counter() + limit_s
    for call in calls:
        if _is_over(watch.agree, end_s):
            return [*rows, None]
        _show(transport, call, len(rows))
        rows.append(_row(call, watch.time(call.run, call.warm_up)))
    return rows


def _sampling(
    calls: Iterator[Call], agree: Agree, others: Callable[[], None], factors: list[float]
) -> Iterator[Call]:
    """The calls, and now and then how much longer the ranks take than they compute."""
    for number, call in enumerate(calls):
        if number % SHARING_EVERY == 0:
            found = agree([slowdown(others, SHARING_S)])
            factors.append(sum(factor for (factor,) in found) / len(found))
        yield call


def _is_over(agree: Agree, end_s: float) -> bool:
    """Whether the time of some rank is up; all ranks hear the same."""
    return max(late for (late,) in agree([time.perf_counter() - end_s])) > 0


def _kernel_watch(
    transport: ProcessTransport, others: Callable[[], None], *, quick: bool
) -> Stopwatch:
    """How kernels are timed: by the thread's own time where there is one."""
    watch = Stopwatch(
        BLOCK_S, QUICK_BUDGET_S if quick else BUDGET_S, agree=_agreement(transport),
        between=others, finish=_finish(transport),
    )  # fmt: skip
    if transport.device.type == "cuda":
        return replace(watch, between=None)
    return watch if torch.get_num_threads() > 1 else replace(watch, clock=time.thread_time)


def _groups(transport: ProcessTransport, *, quick: bool) -> Iterator[GroupCall]:
    if transport.world_size > 1:
        yield from collective_calls(transport, QUICK_SIZES if quick else SIZES)


def _kernels(transport: ProcessTransport, *, quick: bool) -> Iterator[Call]:
    """GPUs are not shared, so their kernels are measured by one process only."""
    is_cuda = transport.device.type == "cuda"
    sizes = QUICK if quick else Sizes(low_dtypes=CUDA_DTYPES) if is_cuda else Sizes()
    if not is_cuda or transport.world_size == 1:
        yield from product_calls(sizes.sides, "float32", transport.device)
        yield from kernel_calls(sizes, transport.device)
        for dtype in sizes.low_dtypes:
            yield from product_calls(sizes.low_sides, dtype, transport.device)


def _row(call: Call | GroupCall, sample: Sample) -> dict[str, Any]:
    timing = {"us": sample.seconds / call.per * 1e6, "spread": sample.spread, "noise": sample.noise}
    if isinstance(call, GroupCall):
        return {"op": call.op, "members": call.members, "size": call.size_bytes, **timing}
    place = {"dtype": call.dtype, "batch": call.batch, "head_dim": call.head_dim}
    return {"kernel": call.name, "size": call.size, **place, **timing}


def _finish(transport: ProcessTransport) -> Callable[[], None]:
    return torch.cuda.synchronize if transport.device.type == "cuda" else _nothing


def _nothing() -> None:
    """A CPU has finished when the call returns."""


def _agreement(transport: ProcessTransport) -> Agree:
    return _gathered if transport.world_size > 1 else alone


def _gathered(values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, by rank; it is also where the ranks meet before a block."""
    mine = torch.tensor(values, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        mine = mine.cuda()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [row.tolist() for row in everyone]


def _show(transport: ProcessTransport, call: Call | GroupCall, done: int) -> None:
    """One line that is written over; where that can't be, nothing."""
    if transport.rank or not sys.stdout.isatty():
        return
    if isinstance(call, GroupCall):
        what = f"{call.op} of {call.members}, {call.size_bytes} bytes"
    else:
        what = f"{call.name} {call.size} {call.dtype}"
    print(f"\r  {done:4d} measured  {what:<60}", end="", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m runtime.measure", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes the rows")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    given = parser.parse_args()
    transport = connect_processes()
    with torch.no_grad():
        found = measure(transport, quick=given.quick)
    if transport.rank == 0:
        written = {"threads": torch.get_num_threads(), **asdict(found)}
        given.out.write_text(json.dumps(written))
    disconnect()


if __name__ == "__main__":
    run_main(main)
