"""Find parallel plans for a model on a cluster, with their step times and memory."""

from schedir.planner.calibration import CalibratedConstant, Calibration, MeasuredRun, calibrate
from schedir.planner.estimate.simulated_estimate import simulate_plan, simulated_program
from schedir.planner.hardware.cluster_presets import cluster_preset, cluster_presets
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.hardware.software_stacks import Stack, stack_preset, stack_presets
from schedir.planner.hardware.step_time_errors import StepErrors, find_step_errors
from schedir.planner.launch_options import launcher_options
from schedir.planner.parallel_plan import (
    GpuMemory,
    HostMemory,
    ParallelPlan,
    PlanEstimate,
    StepBreakdown,
)
from schedir.planner.plan_compilation import plan_program
from schedir.planner.plan_search import all_plans, estimate_step, plan
from schedir.planner.plan_simplicity import prefer_simplest
from schedir.planner.regret import prediction_regret
from schedir.planner.schedule_improvement import improve_schedule
from schedir.planner.train_config_export import train_config
from schedir.planner.transformer.layer_division_search import optimize_layer_division
from schedir.planner.transformer.layer_time import embedding_time, head_time, layer_time, stage_time
from schedir.planner.transformer.memory_estimate import StateBytes, peak_memory
from schedir.planner.transformer.model_presets import load_model
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.retired_names import make_attribute_error

__all__ = [
    "CalibratedConstant",
    "Calibration",
    "GpuMemory",
    "HostMemory",
    "MeasuredRun",
    "ParallelPlan",
    "PlanEstimate",
    "SoftwareConstants",
    "Stack",
    "StateBytes",
    "StepBreakdown",
    "StepErrors",
    "TransformerSpec",
    "all_plans",
    "calibrate",
    "cluster_preset",
    "cluster_presets",
    "embedding_time",
    "estimate_step",
    "find_step_errors",
    "head_time",
    "improve_schedule",
    "launcher_options",
    "layer_time",
    "load_model",
    "optimize_layer_division",
    "peak_memory",
    "plan",
    "plan_program",
    "prediction_regret",
    "prefer_simplest",
    "simulate_plan",
    "simulated_program",
    "stack_preset",
    "stack_presets",
    "stage_time",
    "train_config",
]


def __getattr__(name: str) -> object:
    raise make_attribute_error(__name__, name)
