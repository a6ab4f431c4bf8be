"""Planner: from a model and a cluster to plans, and what a step of each takes and holds."""

from schedir.planner.choice import Choice
from schedir.planner.model import Model

__all__ = ["Choice", "Model"]
