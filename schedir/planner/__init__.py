"""Planner: find parallel plans for a model on a cluster, with their step times and memory."""

from schedir.planner.config_export import config, program
from schedir.planner.estimate.simulated_estimate import exact, program_for
from schedir.planner.hardware.cluster_presets import cluster, clusters
from schedir.planner.hardware.software_constants import Constants
from schedir.planner.launch_options import options
from schedir.planner.parallel_plan import Choice, Host, Memory, Parts, Priced
from schedir.planner.plan_search import every, plan, step
from schedir.planner.prediction_regret import regret
from schedir.planner.schedule_improvement import shorter
from schedir.planner.transformer.layer_division_search import cut
from schedir.planner.transformer.layer_time import embedding, head, layer, stage
from schedir.planner.transformer.memory_estimate import memory
from schedir.planner.transformer.model_presets import load_model
from schedir.planner.transformer.transformer_spec import Model

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
