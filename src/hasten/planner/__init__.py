"""The cost model of a cluster: layouts, seconds, memory and money, predicted before renting."""

from hasten.planner.planning import plan

__all__ = ["plan"]
