"""Mixed-integer linear programs through OR-tools MathOpt, without its quirks.

Input: variables, rows and a linear objective, added one by one. Output: a `Solution` within a
proven gap. HiGHS solves; SCIP is tried where HiGHS fails. One thread, fixed seed: the same model
gives the same solution, unless a time limit ends the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import NewType, TypeAlias

from ortools.linear_solver import linear_solver_pb2, pywraplp
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from ir.errors import Refused
from planner.quiet import quiet

Variable = NewType("Variable", int)
Term = tuple[float, Variable]

_SOLVERS = (mathopt.SolverType.HIGHS, mathopt.SolverType.GSCIP)
# Tolerances of MIP solvers are absolute (1e-6 on rows, 1e-7 on reduced costs), so costs in
# seconds and rows in bytes are brought to about this size first.
_LARGEST_COST = 1e3
_ROW_SIZES = (1e-3, 1e3)
_WHOLE = 1e-6
_LATER = "use_preprocessing: false use_dual_simplex: false"
_FIRST = "use_preprocessing: false use_dual_simplex: true"
"""Costs are not negative, so no variable at all is where the dual simplex may start; another
objective leaves the last solution where the primal one may."""
_ANEW = (_FIRST, "use_preprocessing: true")
"""Where rounding ends a solve from the last solution."""


_Message: TypeAlias = "tuple[list[Variable], linear_solver_pb2.MPModelProto]"
"""Variables in a message's order."""


class Infeasible(Exception):
    """No values satisfy all rows."""


class SolverFailed(Refused):
    """No solver could handle the model, or none found a solution in time."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Values by variable, integers exact; `bound` is a proven lower bound of the objective.

    `status`: "optimal" (within the gap asked for) or "time_limit" (the best found until then).
    """

    values: Mapping[int, float]
    objective: float
    bound: float
    status: str

    def __getitem__(self, variable: Variable) -> float:
        return self.values[variable]

    @property
    def is_integral(self) -> bool:
        """Whether all values are whole numbers, but for rounding."""
        return all(abs(value - round(value)) < _WHOLE for value in self.values.values())

    @property
    def gap(self) -> float:
        """(objective - bound) relative to the objective."""
        return (self.objective - self.bound) / max(abs(self.objective), 1e-300)


@dataclass(frozen=True, slots=True)
class _Row:
    terms: tuple[Term, ...]
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class _Total:
    """`unit`: its largest coefficient; its variable is in units of that."""

    name: Variable
    parts: tuple[Term, ...]
    unit: float


