"""Suggest schedir's present name for a retired name or for a name of another library.

A name belongs to an option, a setting, a field, an argument or a function. Each table of this
module maps an old name to its present name, or to a hint. `docs/decisions/deleted-features.md`
explains the deleted features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, NoReturn

from schedir.other_libraries import OTHER_INSTRUCTION_NAMES, OTHER_NAMES

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
    "time": "time-range", "whole": "no-split-backward",
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
# Costs. Most of them have the name of an instruction.
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

# Name of an option -> old value -> present value.
RENAMED_VALUES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "buffer_sharing": {
            "enough": "latency_preserving", "fewest": "minimal", "own": "none",
        },
        "norm_check": {"after": "after_step", "before": "before_step"},
        "objective": {"own": "active_span"},
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
# Name that the user wrote -> hint with its replacement.  The name is an option of the command line
# (`--count`), a command (`schedir best`), or a setting of a configuration (`section.name`).  It may
# also be a value of a setting (`kind = bert`, or the suffix of a file in `source`).  Or it is an
# option of `compile`, which is also a key in the text form (`open`).
RETIRED_HINTS: Final = MappingProxyType(
    {
        **{f"--{old}": f"--{old} is now --{new}" for old, new in _RENAMED_OPTIONS.items()},
        **{f"schedir {old}": f"it is now schedir {new}" for old, new in _RENAMED_COMMANDS.items()},
        "--ties": "--ties is now -O tied_weights=STAGES",
        **dict.fromkeys(
            ("--explain-start", "--why"),
            "schedir draw -o FILE.html writes a page that shows what each instruction waits for",
        ),
        **{old: f"it is now {new}" for old, new in {**RENAMED_FIELDS, **RENAMED_SETTINGS}.items()},
        "open": "use one program with more microbatches, which accumulates their gradients",
        "kind = bert": "examples/bert.py trains it with schedir.runtime.Executor",
        "kind = encoder_decoder": "examples/encoder_decoder.py trains it with "
        "schedir.runtime.Executor",
        "tokenizer = bpe": "give the path of a tokenizer.json: the library tokenizers trains one, "
        "and ~/.cache/schedir has those of earlier runs",
        "train.optimizer": "schedir train uses AdamW; schedir.runtime.Executor takes any optimizer",
        "source = .jsonl": "convert the file with Megatron-LM's tools/preprocess_data.py, which "
        "writes a .bin and an .idx",
    }
)

# Arguments of Python functions.  An argument that several functions had may have several present
# names, separated by spaces.
_RENAMED_ARGUMENTS: Final = MappingProxyType(
    {
        "about": "comment", "adds": "accumulate_grads", "alike": "allow_identical_stages",
        "axis": "axis_label", "b": "microbatch_size", "c": "cp", "choice": "plan",
        "code": "allow_code", "colours": "colors",
        "copies": "parameter_copies", "cut": "segments", "d": "dp", "e": "ep", "each": "values",
        "evaluations": "max_evaluations", "exact": "bitwise closed_form_only",
        "examples": "max_examples",
        "extra": "extra_state", "folder": "directory spill_dir", "grad": "requires_grad",
        "in_flight": "max_in_flight", "instructions": "max_instructions",
        "layers_of": "layers_per_stage", "late": "defer_weights", "lead": "warmup",
        "limits": "memory_limits", "m": "microbatches",
        "message": "max_message_bytes", "microbatch": "microbatch_size",
        "models": "progress_models", "more": "extra_programs", "most": "max_instructions",
        "names": "name_map", "numbers": "parameter_counts", "order": "rank_order message_order",
        "others": "other_rank_stages", "p": "pp", "plans": "shapes", "prefer": "priority",
        "prove": "bound", "record": "record_timestamps", "scale": "grad_scale",
        "seconds": "time_limit", "split": "split_backward",
        "start": "initial_schedules start_method",
        "state": "optimizer_state", "states": "optimizer_placement state_bytes", "t": "tp",
        "taken": "received_shape", "time": "time_range", "unchecked": "skip_checks",
        "v": "stages_per_rank",
    }
)  # fmt: skip
# Arguments of executors that moved into an options object or were removed -> what to write instead.
_MOVED_ARGUMENTS: Final = MappingProxyType(
    {
        **{
            old: f"gradients=GradientOptions({old}=...)"
            for old in ("max_norm", "loss_scale", "accumulate_grads")
        },
        **{
            old: f"execution=ExecutionOptions({old}=...)"
            for old in ("record_timestamps", "debug", "spill_dir", "allow_identical_stages")
        },
        "other_rank_stages": "stages=[...], with all stages of the model in order",
        "parameter_copies": "stages=[...] of an InProcessExecutor, which copies shared Parameters",
    }
)


def find_present_name(name: str, known_names: Iterable[str]) -> str:
    """Return the present name of an argument or an option, or an empty string.

    Args:
        name: The name that the user gave: a retired name, or a name from another library.
        known_names: The function's arguments, or the command's options.

    Example:
        >>> find_present_name("updates", ["ranks", "optimizer_steps"])
        'optimizer_steps'
        >>> find_present_name("num_microbatches", ["ranks", "microbatches"])
        'microbatches'
    """
    tables = (RENAMED_FIELDS, RENAMED_COSTS, RENAMED_SIZES, RENAMED_CLUSTER_FIELDS,
              _RENAMED_ARGUMENTS, OTHER_NAMES)  # fmt: skip
    known = {*known_names}
    present_names = (new for table in tables for new in table.get(name, "").split() if new in known)
    return next(present_names, "")


def find_similar_name(name: str, known_names: Iterable[str]) -> str:
    """Return the present name of an argument or an option, or the most similar name, or "".

    Args:
        name: The name that the user gave.
        known_names: The function's arguments, or the command's options.

    Example:
        >>> find_similar_name("tensor_parallel", ["tp", "sequence_parallel"])
        'tp'
        >>> find_similar_name("sequence_paralel", ["tp", "sequence_parallel"])
        'sequence_parallel'
    """
    known = [*known_names]
    # A name of another library without a counterpart here is not a misspelling.
    close_names = [] if name in OTHER_NAMES else get_close_matches(name, known, 1)
    return find_present_name(name, known) or next(iter(close_names), "")


def suggest_instruction(name: str, known_names: Iterable[str]) -> str:
    """Return the name of the instruction that a user probably means, or an empty string.

    Args:
        name: The name that the user gave, such as a name of another library.
        known_names: The names of all instructions.

    Example:
        >>> suggest_instruction("send_forward", ["send_act", "send_grad"])
        'send_act'
        >>> suggest_instruction("send_grads", ["send_act", "send_grad"])
        'send_grad'
    """
    other = OTHER_INSTRUCTION_NAMES.get(name.lower(), "")
    return other or next(iter(get_close_matches(name, [*known_names], 1)), "")


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Return a hint with the right name of an argument or an option, or an empty string.

    Args:
        name: The name that the user gave.
        known_names: The function's arguments, or the command's options.

    Example:
        >>> suggest_name("updates", ["ranks", "optimizer_steps"])
        'it is now optimizer_steps'
        >>> suggest_name("num_ranks", ["ranks", "optimizer_steps"])
        "did you mean 'ranks'?"
        >>> suggest_name("debug", ["program", "execution"])
        'it is now execution=ExecutionOptions(debug=...)'
    """
    known = [*known_names]
    present = find_present_name(name, known)
    if present and name not in OTHER_NAMES:
        return f"it is now {present}"
    for candidate in (name, *_RENAMED_ARGUMENTS.get(name, "").split()):
        moved = _MOVED_ARGUMENTS.get(candidate, "")
        if moved.partition("=")[0] in known:
            return f"it is now {moved}"
    match = find_similar_name(name, known)
    return f"did you mean {match!r}?" if match else ""


