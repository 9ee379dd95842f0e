"""The wrapper of the integer solver: values, bounds, statuses, and its own errors."""

import ctypes
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest
from ortools.linear_solver import pywraplp
from ortools.math_opt.python import mathopt

from planner import solver
from planner.solver import Infeasible, Model, Relaxation, SolverFailed


def knapsack(values: list[float], sizes: list[float], room: float) -> Model:
    model = Model()
    taken = [model.binary(f"take{i}") for i in range(len(values))]
    model.constrain(zip(sizes, taken, strict=True), upper=room)
    model.minimise([(-value, variable) for value, variable in zip(values, taken, strict=True)])
    return model


def test_a_knapsack_is_filled_as_by_enumeration() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        values, sizes = rng.uniform(1, 10, (2, 8)).tolist()
        best = max(
            float(np.dot(values, pick))
            for pick in product((0, 1), repeat=8)
            if np.dot(sizes, pick) <= 20
        )
        solution = knapsack(values, sizes, 20).solve(gap=0.0)
        assert solution.objective == pytest.approx(-best)
        assert solution.bound <= solution.objective
        assert solution.status == "optimal"


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_size_of_costs_and_rows_does_not_matter(scale: float) -> None:
    values, sizes = [3.0, 4.0, 5.0], [2.0, 3.0, 4.0]
    model = knapsack([v * scale for v in values], [s / scale for s in sizes], 5 / scale)
    assert model.solve(gap=0.0).objective == pytest.approx(-7 * scale)


def test_repeated_terms_add_up_and_the_offset_counts() -> None:
    model = Model()
    x = model.variable(0, 10)
    model.constrain([(1.0, x), (1.0, x)], lower=6)
    model.minimise([(1.0, x), (1.0, x)], offset=5)
    solution = model.solve()
    assert (solution[x], solution.objective) == (pytest.approx(3), pytest.approx(11))


def test_no_solution_is_an_error_of_its_own() -> None:
    model = Model()
    model.constrain([(1.0, model.binary())], lower=2)
    with pytest.raises(Infeasible):
        model.solve()


def test_what_a_library_prints_by_itself_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    solve, libc = mathopt.solve, ctypes.CDLL(None)

    def talkative(*args: Any, **kwargs: Any) -> Any:
        libc.puts(b"noise")
        return solve(*args, **kwargs)

    monkeypatch.setattr(mathopt, "solve", talkative)
    print("before")
    knapsack([1.0, 2.0], [1.0, 1.0], 1.0).solve()
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_no_time_is_an_error_that_says_so() -> None:
    rng = np.random.default_rng(0)
    model = Model()
    picks = [[model.binary() for _ in range(40)] for _ in range(60)]
    for row in picks:
        model.constrain([(1.0, v) for v in row], 1, 1)
    weights = rng.integers(1, 10**6, (60, 40)).tolist()
    terms = [
        (w, v) for ws, vs in zip(weights, picks, strict=True) for w, v in zip(ws, vs, strict=True)
    ]
    model.constrain(terms, 30_000_001, 30_000_001)
    with pytest.raises(SolverFailed, match=r"found no solution within 1e-06 s \(2400 variables"):
        model.solve(time_limit_s=1e-6)


def test_the_same_model_gives_the_same_values() -> None:
    values, sizes = np.random.default_rng(1).uniform(1, 2, (2, 40)).tolist()
    first, second = (knapsack(values, sizes, 20).solve().values for _ in range(2))
    assert first == second


def test_a_start_is_accepted() -> None:
    model = knapsack([3.0, 4.0, 5.0], [2.0, 3.0, 4.0], 5)
    solution = model.solve(gap=0.0)
    start = {solver.Variable(v): value for v, value in solution.values.items()}
    assert model.solve(gap=0.0, start=start).values == solution.values


def test_errors_of_the_library_surface_in_its_own_words() -> None:
    model = mathopt.Model()
    model.add_variable(lb=2, ub=1)
    with pytest.raises(RuntimeError) as error:
        solver._run(model, mathopt.SolverType.PDLP, -1.0, 1.0, [])
    assert "canonical_code" not in str(error.value)


def test_a_model_prints_its_rows() -> None:
    model = Model()
    x, y = model.binary("x"), model.variable(0, inf)
    model.constrain([(2.0, x), (1.0, y)], lower=1)
    model.minimise([(3.0, y)])
    assert str(model) == "minimise 3 x1 + 0\n1 <= 2 x + 1 x1 <= inf"


def covering(rng: np.random.Generator) -> tuple[Model, list[solver.Variable]]:
    model = Model()
    variables = [model.variable(0, 1) for _ in range(12)]
    for _ in range(8):
        parts = rng.uniform(0, 1, 12).tolist()
        model.constrain(zip(parts, variables, strict=True), lower=0.3 * sum(parts))
    return model, variables


def sums_of(rng: np.random.Generator, variables: list[solver.Variable]) -> list[list[solver.Term]]:
    """Of very different size, one of them of nothing."""
    sizes = (1e-7, 1.0, 1e9)
    parts = [(size * rng.uniform(0, 1, len(variables))).tolist() for size in sizes]
    return [*([*zip(of, variables, strict=True)] for of in parts), []]


def test_sums_may_stand_for_their_terms() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        model, variables = covering(rng)
        sums = sums_of(rng, variables)
        plain, told = Relaxation(model), Relaxation(model)
        totals = [told.total(terms) for terms in sums]
        for rates in rng.uniform(0, 1, (4, 4)) / (1e-7, 1.0, 1e9, 1.0):
            terms = [(rate * c, v) for rate, of in zip(rates, sums, strict=True) for c, v in of]
            expected = plain.minimum(terms)
            found = told.minimum(zip(rates, totals, strict=True), only=totals)
            assert found.bound == pytest.approx(expected.bound)
            parts = [sum(c * expected[v] for c, v in of) for of in sums]
            assert [found[v] for v in totals] == pytest.approx(parts)


def test_a_solve_that_rounding_ends_is_begun_anew(monkeypatch) -> None:
    """With all rows and sums; only what fails again is an error."""
    rng = np.random.default_rng(6)
    model, variables = covering(rng)
    relaxation, solved, left = Relaxation(model), Relaxation._solved, [2]
    (total, *_) = [relaxation.total(terms) for terms in sums_of(rng, variables)]
    relaxation.constrain([(1.0, variables[0])], lower=0.75)
    expected = relaxation.minimum([(1.0, total)], only=variables).values

    def failing(self: Relaxation, costs: Any, scale: float) -> int:
        left[0] -= 1
        return pywraplp.Solver.ABNORMAL if left[0] >= 0 else solved(self, costs, scale)

    monkeypatch.setattr(Relaxation, "_solved", failing)
    again = relaxation.minimum([(1.0, total)], only=variables).values
    assert left == [-1] and again == pytest.approx(expected)
    left[0] = 3
    with pytest.raises(SolverFailed, match="GLOP's status 4"):
        relaxation.minimum([(1.0, total)])
