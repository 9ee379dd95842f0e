"""Random small instances: a model, a cluster with random links and memory, a batch.

Input: a seed. Output: an `Instance`. Memory runs from too little for any plan to more than the best
one needs; links from a tenth to ten times the usual.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from tiny_models import layers, nodes

from ir.cluster import Cluster
from ir.graph import Graph
from planner import plan

WIDTHS = (256, 512, 1024)
OPS = (
    ("up",), ("up", "relu"), ("relu", "up"), ("up", "square"), ("up", "tanh"), ("up", "down"),
    ("double", "up", "relu"),
)  # fmt: skip
TWO = ("local:2", "2xA100-80GB", "2x1xH100-SXM")
MORE = ("local:2", "local:3", "local:4", "local:6", "4xA100-80GB", "2x2xH100-SXM", "2x4xH100-SXM")


@dataclass(frozen=True)
class Instance:
    """What is planned; `roomy_s`: the step with memory enough."""

    name: str
    graph: Graph
    cluster: Cluster
    batch: int
    roomy_s: float


def few_nodes(seed: int) -> Instance:
    """One model of at most six nodes on two devices."""
    rng = random.Random(seed)
    width, hidden, ops = rng.choice(WIDTHS), rng.choice(WIDTHS), rng.choice(OPS)
    name = f"{'-'.join(ops)} {width}x{hidden}"
    return _drawn(rng, name, _nodes(width, hidden, ops), TWO, (2, 4))


def few_layers(seed: int) -> Instance:
    """A chain of two to four layers, on two to eight devices."""
    rng = random.Random(1000 + seed)
    depth, width = rng.randint(2, 3), rng.choice(WIDTHS)
    residual, heavy = rng.random() < 0.5, rng.random() < 0.5
    name = f"{depth} layers of {width}{' residual' * residual}{' heavy' * heavy}"
    return _drawn(rng, name, _layers(depth, width, residual, heavy), MORE, (2, 4))


@cache
def _nodes(width: int, hidden: int, ops: tuple[str, ...]) -> Graph:
    return nodes(width, hidden, ops)


@cache
def _layers(depth: int, width: int, residual: bool, heavy: bool) -> Graph:
    return layers(depth, width, residual=residual, heavy=heavy)


def _drawn(
    rng: random.Random, name: str, graph: Graph, specs: tuple[str, ...], batches: tuple[int, ...]
) -> Instance:
    spec, batch = rng.choice(specs), rng.choice(batches)
    cluster = with_rates(Cluster.parse(spec), 10 ** rng.uniform(-1, 1))
    roomy = plan(graph, cluster, global_batch=batch).prediction
    share = rng.choice((1.0, rng.uniform(0.3, 1.0)))
    cluster = with_memory(cluster, roomy.peak_bytes * share)
    title = f"{name}, {spec}, batch {batch}, {share:.0%} of {roomy.peak_bytes} bytes"
    return Instance(title, graph, cluster, batch, roomy.step_s)


def with_memory(cluster: Cluster, usable_bytes: float) -> Cluster:
    """The same with other memory, all of it usable."""
    device = replace(cluster.device, memory_bytes=int(usable_bytes), reserve_bytes=0)
    return replace(cluster, device=device)


def with_rates(cluster: Cluster, factor: float) -> Cluster:
    """The same with every link so many times as fast."""
    levels = tuple(
        replace(level, link=replace(
            level.link, bandwidth_bytes_per_s=level.link.bandwidth_bytes_per_s * factor
        ))
        for level in cluster.levels
    )  # fmt: skip
    return replace(cluster, levels=levels)