class Model:
    """A program to be minimised, built step by step."""

    def __init__(self) -> None:
        self._variables: list[tuple[float, float, bool, str]] = []
        self._rows: list[_Row] = []
        self._objective: tuple[Term, ...] = ()
        self._offset = 0.0
        self._messages: dict[tuple[int, ...], _Message] = {}

    def __str__(self) -> str:
        """The program in words, one row a line; variables without a name print as x<index>."""
        lines = [f"minimise {self._text(self._objective)} + {self._offset:g}"]
        lines += [f"{r.lower:g} <= {self._text(r.terms)} <= {r.upper:g}" for r in self._rows]
        return "\n".join(lines)

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    @property
    def size(self) -> str:
        """How large it is, for messages."""
        nonzeros = sum(len(row.terms) for row in self._rows)
        return f"{len(self._variables)} variables, {len(self._rows)} rows, {nonzeros} nonzeros"

    def binary(self, name: str = "") -> Variable:
        """A variable that is 0 or 1."""
        return self.variable(0, 1, integer=True, name=name)

    def variable(
        self, lower: float = 0.0, upper: float = inf, *, integer: bool = False, name: str = ""
    ) -> Variable:
        """A variable between two bounds. Names are for reading; they need not be unique."""
        self._messages.clear()
        self._variables.append((lower, upper, integer, name))
        return Variable(len(self._variables) - 1)

    def constrain(self, terms: Iterable[Term], lower: float = -inf, upper: float = inf) -> None:
        """lower <= sum of coefficient * variable <= upper; repeated variables add up."""
        self._messages.clear()
        self._rows.append(_Row(summed(terms), lower, upper))

    def minimise(self, terms: Iterable[Term], offset: float = 0.0) -> None:
        """The objective: sum of coefficient * variable + offset."""
        self._objective, self._offset = summed(terms), offset

    def solve(
        self,
        gap: float = 0.005,
        time_limit_s: float = 60.0,
        *,
        start: Mapping[Variable, float] | None = None,
    ) -> Solution:
        """The minimum within the relative `gap`, or the best found in `time_limit_s`.

        `start`: values to begin the search from (all or some variables). Raises `Infeasible` if
        that is proven, `SolverFailed` if nothing was found in time or every solver failed.
        """
        scale = _LARGEST_COST / max((abs(cost) for cost, _ in self._objective if cost), default=1)
        model, variables = self._exported(scale)
        hints = [{variables[v]: value for v, value in start.items()}] if start else []
        failures = []
        for solver in _SOLVERS:
            try:
                result = _run(model, solver, gap, time_limit_s, hints)
            except RuntimeError as error:
                failures.append(f"{solver.name}: {error}")
                continue
            match result.termination.reason:
                case mathopt.TerminationReason.OPTIMAL | mathopt.TerminationReason.FEASIBLE:
                    return self._solution(result, variables, scale)
                case (
                    mathopt.TerminationReason.INFEASIBLE
                    | mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED
                ):
                    raise Infeasible(f"no solution exists ({self.size})")
            failures.append(f"{solver.name}: {result.termination.reason.value}")
        raise SolverFailed(
            f"the solver found no solution within {time_limit_s:g} s ({self.size}): "
            f"{'; '.join(failures)}. Allow it more time."
        )

    def copy(self) -> Model:
        """The same variables and rows, to add others to; without an objective."""
        made = Model()
        made._variables, made._rows = [*self._variables], [*self._rows]
        return made

    def message(self, rows: Sequence[int]) -> _Message:
        """Some rows with their variables, or all rows with all variables, for GLOP's interface:
        several times faster than one by one. Made once while the model does not change."""
        is_all, key = len(rows) == self.n_rows, tuple(rows)
        if key not in self._messages:
            counted = self._rows if is_all else [self._rows[n] for n in rows]
            known: Iterable[int] = range(len(self._variables))
            if not is_all:
                known = dict.fromkeys(v for row in counted for _, v in row.terms)
            self._messages[key] = self._message([*map(Variable, known)], counted)
        return self._messages[key]

    def _message(self, known: list[Variable], rows: Sequence[_Row]) -> _Message:
        message = linear_solver_pb2.MPModelProto()
        numbers = {v: number for number, v in enumerate(known)}
        for v in known:
            low, up, *_ = self._variables[v]
            message.variable.add(lower_bound=low, upper_bound=up)
        for row in rows:
            factor = _row_factor(row)
            added = message.constraint.add(
                lower_bound=row.lower * factor, upper_bound=row.upper * factor
            )
            added.var_index.extend([numbers[v] for _, v in row.terms])
            added.coefficient.extend([coefficient * factor for coefficient, _ in row.terms])
        return known, message

    def relax_last(self) -> None:
        """Takes back the last row."""
        self._messages.clear()
        self._rows.pop()

    def _text(self, terms: Iterable[Term]) -> str:
        names = [name or f"x{index}" for index, (*_, name) in enumerate(self._variables)]
        return " + ".join(f"{coefficient:g} {names[v]}" for coefficient, v in terms) or "0"

    def _exported(self, scale: float) -> tuple[mathopt.Model, list[mathopt.Variable]]:
        """Through MathOpt's message format: several times faster than its objects one by one."""
        message = model_pb2.ModelProto()
        lowers, uppers, integers, _ = (
            zip(*self._variables, strict=True) if self._variables else ((), (), (), ())
        )
        message.variables.ids.extend(range(len(lowers)))
        message.variables.lower_bounds.extend(lowers)
        message.variables.upper_bounds.extend(uppers)
        message.variables.integers.extend(integers)
        factors = [_row_factor(row) for row in self._rows]
        rows, matrix = message.linear_constraints, message.linear_constraint_matrix
        rows.ids.extend(range(len(factors)))
        rows.lower_bounds.extend(row.lower * f for row, f in zip(self._rows, factors, strict=True))
        rows.upper_bounds.extend(row.upper * f for row, f in zip(self._rows, factors, strict=True))
        for number, (row, factor) in enumerate(zip(self._rows, factors, strict=True)):
            terms = sorted((v, c * factor) for c, v in row.terms if c)
            matrix.row_ids.extend([number] * len(terms))
            matrix.column_ids.extend(v for v, _ in terms)
            matrix.coefficients.extend(c for _, c in terms)
        costs = sorted((v, cost * scale) for cost, v in self._objective if cost)
        message.objective.linear_coefficients.ids.extend(v for v, _ in costs)
        message.objective.linear_coefficients.values.extend(cost for _, cost in costs)
        model = mathopt.Model.from_model_proto(message)
        return model, sorted(model.variables(), key=lambda variable: variable.id)

    def _solution(
        self, result: mathopt.SolveResult, variables: Sequence[mathopt.Variable], scale: float
    ) -> Solution:
        raw = result.variable_values(variables)
        values = {
            v: float(round(value)) if integer else float(value)
            for v, (value, (_, _, integer, _)) in enumerate(zip(raw, self._variables, strict=True))
        }
        objective = sum(cost * values[v] for cost, v in self._objective) + self._offset
        bound = min(result.dual_bound() / scale + self._offset, objective)
        is_optimal = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        return Solution(values, objective, bound, "optimal" if is_optimal else "time_limit")


