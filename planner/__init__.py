"""The planner: from a traced graph and a cluster to a `Plan`."""

from planner.planning import plan

__all__ = ["plan"]