# Module -> old public name -> present name.
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
# Name that a user may try -> expression that works.
_EXECUTOR_ATTRIBUTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("run", "train", "train_step", "forward"), "executor.step(inputs, targets)"),
    **dict.fromkeys(("zero_grad", "backward"), "executor.step, which includes this"),
    "clip_grad_norm_": "compile(..., clip_grad_norm=True)",
    **dict.fromkeys(
        ("save", "state_dict"), "schedir.checkpoints.save(executor, directory, step=1)"
    ),
    **dict.fromkeys(("load", "load_state_dict"), "schedir.checkpoints.load(executor, directory)"),
    "eval": "executor.evaluate(inputs, targets)",
    "parameters": "the parameters of the stages",
}
# Module or class -> name that a user may try -> expression that works.
OTHER_ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "schedir": {
            **{
                name: f"schedir.{module}.{name}"
                for module, names in {
                    "checkpoints": "Saver save load",
                    "planner": "ParallelPlan TransformerSpec cluster_preset load_model plan",
                    "runtime": "Boundary Executor GlooTransport InProcessExecutor "
                    "SharedMemoryTransport infer_boundaries measure_sizes nccl_transport",
                    "testing": "assert_same_gradients assert_schedule",
                    "viz": "gantt html idle_map save_html text_chart",
                }.items()
                for name in names.split()
            },
            "load": "schedir.load_timeline(path) for a FILE.timeline, "
            "schedir.from_text(Path(path).read_text()) for a FILE.sched, or "
            "schedir.checkpoints.load for a checkpoint",
            "save": "schedir.save_timeline(timeline, path), "
            "Path(path).write_text(schedir.to_text(program)), or schedir.checkpoints.save for a "
            "checkpoint",
            "draw": "schedir.viz.gantt", "plot": "schedir.viz.gantt", "Shape": "PipelineShape",
            "compare": "schedir.viz.compare for a picture, or the command schedir compare",
            "explain": "the command schedir explain", "recommend": "the command schedir recommend",
            "diagnose": "the command schedir diagnose",
            "Schedule": "schedir.torch_pipelining.Schedule, or a function that schedir.compile "
            "takes",
            "Pipeline": "schedir.runtime.Executor", "Trainer": "schedir.runtime.Executor",
            "train": "schedir.runtime.Executor, or the command schedir train",
            "run": "schedir.runtime.Executor",
        },
        "Timeline": {
            **dict.fromkeys(
                ("makespan", "total_time", "duration", "step_time", "time"), "timeline.span"
            ),
            **dict.fromkeys(("bubble_ratio", "bubble_fraction", "bubble_rate"), "timeline.bubble"),
            **dict.fromkeys(("peak", "memory_peak"), "timeline.peak_memory"),
            **dict.fromkeys(("draw", "plot", "gantt", "show"), "schedir.viz.gantt(timeline)"),
            "save": "schedir.save_timeline(timeline, path)", "instructions": "timeline.spans",
            "ranks": "timeline.program.shape.ranks", "shape": "timeline.program.shape",
        },
        "Program": {
            **{
                name: f"program.shape.{name}"
                for name in ("ranks", "microbatches", "stages_per_rank", "stages", "placement",
                             "optimizer_steps", "weight_delay", "sequence_chunks")
            },
            **dict.fromkeys(("instructions", "actions", "schedule"), "program.streams"),
            **dict.fromkeys(("text", "to_text"), "schedir.to_text(program)"),
            "save": "Path(path).write_text(schedir.to_text(program))",
            "check": "schedir.check(program)", "simulate": "schedir.simulate(program)",
            "draw": "schedir.viz.gantt(schedir.simulate(program))",
        },
        "PipelineShape": {
            **dict.fromkeys(("num_stages", "n_stages"), "shape.stages"),
            **dict.fromkeys(("num_microbatches", "n_microbatches"), "shape.microbatches"),
            "num_ranks": "shape.ranks",
        },
        "Executor": _EXECUTOR_ATTRIBUTES,
        "InProcessExecutor": _EXECUTOR_ATTRIBUTES,
    }
)  # fmt: skip