class Relaxation:
    """A model whose variables may be any real numbers, minimised for one objective after the
    other: each solve starts from the last one's solution, so presolve is off.

    Through GLOP's own interface: reading MathOpt's answers takes longer than the solve. `rows`: the
    numbers of those that count, if not all do; only their variables are known then.
    """

    def __init__(self, model: Model, rows: Sequence[int] | None = None) -> None:
        self._known, self._message = model.message(range(model.n_rows) if rows is None else rows)
        self._added: list[_Row] = []
        self._totals: list[_Total] = []
        self._load(_FIRST)

    def _load(self, parameters: str) -> None:
        """All rows and totals, without any solution."""
        self._solver = pywraplp.Solver("relaxation", pywraplp.Solver.GLOP_LINEAR_PROGRAMMING)
        self._solver.SetSolverSpecificParametersAsString(parameters)
        self._solver.LoadModelFromProto(self._message)
        self._variables = dict(zip(self._known, self._solver.variables(), strict=True))
        self._units: dict[Variable, float] = {}
        for row in self._added:
            self._add(row)
        for total in self._totals:
            self._add_total(total)
        self._solver.Objective().SetMinimization()

    def constrain(self, terms: Iterable[Term], lower: float = -inf, upper: float = inf) -> None:
        """One more row, as of `Model`."""
        self._added.append(_Row(summed(terms), lower, upper))
        self._add(self._added[-1])

    def total(self, terms: Iterable[Term]) -> Variable:
        """A sum of which no part is negative as a variable of objectives: where these are made of
        a few sums, only what a sum counts is told to the solver, and read from it."""
        parts = tuple((coefficient, v) for coefficient, v in summed(terms) if coefficient)
        unit = max((coefficient for coefficient, _ in parts), default=1.0)
        self._totals.append(_Total(Variable(-1 - len(self._totals)), parts, unit))
        self._add_total(self._totals[-1])
        return self._totals[-1].name

    def _add(self, row: _Row) -> None:
        factor = _row_factor(row)
        added = self._solver.Constraint(row.lower * factor, row.upper * factor)
        for coefficient, variable in row.terms:
            added.SetCoefficient(self._variables[variable], coefficient * factor)

    def _add_total(self, total: _Total) -> None:
        variable, row = self._solver.NumVar(0.0, inf, ""), self._solver.Constraint(0.0, 0.0)
        row.SetCoefficient(variable, -1.0)
        for coefficient, v in total.parts:
            row.SetCoefficient(self._variables[v], coefficient / total.unit)
        self._variables[total.name], self._units[total.name] = variable, total.unit

    def minimum(
        self, terms: Iterable[Term], offset: float = 0.0, *, only: Iterable[Variable] | None = None
    ) -> Solution:
        """The least sum of coefficient * variable + offset: a lower bound of the model's.

        `only`: the variables whose values are wanted, since reading all takes a while; without it
        those of the model.
        """
        costs = [(cost * self._units.get(v, 1.0), v) for cost, v in summed(terms) if cost]
        scale = _LARGEST_COST / max((abs(cost) for cost, _ in costs), default=1)
        status = self._solved(costs, scale)
        for parameters in _ANEW:
            if status in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE):
                break
            self._load(parameters)
            status = self._solved(costs, scale)
        match status:
            case pywraplp.Solver.OPTIMAL:
                units, variables = self._units, self._variables
                wanted = (v for v in variables if v >= 0) if only is None else only
                values: dict[int, float] = {
                    v: variables[v].solution_value() * units.get(v, 1.0) for v in wanted
                }
                bound = self._solver.Objective().Value() / scale + offset
                return Solution(values, bound, bound, "optimal")
            case pywraplp.Solver.INFEASIBLE:
                raise Infeasible("no solution exists")
            case _:
                raise SolverFailed(f"the linear program failed (GLOP's status {status})")

    def _solved(self, costs: Sequence[Term], scale: float) -> int:
        """GLOP's status after a solve."""
        objective = self._solver.Objective()
        objective.Clear()
        for cost, v in costs:
            objective.SetCoefficient(self._variables[v], cost * scale)
        status: int = self._solver.Solve()
        self._solver.SetSolverSpecificParametersAsString(_LATER)
        return status


