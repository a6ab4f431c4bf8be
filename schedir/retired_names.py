"""Retired options, settings and keys, and their replacements.

Why each feature was deleted: `docs/decisions/47-deleted-features.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# A key is a name as the user writes it: an option (`--count`), a setting of a configuration
# (`section.name`), a value of a setting (`kind = bert`, or the suffix of a file in `source`), or an
# option of `compile`, which is also a key in a `.sched` file (`open`).  The value is the hint of
# the error: it names the replacement.
_OPTIONS = {
    "activations": "max-activations", "axis": "axis-label", "blocks": "blocking-hosts",
    "colours": "colors", "device-waits": "host-device-sync", "draft": "compute-only",
    "eager": "eager-limit", "evaluations": "max-evaluations", "flat": "no-repeat",
    "idle": "idle-map", "in-flight": "max-in-flight", "lazy": "lazy-communicators",
    "limit": "memory-limit", "model": "progress-model", "most-instructions": "max-instructions",
    "no-exact": "closed-form-only", "on": "rank-programs", "order": "rank-order",
    "prove": "bound", "scale": "gpu-counts", "search": "improve-schedules",
    "seconds": "time-limit", "start": "initial-schedules", "take": "select",
    "time": "time-range", "whole": "no-split-backward", "why": "explain-start",
}  # fmt: skip
_COMMANDS = {"best": "recommend", "show": "print", "where": "diagnose"}
RETIRED: Final = MappingProxyType(
    {
        **{f"--{old}": f"--{old} is now --{new}" for old, new in _OPTIONS.items()},
        **{f"schedir {old}": f"it is now schedir {new}" for old, new in _COMMANDS.items()},
        "--ties": "--ties is now -O tied=STAGES",
        "open": "use one program with more microbatches, which accumulates their gradients",
        "kind = bert": "examples/bert.py trains it with schedir.runtime.Executor",
        "kind = encoder_decoder": "examples/encoder_decoder.py trains it with "
        "schedir.runtime.Executor",
        "tokenizer = bpe": "name the path of a tokenizer.json: the library tokenizers trains one, "
        "and ~/.cache/schedir has those of earlier runs",
        "source = .jsonl": "Megatron-LM's tools/preprocess_data.py writes a .bin and an .idx of it",
    }
)

# Public names by module, and their successors.
ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "schedir": {
            "Plan": "PipelineShape", "Ties": "TiedWeights", "Word": "RankSchedule",
            "bound": "lower_bound", "check_sequence": "check_program_sequence",
            "draft": "expand_schedule", "forwards": "evaluation_program",
            "frontier": "memory_frontier", "greedy": "greedy_schedule",
            "in_pieces": "split_costs", "layer_bytes": "activation_bytes_per_layer",
            "model_states": "zero_model_states", "overlap": "overlapped_pair",
            "parse": "from_text", "search": "search_schedule", "show": "to_text",
            "ties": "find_tied_weights", "trusting": "input_limits", "words": "schedule_algebra",
        },
        "schedir.runtime": {
            "Gloo": "GlooTransport", "InProcess": "InProcessExecutor",
            "PerMicrobatch": "PerMicrobatchBoundary", "Shared": "SharedMemoryTransport",
            "boundaries_of": "infer_boundaries", "check_split": "check_splittable_layer",
            "nccl": "nccl_transport", "reference": "run_sequential",
            "register_split": "register_splittable_layer", "sizes_of": "measure_sizes",
            "split_linears": "make_backward_splittable",
        },
        "schedir.planner": {
            "Choice": "ParallelPlan", "Constants": "SoftwareConstants", "Host": "HostMemory",
            "Memory": "GpuMemory", "Model": "TransformerSpec", "Parts": "StepBreakdown",
            "Priced": "PlanEstimate", "cluster": "cluster_preset", "clusters": "cluster_presets",
            "config": "train_config", "cut": "optimize_layer_division",
            "embedding": "embedding_time", "every": "all_plans", "exact": "simulate_plan",
            "head": "head_time", "layer": "layer_time", "memory": "peak_memory",
            "options": "launcher_options", "program": "plan_program",
            "program_for": "simulated_program",
            "shorter": "improve_schedule", "stage": "stage_time", "step": "estimate_step",
        },
        "schedir.viz": {
            "frontier": "memory_frontier", "letters": "text_chart",
            "tradeoff": "bubble_vs_memory", "visited": "window_tiles",
        },
        "schedir.testing": {
            "drafts": "compute_programs", "plans": "shapes", "plans_of": "shapes_for",
            "random_draft": "random_compute_program", "ties": "tied_weights",
        },
    }
)  # fmt: skip


def missing_attribute(module: str, name: str) -> AttributeError | ImportError:
    """Return the error of a name that a module does not have.

    Of a name that was renamed it is an ImportError, which has the new name: `from module import
    name` would show another message than that of an AttributeError.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if new := ATTRIBUTES.get(module, {}).get(name):
        return ImportError(f"{text}: it is now {new}", name=module)
    return AttributeError(text, name=name)
