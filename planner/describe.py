"""The text of a plan."""

from __future__ import annotations

from ir.plan import Plan
from planner.candidate import Evaluated
from planner.cost import CostModel


def describe(plan: Plan, best: Evaluated, cost: CostModel) -> str:
    """Lines for people; see `docs`."""
    return f"{plan.model} on {plan.cluster}   {plan.mesh}"
