"""The stage plan as one integer program: an exact reference, and the solver of single stages.

Input: a `StageProblem`. Output: an assignment within a proven gap. With n[r,s,o] blocks of run r
on stage s at point o, and c[r,s] blocks of run r on stages up to s:

    minimise  (M - 1) t* + sum_s t_s + tail
    (1) c[r,s] = c[r,s-1] + sum_o n[r,s,o]     c[r,P-1] = N_r                  every block once
    (2) c[r,s] >= N_r done[r,s]                c[r+1,s] <= N_{r+1} done[r,s]   in model order
    (3) sum_ro n[r,s,o] >= 1                                                   no empty stage
    (4) t* >= t_s = sum_ro n[r,s,o] (forward + backward)[r,o] + sends          the pace
        (GPipe: t* = forward* + backward*, each over its own phase)
    (5) tail >= sum_ro n[r,s,o] (sync + optimizer)[r]                          once per step
    (6) memory_s = sum_ro n[r,s,o] (persistent + held_s)[r,o] + transient_s + copies_s
        held_s = in_flight_s saved, or the most of several moments where backward is split
        transient_s >= transient[r,o] where run r uses point o on stage s
        copies_s = bytes of each tied pair (i, j) with j on stage s and i not
    (7) memory_s <= capacity_s
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from planner.solver import Model, Solution, Term, Variable
from planner.stage_problem import Assignment, Choice, Point, StageProblem


def solve_program(
    problem: StageProblem, gap: float, time_limit_s: float
) -> tuple[Assignment, float]:
    """The assignment of the shortest step and a lower bound of that step in seconds.

    Memory may pass its capacity by the solver's tolerance, a millionth. Raises `Infeasible` or
    `SolverFailed` of `planner.solver`.
    """
    program = _placement(problem)
    unit_s = _minimise_step(program)
    for stage in range(problem.stages):
        program.model.constrain(_memory_terms(program, stage), upper=1.0)  # (7)
    solution = program.model.solve(gap, time_limit_s)
    return _decoded(program, solution), solution.bound * unit_s


@dataclass(frozen=True, slots=True)
class _Program:
    """The model being built; `counts` holds n[r,s,o] without points that another one beats."""

    problem: StageProblem
    model: Model
    counts: dict[tuple[int, int], dict[int, Variable]]

    def terms(self, stage: int, weight: Callable[[int, Point], float]) -> list[Term]:
        """sum over runs and points of n[r,stage,o] * weight(r, point)."""
        return [
            (weight(r, run.points[o]), variable)
            for r, run in enumerate(self.problem.runs_at(stage))
            for o, variable in self.counts[r, stage].items()
        ]


def _placement(problem: StageProblem) -> _Program:
    """Rows (1) to (3): the counts and their order."""
    model = Model()
    counts = {
        (r, s): {
            o: model.variable(0, run.count, integer=True, name=f"n[{r},{s},{o}]")
            for o in _unbeaten_points(problem.runs_at(s)[r].points)
        }
        for r, run in enumerate(problem.runs)
        for s in range(problem.stages)
    }
    program = _Program(problem, model, counts)
    gates: list[Variable] | None = None
    for r in range(len(problem.runs)):
        gates = _add_run(program, r, gates)
    for s in range(problem.stages):
        model.constrain(program.terms(s, lambda _r, _point: 1.0), lower=1.0)
    return program


def _add_run(program: _Program, r: int, gates: list[Variable] | None) -> list[Variable]:
    """Rows (1) and (2) of run r, which may use stage s where `gates[s]` is 1; its own gates."""
    model, count = program.model, program.problem.runs[r].count
    done: list[Variable] = []
    before: list[Term] = []
    for s in range(program.problem.stages):
        is_last = s == program.problem.stages - 1
        placed = model.variable(count if is_last else 0, count, name=f"c[{r},{s}]")
        here = [(1.0, variable) for variable in program.counts[r, s].values()]
        model.constrain([(-1.0, placed), *before, *here], 0.0, 0.0)
        if gates is not None:
            model.constrain([(1.0, placed), (-float(count), gates[s])], upper=0.0)
        if count == 1:
            done.append(placed)
        else:
            done.append(model.binary(f"done[{r},{s}]"))
            model.constrain([(1.0, placed), (-float(count), done[s])], lower=0.0)
        before = [(1.0, placed)]
    return done


def _minimise_step(program: _Program) -> float:
    """Rows (4), (5) and the objective, in units of the returned seconds (about one stage)."""
    problem, model = program.problem, program.model
    fastest_s = (r.count * s for r, s in zip(problem.runs, problem.fastest_s, strict=True))
    unit_s = (sum(fastest_s) / problem.stages) or 1.0
    phases: list[Callable[[int, Point], float]] = [lambda _r, p: p.forward_s + p.backward_s]
    if problem.schedule == "gpipe":
        phases = [lambda _r, p: p.forward_s, lambda _r, p: p.backward_s]
    paces = [model.variable(name="pace") for _ in phases]
    tail = model.variable(name="tail")
    objective = [(problem.micro_batches - 1.0, pace) for pace in paces] + [(1.0, tail)]
    for s in range(problem.stages):
        send = problem.exposed_send_s(s) / unit_s
        for pace, phase in zip(paces, phases, strict=True):
            seconds = [(cost / unit_s, variable) for cost, variable in program.terms(s, phase)]
            objective += seconds
            negated = [(-cost, variable) for cost, variable in seconds]
            model.constrain([(1.0, pace), *negated], lower=send / len(phases))
        tails = [run.sync_s + run.optimizer_s for run in problem.runs_at(s)]
        once = program.terms(s, partial(_of_run, tails))
        model.constrain([(1.0, tail), *((-cost / unit_s, v) for cost, v in once)], lower=0.0)
    sends = sum(problem.exposed_send_s(s) for s in range(problem.stages)) / unit_s
    model.minimise(objective, offset=sends)
    return unit_s


def _of_run(values: Sequence[float], r: int, _point: Point) -> float:
    """What does not depend on the point."""
    return values[r]


def _memory_terms(program: _Program, stage: int) -> list[Term]:
    """Rows (6): memory of a stage in units of its capacity."""
    problem, model = program.problem, program.model
    capacity_bytes = problem.capacity_bytes[stage]
    terms = [
        (size / capacity_bytes, variable)
        for size, variable in program.terms(
            stage, lambda _r, point: point.persistent_bytes + problem.held_bytes(stage, point)
        )
    ]
    transient = model.variable(name=f"transient[{stage}]")
    for r in range(len(problem.runs)):
        steps = [(-size / capacity_bytes, v) for size, v in _transient_steps(program, r, stage)]
        model.constrain([(1.0, transient), *steps], lower=0.0)
    terms.append((1.0, transient))
    for i, j, size in problem.tied:
        copy = model.variable(0, 1, name=f"copy[{i},{j},{stage}]")
        has_i, has_j = _presence(program, i, stage), _presence(program, j, stage)
        negated = [(-coefficient, v) for coefficient, v in has_j]
        model.constrain([(1.0, copy), *has_i, *negated], lower=0.0)
        terms.append((size / capacity_bytes, copy))
    return terms


def _transient_steps(program: _Program, r: int, stage: int) -> list[Term]:
    """A sum that is at least the transient bytes of the points that run r uses on the stage.

    One block uses one point. For more, a binary per size says that a point of at least that size
    is used, and adds the step from the next smaller size.
    """
    run, counts = program.problem.runs_at(stage)[r], program.counts[r, stage]
    if run.count == 1:
        return [(run.points[o].transient_bytes, variable) for o, variable in counts.items()]
    sizes = sorted({run.points[o].transient_bytes for o in counts})
    steps: list[Term] = []
    for smaller, size in zip([0.0, *sizes], sizes, strict=False):
        used = program.model.binary(f"used[{r},{stage},{size:g}]")
        users = [(-1.0, v) for o, v in counts.items() if run.points[o].transient_bytes >= size]
        program.model.constrain([(float(run.count), used), *users], lower=0.0)
        steps.append((size - smaller, used))
    return steps


def _presence(program: _Program, r: int, stage: int) -> list[Term]:
    """A sum that is 1 if run r has a block on the stage and 0 if not."""
    blocks = [(1.0, variable) for variable in program.counts[r, stage].values()]
    count = program.problem.runs[r].count
    if count == 1:
        return blocks
    present = program.model.binary(f"present[{r},{stage}]")
    program.model.constrain([(-1.0, present), *blocks], lower=0.0)
    program.model.constrain([(-float(count), present), *blocks], upper=0.0)
    return [(1.0, present)]


def _decoded(program: _Program, solution: Solution) -> Assignment:
    """Per stage the points with a block on it, in model order."""
    runs = range(len(program.problem.runs))
    return tuple(
        tuple(
            Choice(r, o, int(solution[variable]))
            for r in runs
            for o, variable in program.counts[r, s].items()
            if solution[variable] > 0
        )
        for s in range(program.problem.stages)
    )


def _unbeaten_points(points: tuple[Point, ...]) -> list[int]:
    """Points that no other one equals or beats in every respect; of equal ones the first."""

    def costs(point: Point) -> tuple[float, ...]:
        seconds = (point.forward_s, point.backward_s)
        held = (point.saved_bytes, point.pending_bytes)
        return (*seconds, *held, point.persistent_bytes, point.transient_bytes)

    def beats(i: int, j: int) -> bool:
        a, b = costs(points[i]), costs(points[j])
        return all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < j)

    indices = range(len(points))
    return [j for j in indices if not any(beats(i, j) for i in indices)]
