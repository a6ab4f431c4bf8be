"""Retired names of options, settings, fields and functions, and their replacements.

`docs/decisions/47-deleted-features.md` explains the deleted features.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Options of the command line, without `--`.
_RENAMED_OPTIONS = {
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
# Commands of the command line.
_RENAMED_COMMANDS = {"best": "recommend", "show": "print", "where": "diagnose"}
# Fields and options of programs: in the text form, in Python, and after `-O`.
RENAMED_FIELDS: Final = MappingProxyType(
    {
        "active": "unsharded_stages", "ahead": "unshard_prefetch", "blocks": "blocking_hosts",
        "chunked": "chunks_per_microbatch", "chunks": "microbatch_chunks",
        "clip": "clip_grad_norm", "cut": "stage_segments", "delay": "weight_delay",
        "device_waits": "host_device_sync", "eager": "eager_limit",
        "fill": "fill_collective_waits", "frozen": "frozen_stages",
        "host_limit": "host_memory_limit", "lazy": "lazy_communicators",
        "limit": "memory_limit", "meets": "segment_boundaries", "model": "progress_model",
        "plan": "shape", "reduce": "reduce_scatter_at", "segments": "sequence_chunks",
        "sequence": "sequence_parallel", "slots": "buffer_sharing",
        "snapshots": "checkpoint_snapshots", "spill": "offload_to_disk",
        "state_rooms": "optimizer_host_buffers", "state_slots": "optimizer_device_buffers",
        "states": "optimizer_placement", "tied": "tied_weights", "updates": "optimizer_steps",
        "validate": "norm_check",
    }
)  # fmt: skip

# Instructions in the text form, and the costs that have the same names.
RENAMED_INSTRUCTIONS: Final = MappingProxyType(
    {
        "fetch": "reload_from_disk",
        "fetch_state": "read_state_from_disk",
        "gather": "tp_gather_act",
        "gather_grad": "tp_gather_grad",
        "load_state": "reload_state",
        "reduce_holders": "reduce_replicated_stages",
        "reduce_sequence": "reduce_sequence_parallel_grads",
        "release_grads": "check_grads_finite",
        "scatter": "tp_scatter_act",
        "scatter_grad": "tp_scatter_grad",
        "spill": "offload_to_disk",
        "spill_state": "write_state_to_disk",
        "step_host": "host_step",
        "step_stage": "stage_step",
        "store_state": "offload_state",
        "sum_act": "tp_reduce_act",
        "sum_grad": "tp_reduce_grad",
        "validate": "reduce_norm_after_step",
    }
)
# Costs: those with the name of an instruction, and the others.
RENAMED_COSTS: Final = MappingProxyType(
    {**RENAMED_INSTRUCTIONS, "gather": "tp_gather", "scatter": "tp_scatter", "sum": "tp_reduce"}
)
# Fields of `Sizes`.
RENAMED_SIZES: Final = MappingProxyType(
    {
        "both": "saved_and_deferred", "checkpoint": "recompute_inputs",
        "gradient": "activation_grad", "tape": "deferred_wgrad", "weights": "model_states",
    }
)  # fmt: skip
# Kinds of static buffers in the text form.
RENAMED_BUFFERS: Final = MappingProxyType({"full": "unsharded_params"})

# Fields of a Cluster, and the keys of its file.
RENAMED_CLUSTER_FIELDS: Final = MappingProxyType(
    {
        **{old: f"{old}_bandwidth" for old in ("disk", "dram", "hbm", "host", "network", "nvlink")},
        "sms": "num_sms",
    }
)

# Values of options, by the name of the option.
RENAMED_VALUES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "buffer_sharing": {
            "enough": "latency_preserving", "fewest": "minimal", "own": "none",
        },
        "norm_check": {"after": "after_step", "before": "before_step"},
        "optimizer_placement": {"cpu": "cpu_step"},
        "packing": {"joined": "concatenate", "packed": "best_fit"},
        "progress_model": {
            "device": "per_device", "direction": "per_direction", "edge": "per_edge",
            "pair": "per_pair", "serial": "blocking_serial", "torch": "torch_lazy",
        },
        "rank_order": {"tdp": "tp-dp-pp", "tpd": "tp-pp-dp"},
        "reduce_scatter_at": {"end": "update_end", "turn": "each_backward"},
        "transport": {
            "edge": "nccl_per_edge", "grouped": "nccl_grouped", "shared": "shared_memory",
        },
    }
)  # fmt: skip

# Settings of a configuration, with their sections.
RENAMED_SETTINGS: Final = {
    "data.documents": "data.packing", "data.held_out": "data.validation",
    "memory.folder": "memory.spill_dir", "output.folder": "output.dir",
    "output.replace": "output.overwrite", "pipeline.division": "pipeline.layers_per_stage",
    "train.checkpoint": "train.checkpoint_dir", "train.clip": "train.clip_grad_norm",
    "train.every": "train.checkpoint_every", "train.grace": "train.shutdown_grace",
    "train.keep": "train.checkpoint_keep", "train.nonfinite": "train.on_nonfinite",
    **{
        f"{section}.{old}": f"{section}.{RENAMED_FIELDS[old]}"
        for section, names in {
            "memory": ("active", "ahead", "host_limit", "limit", "spill", "state_rooms",
                       "state_slots", "states"),
            "pipeline": ("chunks", "cut", "delay", "fill", "frozen", "reduce", "sequence",
                         "slots", "updates"),
        }.items()
        for old in names
    },
}  # fmt: skip
# Hints of errors, by the name that the user wrote.  The name is an option (`--count`), a command
# (`schedir best`), or a setting of a configuration (`section.name`).  It may also be a value of a
# setting (`kind = bert`, or the suffix of a file in `source`).  Or it is an option of `compile`,
# which is also a key in the text form (`open`).  The hint names the replacement.
RETIRED_HINTS: Final = MappingProxyType(
    {
        **{f"--{old}": f"--{old} is now --{new}" for old, new in _RENAMED_OPTIONS.items()},
        **{f"schedir {old}": f"it is now schedir {new}" for old, new in _RENAMED_COMMANDS.items()},
        "--ties": "--ties is now -O tied_weights=STAGES",
        **{old: f"it is now {new}" for old, new in {**RENAMED_FIELDS, **RENAMED_SETTINGS}.items()},
        "open": "use one program with more microbatches, which accumulates their gradients",
        "kind = bert": "examples/bert.py trains it with schedir.runtime.Executor",
        "kind = encoder_decoder": "examples/encoder_decoder.py trains it with "
        "schedir.runtime.Executor",
        "tokenizer = bpe": "give the path of a tokenizer.json: the library tokenizers trains one, "
        "and ~/.cache/schedir has those of earlier runs",
        "source = .jsonl": "convert the file with Megatron-LM's tools/preprocess_data.py, which "
        "writes a .bin and an .idx",
    }
)

# Public names by module.
RENAMED_ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
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


def get_current_value(name: str, value: str) -> str:
    """Return the current name of an option's value, from a file that may be older.

    Args:
        name: Name of the option.
        value: The value in the file.

    Returns:
        The current name, or `value` if it was not renamed.
    """
    return RENAMED_VALUES.get(name, {}).get(value, value)


def get_rename_hint(name: str, value: object) -> str:
    """Return a hint with the current name of a value that was renamed, or an empty string.

    Args:
        name: Name of the option.
        value: The value that the user gave.
    """
    new = RENAMED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return f"it is now {new}" if new else ""


def make_attribute_error(module: str, name: str) -> AttributeError | ImportError:
    """Return the error for a name that a module does not have.

    Args:
        module: Name of the module.
        name: The missing name.

    Returns:
        An ImportError with the new name, if the name was renamed: `from module import name`
        replaces the message of an AttributeError.  Otherwise an AttributeError.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if new := RENAMED_ATTRIBUTES.get(module, {}).get(name):
        return ImportError(f"{text}: it is now {new}", name=module)
    return AttributeError(text, name=name)
