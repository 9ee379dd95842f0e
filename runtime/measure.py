"""One rank of a calibration: times kernels and collectives while the other ranks do the same.

Started once per rank by `runtime.launch.run_ranks`, as the ranks of a program are, so that threads
and neighbours are those of a program. Input: --out, --quick. Output: rank 0 writes a JSON file with
a row per measurement (times, spread, noise) and prints its progress.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.collective_calls import QUICK_SIZES, SIZES, GroupCall, collective_calls
from runtime.errors import run_main
from runtime.kernel_calls import QUICK, Call, Sizes, kernel_calls, product_calls
from runtime.processes import ProcessTransport, connect_processes, disconnect
from runtime.stopwatch import Sample, Stopwatch

CUDA_DTYPES = ("bfloat16", "float16")
BLOCK_S, TIME_SLICE_S = 0.003, 0.012
"""Blocks, and those where processes share cores: several time slices of the scheduler."""
BUDGET_S = 0.15
"""Of one measurement: some 300 are made."""


def measure(transport: ProcessTransport, watch: Stopwatch, *, quick: bool) -> list[dict[str, Any]]:
    """A row per measurement."""
    rows: list[dict[str, Any]] = []
    for call in _calls(transport, quick=quick):
        sample = watch.time(call.run)
        rows.append(_row(call, sample))
        _show(transport, call, len(rows))
    return rows


def _calls(transport: ProcessTransport, *, quick: bool) -> Iterator[Call | GroupCall]:
    """GPUs are not shared, so their kernels are measured by one process only."""
    is_cuda = transport.device.type == "cuda"
    sizes = QUICK if quick else Sizes(low_dtypes=CUDA_DTYPES) if is_cuda else Sizes()
    if not is_cuda or transport.world_size == 1:
        yield from kernel_calls(sizes, transport.device)
        yield from product_calls(sizes, transport.device)
    if transport.world_size > 1:
        yield from collective_calls(transport, QUICK_SIZES if quick else SIZES)


def _row(call: Call | GroupCall, sample: Sample) -> dict[str, Any]:
    timing = {"us": sample.seconds / call.per * 1e6, "spread": sample.spread, "noise": sample.noise}
    if isinstance(call, GroupCall):
        return {"op": call.op, "members": call.members, "size": call.size_bytes, **timing}
    place = {"dtype": call.dtype, "batch": call.batch, "head_dim": call.head_dim}
    return {"kernel": call.name, "size": call.size, **place, **timing}


def stopwatch(transport: ProcessTransport, cores: int) -> Stopwatch:
    """Blocks of a few time slices where the ranks share cores, shorter ones elsewhere."""
    is_cuda = transport.device.type == "cuda"
    shares = not is_cuda and transport.world_size > cores
    return Stopwatch(
        block_s=TIME_SLICE_S if shares else BLOCK_S,
        budget_s=BUDGET_S,
        finish=torch.cuda.synchronize if is_cuda else _nothing,
        agree=_gathered if transport.world_size > 1 else _own,
    )


def _nothing() -> None:
    """A CPU has finished when the call returns."""


def _own(values: Sequence[float]) -> list[list[float]]:
    return [list(values)]


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
    parser.add_argument("--cores", type=int, required=True, help="that all ranks share")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    given = parser.parse_args()
    transport = connect_processes()
    with torch.no_grad():
        rows = measure(transport, stopwatch(transport, given.cores), quick=given.quick)
    if transport.rank == 0:
        found = {"threads": torch.get_num_threads(), "rows": rows, "torch": torch.__version__}
        given.out.write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    run_main(main)
