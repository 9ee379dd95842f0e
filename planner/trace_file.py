"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

Input: a plan and its simulated timeline. Output: plain JSON values: a process per rank, a thread
per stream, a complete event ("X") per span, times in microseconds. Replicas on the data and tensor
axes do the same at the same time; where there are many ranks only the first ones are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ir.plan import Plan
from ir.whole_file import write_whole
from planner.pipeline import WORDS
from planner.simulate import Span, Timeline

MOST_RANKS = 64
"""Up to so many ranks are written, each as a process."""


def trace_events(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """The content of a trace file."""
    replicas = plan.mesh.data * plan.mesh.tensor
    shown = replicas if plan.mesh.size <= MOST_RANKS else 1
    events: list[dict[str, Any]] = []
    for stage in range(plan.mesh.pipeline):
        spans = [span for span in timeline.spans if span.rank == stage]
        for replica in range(shown):
            rank = stage * replicas + replica
            events += _process(plan, rank, spans)
    ranks = "all ranks" if shown == replicas else (
        f"data and tensor index 0 of {replicas} replicas, which do the same at the same time"
    )  # fmt: skip
    about = {
        "model": plan.model, "plan": plan.hash, "mesh": str(plan.mesh), "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages, "micro_batches": plan.micro_batches, "ranks": ranks,
        "simulated_step_s": timeline.makespan_s, "predicted_step_s": plan.prediction.step_s,
        "speed_on_shared_cores": timeline.speed,
    }  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(path: str | Path, plan: Plan, timeline: Timeline) -> None:
    """Writes the trace file, whole or not at all."""
    write_whole(path, json.dumps(trace_events(plan, timeline)) + "\n")


def _process(plan: Plan, rank: int, spans: list[Span]) -> Iterator[dict[str, Any]]:
    """One rank: its names, then its spans stream by stream in order of time."""
    mesh = plan.mesh
    outer, tensor = divmod(rank, mesh.tensor)
    pipeline, data = divmod(outer, mesh.data)
    name = f"rank {rank}: pipeline {pipeline}, data {data}, tensor {tensor}"
    yield _named("process_name", rank, 0, name=name)
    yield _named("process_sort_index", rank, 0, sort_index=rank)
    streams = list(dict.fromkeys(span.stream for span in spans))
    for number, stream in enumerate(streams):
        yield _named("thread_name", rank, number, name=stream)
        yield _named("thread_sort_index", rank, number, sort_index=number)
    for span in spans:
        event = {
            "ph": "X", "pid": rank, "tid": streams.index(span.stream), "name": span.name,
            "cat": span.stream.split(" ")[0], "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }  # fmt: skip
        if span.action is not None:
            stage, kind, micro = span.action
            event["args"] = {"stage": stage, "micro_batch": micro, "what": WORDS[kind]}
        yield event


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    """A metadata event."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "ts": 0, "args": args}
