"""`make demo`: plan a byte-level GPT-2, train it over 4 processes in two ways, compare with one.

Prints the plan, leaves the emitted programs in build/demo/, and ends with a table that sets both
distributed runs beside plain torch in one process. Then plans Llama-3-8B for 32 GPUs.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardwright as sw
from runtime.launch import launch
from runtime.models import Loaded

HERE = Path(__file__).parent
MODEL = f"{HERE / 'gpt2_bytes.py'}:build"
OUT = HERE.parent / "build" / "demo"
STEPS, RATE, CLIP_NORM = 100, 1e-3, 1.0
TOLERANCE = 1e-4  # relative, at every step: float32 sums in another order, over 100 steps
PINNED = {"tensor": 2, "pipeline": 2}
console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True, slots=True)
class Training:
    """The loss of every step, and the speed over all of them."""

    name: str
    losses: tuple[float, ...]
    tokens_per_s: float


def main() -> int:
    torch.set_num_threads(1)  # as each of the 4 processes has one
    loaded = sw.load_model(MODEL, device="cpu")
    chosen = train_distributed("the planner's choice", loaded, {})
    pinned = train_distributed("tensor=2 x pipeline=2", loaded, PINNED)
    alone = train_alone(loaded)
    console.print(comparison(alone, (chosen, pinned)))
    plan_llama()
    return verdict(alone, (chosen, pinned))


def train_distributed(name: str, loaded: Loaded, pin: Mapping[str, Any]) -> Training:
    """Plan, print, emit, and run the emitted program over 4 Gloo processes."""
    console.rule(f"4 processes, {name}")
    graph = sw.trace(loaded.model, loaded.args, loaded.kwargs, loss=loaded.loss, name=loaded.name)
    rows = loaded.kwargs["input_ids"].shape[0]
    plan = sw.plan_graph(graph, sw.Cluster.local(4), global_batch=rows, pin=pin)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    folder = OUT / ("pinned" if pin else "chosen")
    sw.emit(graph, plan).write(folder, force=True)
    log = folder / "log.jsonl"
    options = {"model": MODEL, "steps": STEPS, "lr": RATE, "clip-norm": CLIP_NORM, "log": log}
    launch(folder, argv=[f"--{key}={value}" for key, value in options.items()])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses = tuple(line["loss"] for line in lines)
    return Training(name, losses, lines[-1]["tokens_per_s"])


def train_alone(loaded: Loaded) -> Training:
    """The same training in plain torch: autograd, AdamW, one process."""
    console.rule("1 process, plain torch")
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=RATE)
    losses: list[float] = []
    tokens, start_s = 0, time.perf_counter()
    for args, kwargs in islice(loaded.batches(), STEPS):
        optimizer.zero_grad()
        loss = loaded.loss(loaded.model(*args, **kwargs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
        tokens += kwargs["input_ids"].numel()
        speed = tokens / (time.perf_counter() - start_s)
        show_progress(len(losses), losses[-1], speed)
    return Training("1 process", tuple(losses), speed)


def show_progress(step: int, loss: float, tokens_per_s: float) -> None:
    """One line that is written over; where that can't be, a line every tenth step."""
    line = f"step {step:3}/{STEPS}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == STEPS else "", flush=True)
    elif step % 10 == 0:
        print(line, flush=True)


def comparison(alone: Training, others: tuple[Training, ...]) -> Table:
    """Losses at a few steps, largest difference over all steps, speed."""
    shown = [0, 24, 49, 74, STEPS - 1]
    table = Table(title="Loss in nats per byte; largest relative difference over all steps")
    table.add_column("run")
    for heading in (*(f"step {i + 1}" for i in shown), "largest difference", "tokens/s"):
        table.add_column(heading, justify="right")
    for run in (alone, *others):
        difference = "" if run is alone else f"{largest_difference(run, alone):.1e}"
        losses = (f"{run.losses[i]:.5f}" for i in shown)
        table.add_row(run.name, *losses, difference, f"{run.tokens_per_s:,.0f}")
    return table


def largest_difference(run: Training, alone: Training) -> float:
    pairs = zip(run.losses, alone.losses, strict=True)
    return max(abs(loss / reference - 1) for loss, reference in pairs)


def plan_llama() -> None:
    """Planning needs neither the GPUs nor the weights."""
    console.rule("Llama-3-8B on 4x8 H100, planned only")
    start_s = time.perf_counter()
    loaded = sw.load_model("hf:llama-3-8b", seq=8192)
    cluster = sw.Cluster.parse("4x8xH100-SXM")
    plan = sw.plan(loaded.model, cluster, loaded.kwargs, loss=loaded.loss, global_batch=512)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(f"planned in {time.perf_counter() - start_s:.0f} s")


def verdict(alone: Training, others: tuple[Training, ...]) -> int:
    """The exit code: 4 if a loss differs, or did not fall."""
    worst = max(largest_difference(run, alone) for run in others)
    fell = alone.losses[-1] < 0.7 * alone.losses[0]
    console.print(
        f"Largest relative difference over all {STEPS} steps: {worst:.1e} "
        f"(at most {TOLERANCE:.0e} wanted). Loss {alone.losses[0]:.2f} to {alone.losses[-1]:.2f}. "
        f"The programs are in {OUT}."
    )
    return 0 if fell and worst <= TOLERANCE else 4


if __name__ == "__main__":
    sys.exit(main())
