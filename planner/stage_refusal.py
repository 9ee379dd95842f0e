"""What to say when no stage plan fits the memory.

Input: a `StageProblem` without a solution, or the prediction of a plan that is too large. Output:
which stage lacks how much, and why.
"""

import numpy as np

from ir.predicted import Prediction
from ir.quantities import size
from planner.stage_cuts import best_cuts, copies_bytes, maxima, sums
from planner.stage_problem import Assignment, Choice, StageProblem, stage_memory

# With so many micro-batches `best_cuts` minimises the largest share, and the sum only at a tie.
_LARGEST_FIRST = 10**6


def memory_message(problem: StageProblem) -> str:
    """The tightest stage when every block is as small as it gets and the cuts suit that best."""
    stage, choices = _tightest_stage(problem)
    peak_bytes = stage_memory(problem, stage, choices).peak_bytes
    part, part_bytes = _largest_part(problem, stage, choices)
    capacity_bytes = problem.capacity_bytes[stage]
    return (
        f"no plan fits: stage {stage} of {problem.stages} needs about {size(peak_bytes)} per "
        f"device with its blocks as small as they get, and {size(capacity_bytes)} are usable. "
        f"Largest part: {part} ({size(part_bytes)}). "
        f"Try a smaller micro-batch, or sharding over more devices."
    )


def excess_message(prediction: Prediction) -> str:
    """The fullest rank of a priced plan that does not fit, and its largest part."""
    rank = prediction.fullest
    cost = prediction.stages[rank]
    parts = {
        "weights": cost.parameter_bytes, "gradients": cost.gradient_bytes,
        "optimizer state": cost.optimizer_bytes, "kept activations": cost.saved_bytes,
        "working memory": cost.transient_bytes,
    }  # fmt: skip
    name = max(parts, key=lambda part: parts[part])
    return (
        f"no plan fits: stage {rank} needs {size(cost.peak_bytes)} per device, and "
        f"{size(prediction.capacity_of(rank))} are usable. Largest part: {name} "
        f"({size(parts[name])}). Try a smaller micro-batch, or more devices."
    )


def least_assignment(problem: StageProblem) -> Assignment:
    """The plan of least memory: every block as small as it gets, and the cuts that suit that best,
    whether or not it fits."""
    copies, shares = copies_bytes(problem), []
    for stage, capacity_bytes in enumerate(problem.capacity_bytes):
        parts = [
            stage_memory(problem, stage, (Choice(r, _smallest_point(problem, stage, r), 1),))
            for r in range(len(problem.runs))
        ]
        held = sums(problem, [part.persistent_bytes + part.saved_bytes for part in parts])
        peaks = held + maxima(problem, [part.transient_bytes for part in parts]) + copies
        shares.append(np.where(np.triu(np.ones_like(peaks), k=1), peaks / capacity_bytes, np.inf))
    cuts = best_cuts(np.stack(shares), np.zeros_like(copies), _LARGEST_FIRST)
    assert cuts is not None  # any cuts will do: nothing is excluded here
    found = []
    for stage, span in enumerate(zip(cuts.at, cuts.at[1:], strict=False)):
        inside = problem.block_runs[slice(*span)]
        found.append(tuple(
            Choice(r, _smallest_point(problem, stage, r), inside.count(r))
            for r in sorted(set(inside))
        ))  # fmt: skip
    return tuple(found)


def _tightest_stage(problem: StageProblem) -> tuple[int, tuple[Choice, ...]]:
    """The fullest stage of the plan of least memory."""
    assignment = least_assignment(problem)
    stage = max(
        range(problem.stages),
        key=lambda s: (
            stage_memory(problem, s, assignment[s]).peak_bytes / problem.capacity_bytes[s]
        ),
    )
    return stage, assignment[stage]


def _smallest_point(problem: StageProblem, stage: int, r: int) -> int:
    """The point of run r that needs the least memory, where a stage has its even share of blocks.

    Transient bytes count once for all blocks of a stage, the others for each.
    """
    share = max(len(problem.block_runs) // problem.stages, 1)
    points = range(len(problem.runs_at(stage)[r].points))
    parts = [stage_memory(problem, stage, (Choice(r, o, 1),)) for o in points]
    sizes = [p.persistent_bytes + p.saved_bytes + p.transient_bytes / share for p in parts]
    return sizes.index(min(sizes))


def _largest_part(
    problem: StageProblem, stage: int, choices: tuple[Choice, ...]
) -> tuple[str, float]:
    """The name and bytes of the largest contributor to a stage's memory."""
    sizes: dict[str, float] = {}
    for choice in choices:
        run = problem.runs[choice.run]
        memory = stage_memory(problem, stage, (choice,))
        name = f"{run.name} x {choice.count}" if run.count > 1 else run.name
        held = f"{problem.in_flight(stage)} micro-batches"
        sizes[f"weights, gradients and optimizer state of {name}"] = memory.persistent_bytes
        sizes[f"activations of {name} for {held}"] = memory.saved_bytes
        sizes[f"working memory of {run.name}"] = memory.transient_bytes
    return max(sizes.items(), key=lambda item: item[1])
