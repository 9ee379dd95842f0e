"""Where to cut the chain of blocks into stages, for given costs of every possible stage.

Input: seconds[s,a,b], what stage s costs per micro-batch if it holds blocks a..b-1 (infinity if
it can't). Output: the cuts of the shortest step. Costs that are too low give a lower bound of
every plan's step; `relaxed_seconds` makes such costs, from linear relaxations. Where a backward is
split, a stage costs what it adds to the fill as well (`relaxed_fill_s`).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ir.schedules import Held
from planner.schedule import fill_rounds
from planner.stage_problem import Run, StageProblem, moment_bytes

Array = NDArray[np.float64]


class Cuts(NamedTuple):
    """Stage s holds blocks at[s]..at[s+1]-1; `cost_s` is what the search minimised."""

    cost_s: float
    at: tuple[int, ...]


def best_cuts(
    seconds: Array, tail: Array, micro_batches: int, fill: Array | None = None
) -> Cuts | None:
    """The cuts that minimise (M - 1) max seconds + sum seconds + max tail; None if there are none.

    seconds: [stages, blocks + 1, blocks + 1]. tail: the same or [blocks + 1, blocks + 1], once per
    step.
    Exact: for fixed limits on both maxima the sum is a shortest path, and each limit is lowered
    step by step until no lower one can pay. With `fill`, of the shape of `seconds`, the cuts
    minimise max (M seconds - fill) + sum fill + max tail.
    """
    weight, paces, sums = micro_batches - 1, seconds, seconds
    if fill is not None:
        weight, paces = 1, micro_batches * seconds - fill
        sums = np.where(np.isfinite(seconds), fill, np.inf)

    def within_tail(tail_limit: float) -> Cuts:
        kept = np.where(tail <= tail_limit, paces, np.inf)

        def within_both(limit: float) -> Cuts:
            return _shortest_path(np.where(kept <= limit, sums, np.inf))

        return _lowered_limit(weight, kept, within_both)

    cuts = _lowered_limit(1, np.where(np.isfinite(seconds), tail, np.inf), within_tail)
    return cuts if np.isfinite(cuts.cost_s) else None


def least_split_s(seconds: Array, prompt: Array, forward: Array, micro_batches: int) -> float:
    """The least step where a backward is split; of every stage `prompt` and `forward` are the least
    seconds of what is not the weights' half, h = F + B, and of F alone.

    No step is less than M t of the slowest stage, t = F + B + W, and what the others add to the
    fill, F + B - r min(B, W) of r rounds: no less than F + (1 - r) B, nor than (1 + r) h - r t,
    whose t is at most that of the slowest.
    """
    rounds = fill_rounds(len(seconds), micro_batches)
    early, late = rounds * forward + (1 - rounds) * prompt, (1 + rounds) * prompt

    def cheapest(limit: float) -> Cuts:
        fill = early if limit == np.inf else np.maximum(early, late - rounds * limit)
        return _shortest_but_one(np.where(seconds <= limit, fill, np.inf))

    return float(_lowered_limit(micro_batches, seconds, cheapest).cost_s)


def relaxed_seconds(problem: StageProblem) -> Array:
    """[stages, blocks + 1, blocks + 1]: lower bounds of a stage's seconds per micro-batch.

    With fractional counts a stage is a knapsack with one row, memory; its value is, by duality,

        max over price >= 0 of  sum over blocks min_o (seconds + price * bytes)[o] - price * room

    where only prices at which two points of a run cost the same can be best.
    """
    kinds = {id(problem.runs_at(stage)): stage for stage in range(problem.stages)}
    working = {kind: _working_bytes(problem, problem.runs_at(s)) for kind, s in kinds.items()}
    copies, added_s = copies_bytes(problem), _of_copies(problem, problem.tied_s)
    return np.stack([
        _relaxed_stage(problem, stage, working[id(problem.runs_at(stage))], copies) + added_s
        for stage in range(problem.stages)
    ])  # fmt: skip


def relaxed_fill_s(problem: StageProblem) -> Array:
    """[stages, blocks + 1, blocks + 1]: lower bounds of what a stage adds to a zero-bubble fill.

    F + B - rounds min(B, W), with B and W of the halves, is the larger of two sums over blocks.
    """
    return np.stack([_relaxed_fill_s(problem, stage) for stage in range(problem.stages)])


def _relaxed_fill_s(problem: StageProblem, stage: int) -> Array:
    rounds = fill_rounds(problem.stages, problem.micro_batches)
    runs, send_s = problem.runs_at(stage), problem.sends_s(stage)
    early = [
        min(p.forward_s + (1 - rounds) * (p.backward_s - p.weight_s) for p in run.points)
        for run in runs
    ]
    late = [
        min(p.forward_s + p.backward_s - (1 + rounds) * p.weight_s for p in run.points)
        for run in runs
    ]
    return np.maximum(
        sums(problem, early) + (1 - rounds / 2) * send_s, sums(problem, late) + send_s
    )


def tail_seconds(problem: StageProblem) -> Array:
    """[blocks + 1, blocks + 1]: sync and optimizer seconds of a stage of blocks a..b-1; by stage
    before that, where stages lie on different devices."""
    tails = [
        sums(problem, [run.sync_s + run.optimizer_s for run in runs])
        for runs in problem.unlike or (problem.runs,)
    ]
    return np.stack(tails) if problem.unlike else tails[0]


def copies_bytes(problem: StageProblem) -> Array:
    """[blocks + 1, blocks + 1]: tied state that a stage of blocks a..b-1 must hold a copy of."""
    return _of_copies(problem, problem.tied)


def _of_copies(problem: StageProblem, tied: Sequence[tuple[int, int, float]]) -> Array:
    out = np.zeros((len(problem.block_runs) + 1,) * 2)
    for i, j, size in tied:
        has_i, has_j = (sums(problem, np.eye(len(problem.runs))[r]) > 0 for r in (i, j))
        out += size * (has_j & ~has_i)
    return out


def sums(problem: StageProblem, per_run: Sequence[float] | Array) -> Array:
    """[a, b]: sum over blocks a..b-1 of a value of their run."""
    per_block = np.asarray(per_run, dtype=np.float64)[list(problem.block_runs)]
    total: Array = np.concatenate([[0.0], np.cumsum(per_block)])
    return np.subtract.outer(total, total).T


def maxima(problem: StageProblem, per_run: Sequence[float]) -> Array:
    """[a, b]: largest over blocks a..b-1 of a value of their run; 0 where there are none."""
    per_block = np.asarray(per_run, dtype=np.float64)[list(problem.block_runs)]
    out = np.zeros((len(per_block) + 1,) * 2)
    for a in range(len(per_block)):
        out[a, a + 1 :] = np.maximum.accumulate(per_block[a:])
    return out


def _relaxed_stage(problem: StageProblem, stage: int, working: Array, copies: Array) -> Array:
    """At each of its fullest moments. Beside what is held it has `copies` of state, and in backward
    `working` bytes."""
    bounds = [
        _relaxed_moment(problem, stage, held, working + copies if held.forward else copies)
        for held in problem.held_at(stage)
    ]
    bound: Array = np.maximum.reduce(bounds)
    return bound + problem.sends_s(stage)


def _relaxed_moment(problem: StageProblem, stage: int, held: Held, beside: Array) -> Array:
    runs = problem.runs_at(stage)
    capacity_bytes = problem.capacity_bytes[stage]
    points = [run.points_at(held) for run in runs]
    times = [np.array([p.forward_s + p.backward_s for p in of_run]) for of_run in points]
    bytes_of = [[p.persistent_bytes + moment_bytes(held, p) for p in of_run] for of_run in points]
    sizes = [np.array(run) / capacity_bytes for run in bytes_of]
    room = 1.0 - beside / capacity_bytes
    prices = np.array(indifferent_prices(times, sizes))[:, None]
    least = np.stack([
        np.maximum(
            (time + prices * size).min(axis=1), joint_s(run, prices / capacity_bytes, *held)[..., 0]
        )
        for time, size, run in zip(times, sizes, runs, strict=True)
    ])  # fmt: skip
    before = np.zeros((len(prices), len(problem.block_runs) + 1))
    before[:, 1:] = np.cumsum(least[list(problem.block_runs)].T, axis=1)
    smallest = sums(problem, [size.min() for size in sizes])
    first, end = np.nonzero(np.triu(smallest <= room + 1e-9, k=1))  # often a few of all pairs
    found = (before[:, end] - before[:, first] - prices * room[first, end]).max(axis=0)
    bound = np.full(smallest.shape, np.inf)
    bound[first, end] = np.maximum(found, 0.0)
    return bound


def joint_s(
    run: Run, price: Array | float, held: Array | float, pending: float = 0.0
) -> Array:
    """What a block costs at least where a byte has such a price and a rank holds so many
    micro-batches, by the run's `joint`; 0 where nothing is known. The least is concave in prices:
    between two it is no less than on the line through both."""
    joint = run.joint
    if joint is None:
        return np.zeros(1)
    kept = np.asarray(price * np.atleast_1d(held))
    least_s: Array = np.interp(kept, joint.prices, joint.least_s)
    always = min(p.persistent_bytes for p in run.points)
    waiting = min(p.pending_bytes for p in run.points)
    return least_s + (price - kept / joint.most_held) * always + price * pending * waiting


def _working_bytes(problem: StageProblem, runs: Sequence[Run]) -> Array:
    """[a, b]: what a backward of blocks a..b-1 needs beside all that is held, at least: the last
    block comes first, and the others when those behind them hold no more than what is pending."""
    least = [min(p.transient_bytes for p in run.points) for run in runs]
    freed = np.asarray([
        max(p.saved_bytes for p in run.points) - min(p.pending_bytes for p in run.points)
        for run in runs
    ])  # fmt: skip
    blocks = np.asarray(problem.block_runs)
    behind = np.concatenate([[0.0], np.cumsum(freed[blocks])])
    alone = np.zeros((len(blocks) + 1,) * 2)
    alone[:-1] = np.asarray(least)[blocks][:, None] - (behind[None] - behind[1:, None])
    return np.maximum.accumulate(np.triu(np.maximum(alone, 0.0), k=1)[::-1])[::-1]


def indifferent_prices(times: Sequence[Array], sizes: Sequence[Array]) -> list[float]:
    """0 and the prices at which the best point of a run changes: the slopes of its lower hull."""
    prices = {0.0}
    for time, size in zip(times, sizes, strict=True):
        order = np.lexsort((size, time))
        hull: list[tuple[float, float]] = []  # rising time, falling size
        for point in zip(time[order].tolist(), size[order].tolist(), strict=True):
            if hull and point[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
                hull.pop()
            hull.append(point)
        prices.update(_slope(*pair) for pair in pairwise(hull))
    return sorted(prices)


def _slope(faster: tuple[float, float], smaller: tuple[float, float]) -> float:
    """Seconds per size between two points."""
    return (smaller[0] - faster[0]) / (faster[1] - smaller[1])


def _lowered_limit(weight: float, values: Array, cheapest: Callable[[float], Cuts]) -> Cuts:
    """Cuts of least weight * (largest of `values` on their stages) + what `cheapest` minimises.

    `cheapest(limit)` uses only stages whose value is within the limit.
    """
    lowest = least_maximum(values)
    if not np.isfinite(lowest):
        return Cuts(np.inf, ())

    def with_largest(cuts: Cuts) -> tuple[float, Cuts]:
        largest = max(_along(values, cuts.at))
        return largest, Cuts(cuts.cost_s + weight * largest, cuts.at)

    _, best = with_largest(cheapest(lowest))
    limit = (best.cost_s - cheapest(np.inf).cost_s) / weight if weight else np.inf
    while limit >= lowest:
        rest = cheapest(limit)
        if rest.cost_s + weight * lowest >= best.cost_s:
            break
        largest, candidate = with_largest(rest)
        best = min(best, candidate, key=lambda cuts: cuts.cost_s)
        limit = np.nextafter(largest, -np.inf)
    return best


def _shortest_path(seconds: Array) -> Cuts:
    """Cuts of the least sum; stages are the steps, numbers of placed blocks the nodes."""
    stages, end = seconds.shape[0], seconds.shape[1] - 1
    reached = seconds[0, 0]
    origins = []
    for stage in range(1, stages):
        sums = reached[:, None] + seconds[stage]
        origins.append(sums.argmin(axis=0))
        reached = sums.min(axis=0)
    at = [end]
    for origin in reversed(origins):
        at.append(int(origin[at[-1]]))
    return Cuts(float(reached[end]), (0, *reversed(at)))


def _shortest_but_one(seconds: Array) -> Cuts:
    """As `_shortest_path`, of all stages but one."""
    end = seconds.shape[1] - 1
    free = np.where(np.isfinite(seconds), 0.0, np.inf)
    whole, less = seconds[0, 0], free[0, 0]  # of all stages so far, and of all but one
    origins = []
    for stage in range(1, seconds.shape[0]):
        added, now = whole[:, None] + seconds[stage], whole[:, None] + free[stage]
        before = less[:, None] + seconds[stage]
        best = np.minimum(now, before)
        origins.append((added.argmin(axis=0), best.argmin(axis=0), now <= before))
        whole, less = added.min(axis=0), best.min(axis=0)
    at, is_less = [end], True
    for of_whole, of_less, is_now in reversed(origins):
        origin = int((of_less if is_less else of_whole)[at[-1]])
        is_less = is_less and not is_now[origin, at[-1]]
        at.append(origin)
    return Cuts(float(less[end]), (0, *reversed(at)))


def least_maximum(values: Array) -> float:
    """The least possible largest value over the stages of any cuts; infinity if there are none."""
    reached = values[0, 0]
    for stage in values[1:]:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def _along(values: Array, at: tuple[int, ...]) -> list[float]:
    return [float(values[s, a, b]) for s, (a, b) in enumerate(pairwise(at))]
