"""Planner: from a model and a cluster to plans, and what a step of each takes and holds."""

from schedir.planner.choice import Choice, Host, Memory, Parts, Priced
from schedir.planner.constants import Constants
from schedir.planner.cut import cut
from schedir.planner.exact import exact, program_for
from schedir.planner.known import cluster, clusters
from schedir.planner.layer import embedding, head, layer, stage
from schedir.planner.memory import memory
from schedir.planner.model import Model
from schedir.planner.models import load_model
from schedir.planner.options import options
from schedir.planner.plan import every, plan, step
from schedir.planner.regret import regret
from schedir.planner.runnable import config, program
from schedir.planner.shorter import shorter

__all__ = [
    "Choice",
    "Constants",
    "Host",
    "Memory",
    "Model",
    "Parts",
    "Priced",
    "cluster",
    "clusters",
    "config",
    "cut",
    "embedding",
    "every",
    "exact",
    "head",
    "layer",
    "load_model",
    "memory",
    "options",
    "plan",
    "program",
    "program_for",
    "regret",
    "shorter",
    "stage",
    "step",
]