def _run(
    model: mathopt.Model,
    solver: mathopt.SolverType,
    gap: float,
    time_limit_s: float,
    hints: Sequence[Mapping[mathopt.Variable, float]],
) -> mathopt.SolveResult:
    """One solve; every failure surfaces as a RuntimeError with the solver's own words.

    OR-tools 9.15 fails to build its error message and raises an AttributeError about
    `canonical_code` instead; the original is its context. Setting `threads` is such a failure
    with HiGHS, which uses one thread by default.
    """
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=time_limit_s),
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=1e-9,
        random_seed=0,
    )
    start = mathopt.ModelSolveParameters(
        solution_hints=[mathopt.SolutionHint(variable_values=dict(hint)) for hint in hints]
    )
    try:
        with quiet():
            return mathopt.solve(model, solver, params=parameters, model_params=start)
    except AttributeError as error:
        raise RuntimeError(str(error.__context__ or error)) from error


def summed(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Terms with one entry per variable, in the order of first use."""
    sums: dict[Variable, float] = {}
    for coefficient, variable in terms:
        sums[variable] = sums.get(variable, 0.0) + coefficient
    return tuple((coefficient, variable) for variable, coefficient in sums.items())


def _row_factor(row: _Row) -> float:
    """What to multiply a row by so that its largest coefficient has a usual size."""
    largest = max((abs(coefficient) for coefficient, _ in row.terms), default=0.0)
    smallest_size, largest_size = _ROW_SIZES
    return 1.0 if largest == 0 or smallest_size <= largest <= largest_size else 1.0 / largest