def get_current_value(name: str, value: str) -> str:
    """Return the current name of an option's value in a file, which may be of an older version.

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
    new_name = RENAMED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return f"it is now {new_name}" if new_name else ""


def make_attribute_error(module: str, name: str) -> AttributeError | ImportError:
    """Return the error for a name that a module does not have.

    Args:
        module: Name of the module.
        name: The missing name.

    Returns:
        An ImportError with the right name, if the name was renamed or is in another place.  The
        error is no AttributeError, because `from module import name` would replace the message of
        an AttributeError.  For all other names, an AttributeError, with a similar name of the
        module if there is one.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if new_name := RENAMED_ATTRIBUTES.get(module, {}).get(name):
        return ImportError(f"{text}: it is now {new_name}", name=module)
    if hint := OTHER_ATTRIBUTES.get(module, {}).get(name):
        return ImportError(f"{text}: use {hint}", name=module)
    matches = get_close_matches(name, getattr(sys.modules.get(module), "__all__", ()), 1)
    return AttributeError(text + (f": did you mean {matches[0]}?" if matches else ""), name=name)


def raise_attribute_error(self: object, name: str) -> NoReturn:
    """Raise the error for an attribute that an object lacks. Classes use it as `__getattr__`.

    Args:
        self: The object.
        name: The attribute.

    Raises:
        AttributeError: Always. The message suggests the present name or a similar one, if there is
            one.
    """
    kind = type(self).__name__
    if hasattr(type(self), name):  # A property raised the AttributeError: raise it again.
        object.__getattribute__(self, name)
    own_names = [] if name.startswith("_") else dir(self)
    match = find_present_name(name, own_names) or next(
        iter(get_close_matches(name, own_names, 1)), ""
    )
    hint = f": did you mean {match}?" if match else ""
    if other := OTHER_ATTRIBUTES.get(kind, {}).get(name):
        hint = f": use {other}"
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=self)
