"""Compare the programs, stages and options of processes before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from schedir.ir.program import Program
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable
from schedir.runtime.model_checks.tied_weight_requirements import (
    ParameterFingerprint,
    StageFingerprints,
    fingerprint_parameters,
)
from schedir.runtime.parameters.buckets import describe_slice, is_expert, is_summed_over_tp
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike
from schedir.runtime.rank_resources import RankOptions
from schedir.transports.transport import Transport, require_all_processes


def compare_processes(
    programs: Sequence[tuple[Program, BoundaryTable]],
    stages: Mapping[int, nn.Module],
    transport: Transport,
    optimizer: OptimizerLike | None,
    options: RankOptions,
) -> list[StageFingerprints]:
    """Compare the programs, stages and options of all processes.

    All processes must call this function.

    Args:
        programs: The programs of the executor, with their boundaries.
        stages: The stages of the rank, by number.
        transport: The transport of the rank.
        optimizer: The optimizer, or None.
        options: The options of the rank.

    Returns:
        The parameter fingerprints of each process that has the same tensor-parallel rank as this
        process.

    Raises:
        ModelError: The processes differ.
    """
    (program, boundaries), *extra_programs = programs
    fingerprints = fingerprint_parameters(stages, optimizer) if program.has_backward else {}
    facts = collect_facts(program, stages, transport, fingerprints) | {
        "the boundary": str(boundaries),
        "the loss scale": str(options.gradients.loss_scale),
        "the seed": str(options.seed),
    }
    facts["the extra programs"] = "; ".join(
        f"{extra_program.name} ({extra_program.digest[:12]}), boundary {extra_boundaries}"
        for extra_program, extra_boundaries in extra_programs
    )
    if program.clip_grad_norm:
        facts["max_norm"] = repr(options.gradients.norm_limit)
    with require_all_processes("an Executor", program.name):
        reports = transport.check_agreement(
            facts, (transport.tp_rank, fingerprints), record_types=[ParameterFingerprint]
        )
    return [
        rank_fingerprints for tp_rank, rank_fingerprints in reports if tp_rank == transport.tp_rank
    ]


def collect_facts(
    program: Program,
    stages: Mapping[int, nn.Module],
    transport: Transport,
    fingerprints: Mapping[int, Sequence[ParameterFingerprint]],
) -> dict[str, str]:
    """Return the facts about stages and optimizer that processes compare, by name.

    Facts of the same name must be equal in all processes. Most names contain the stage and the
    tensor-parallel rank, so that only processes with the same slice of a stage compare the fact.
    Names of facts about experts also contain the slice of experts.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        transport: The transport of the rank.
        fingerprints: The fingerprints of each stage's parameters.
    """
    facts: dict[str, str] = {}
    tp_rank = transport.tp_rank
    for s, module in stages.items():
        # The description of an expert's slice also names the experts, so it sorts last, and `max`
        # selects it.
        slices = [f"slice {tp_rank}", *(describe_slice(p, tp_rank) for p in module.parameters())]
        facts |= _describe_parameters(module, f"stage {s}, {max(slices)}")
        shapes = [_describe_shape(p) for p in module.parameters() if is_expert(p)]
        # Ranks of an expert-parallel group exchange rows for these experts, so shapes must be
        # equal.
        if shapes:
            facts[f"the shapes of the experts in stage {s}, slice {tp_rank}"] = ", ".join(shapes)
        summed_parameters = [
            f"{name} {_describe_shape(p)}"
            for name, p in module.named_parameters()
            if is_summed_over_tp(p)
        ]
        if transport.tp > 1:
            facts[f"the parameters that tensor-parallel ranks sum in stage {s}"] = (
                ", ".join(summed_parameters) or "nothing"
            )
        if program.trained_ties and (weight := getattr(module, "tied_weight", None)) is not None:
            facts[f"the tied weight, slice {transport.tp_rank}"] = _describe_shape(weight)
    for s, parameters in fingerprints.items():
        for p in parameters:
            slice_text = describe_slice(stages[s].get_parameter(p.names[0]), tp_rank)
            label = f"{p.names[0]} in stage {s}, {slice_text}"
            facts[f"the values of {label}"] = p.values_digest
            if p.optimizer_options:
                facts[f"the optimizer's options for {label}"] = p.optimizer_options
    return facts


def _describe_parameters(module: nn.Module, location: str) -> dict[str, str]:
    """Return facts: the number of trained elements, and each trained parameter's name and shape."""
    counts: Counter[str] = Counter()
    facts = {}
    trained_parameters = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for k, (name, p) in enumerate(trained_parameters):
        counts[_describe_types(p)] += p.numel()
        facts[f"parameter {k} of {location}"] = f"{name} {_describe_shape(p)}"
    total = " and ".join(f"{n} of {kind}" for kind, n in counts.items()) or "nothing"
    return facts | {f"the parameters of {location}": total}


def _describe_shape(p: nn.Parameter) -> str:
    return f"{list(p.shape)} of {_describe_types(p)}"


def _describe_types(p: nn.Parameter) -> str:
    return f"{p.dtype}, gradients in {p.grad_dtype or p.dtype}"
