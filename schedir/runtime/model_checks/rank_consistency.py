"""Check that processes agree on a program and its options before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from schedir.errors import ModelError
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.memory_overlap import require_no_views
from schedir.runtime.model_checks.parameter_guard import require_no_max_norm, require_stepped_stages
from schedir.runtime.model_checks.sharding_requirements import require_shardable
from schedir.runtime.parameters.buckets import is_summed_over_tp
from schedir.runtime.parameters.gradient_buffers import is_tp_sharded
from schedir.runtime.parameters.mixed_precision import LossScale, MainOptimizer, OptimizerLike
from schedir.runtime.parameters.optimistic_step import require_known_optimizer
from schedir.runtime.parameters.tied_parameters import (
    ParameterFingerprint,
    TiedWeight,
    fingerprint_parameters,
    list_local_tied_weights,
)
from schedir.runtime.rank_resources import RankOptions
from schedir.transports.transport import Transport
from schedir.verify.check import check


def check_rank_agreement(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    transport: Transport,
    boundary_table: BoundaryTable,
    optimizer: OptimizerLike | None,
    options: RankOptions,
    tied: TiedWeights | None,
    extra_programs: Sequence[tuple[Program, BoundaryTable]] = (),
) -> list[TiedWeight]:
    """Compare the programs, stages and options of all processes.

    All processes must call this.

    Args:
        program: The program.
        rank: The pipeline rank.
        stages: The stages of the rank, by number.
        transport: The transport of the rank.
        boundary_table: The boundaries of the program.
        optimizer: The optimizer, or None.
        options: The options of the rank.
        tied: The tied weights that the user gives, or None.
        extra_programs: Other programs of the executor, with their boundaries.

    Returns:
        The tied weights with copies on this rank. The list is empty if the program has no backward.

    Raises:
        ModelError: The processes differ, the program would hang with this transport, or the stages,
            the optimizer and the options do not fit the program.
    """
    fingerprints = fingerprint_parameters(stages, optimizer) if program.has_backward else {}
    facts = collect_facts(program, stages, transport, fingerprints) | {
        "the boundary": str(boundary_table),
        "the loss scale": str(options.gradients.loss_scale),
        "the seed": str(options.seed),
    }
    facts["the extra programs"] = "; ".join(
        f"{one.name} ({one.digest[:12]}), boundary {passes}" for one, passes in extra_programs
    )
    if program.clip_grad_norm:
        facts["max_norm"] = repr(options.gradients.norm_limit)
    everyone = transport.check_agreement(
        facts, (transport.tp_rank, fingerprints), record_types=[ParameterFingerprint]
    )
    for one in (program, *(one for one, _ in extra_programs)):
        check(one, transport.progress_model, blocking_hosts=transport.blocking_hosts)
    for one, passes in extra_programs:
        passes.require_program_fit(one)
        if options.gradients.accumulate_grads:
            raise ModelError(
                "accumulate_grads is True, but the executor has extra_programs",
                program=one.name,
            )
    require_program_match(program, rank, stages, transport, boundary_table)
    accumulates, loss_scale = options.gradients.accumulate_grads, options.gradients.loss_scale
    require_shardable(program, stages, optimizer, accumulate_grads=accumulates)
    require_steppable(program, stages, optimizer, loss_scale, accumulate_grads=accumulates)
    if not program.has_backward:
        return []
    rank_fingerprints = [
        fingerprints for tp_rank, fingerprints in everyone if tp_rank == transport.tp_rank
    ]
    weights = list_local_tied_weights(
        program, stages, rank_fingerprints, tied,
        allow_identical_stages=options.execution.allow_identical_stages,
    )  # fmt: skip
    require_no_max_norm(program, stages, weights)
    return weights


def collect_facts(
    program: Program,
    stages: Mapping[int, nn.Module],
    transport: Transport,
    fingerprints: Mapping[int, Sequence[ParameterFingerprint]],
) -> dict[str, str]:
    """Return the facts about stages and optimizer that must be equal on all processes, by name.

    Most names contain the stage and the tensor-parallel rank. Such facts are compared only between
    processes with the same slice of a stage.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        transport: The transport of the rank.
        fingerprints: The fingerprints of each stage's parameters.
    """
    facts: dict[str, str] = {}
    for s, module in stages.items():
        facts |= _describe_parameters(module, f"stage {s}, slice {transport.tp_rank}")
        summed = [
            f"{name} {_describe_shape(p)}"
            for name, p in module.named_parameters()
            if is_summed_over_tp(p)
        ]
        if transport.tp > 1:
            facts[f"the parameters that tensor-parallel ranks sum in stage {s}"] = (
                ", ".join(summed) or "nothing"
            )
        if program.trained_ties and (weight := getattr(module, "tied_weight", None)) is not None:
            facts[f"the tied weight, slice {transport.tp_rank}"] = _describe_shape(weight)
    for s, parameters in fingerprints.items():
        for p in parameters:
            label = f"{p.names[0]} in stage {s}, slice {transport.tp_rank}"
            facts[f"the values of {label}"] = p.values_digest
            if p.optimizer_options:
                facts[f"the optimizer's options for {label}"] = p.optimizer_options
    return facts


def _describe_parameters(module: nn.Module, location: str) -> dict[str, str]:
    """Return the number of trained parameters, and the name and shape of each one, as facts."""
    counts: Counter[str] = Counter()
    facts = {}
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for k, (name, p) in enumerate(trained):
        counts[_describe_types(p)] += p.numel()
        facts[f"parameter {k} of {location}"] = f"{name} {_describe_shape(p)}"
    total = " and ".join(f"{n} of {kind}" for kind, n in counts.items()) or "nothing"
    return facts | {f"the parameters of {location}": total}


def _describe_shape(p: nn.Parameter) -> str:
    return f"{list(p.shape)} of {_describe_types(p)}"


def _describe_types(p: nn.Parameter) -> str:
    return f"{p.dtype}, gradients in {p.grad_dtype or p.dtype}"


def require_steppable(
    program: Program,
    stages: Mapping[int, nn.Module],
    optimizer: OptimizerLike | None,
    loss_scale: LossScale | None,
    *,
    accumulate_grads: bool,
) -> None:
    """Refuse an optimizer and options that cannot step the program correctly.

    Args:
        program: The program.
        stages: The stages of the rank, by number.
        optimizer: The optimizer, or None.
        loss_scale: The loss scale, or None.
        accumulate_grads: True if gradients are added to those of earlier steps.

    Raises:
        ModelError: An update could not be made again, or the loss scale could not be updated. Or
            weights have views that would lack a delay. Or the optimizer has a weight twice, or no
            weight of the stages. Or the executor would change accumulated gradients.
    """
    if program.norm_check == "after_step" and program.has_backward:
        _require_repeatable(program, stages, optimizer)
    if loss_scale is not None:
        _require_scalable(program)
    if program.has_backward and np.any(program.shape.weight_delay):
        require_no_views(stages, program.name)
    _require_no_duplicates(optimizer, program)
    require_stepped_stages(program, stages, optimizer)
    if accumulate_grads:
        _require_accumulation_only(program, optimizer)


def _require_scalable(program: Program) -> None:
    """Refuse a loss scale for a program without gradient norm, or with several updates."""
    if not program.clip_grad_norm:
        raise ModelError(
            "a loss scale needs the norm of the gradients, but the program does not compute it",
            program=program.name,
            hint="compile(..., clip_grad_norm=True); max_norm=math.inf clips nothing",
        )
    if program.shape.optimizer_steps > 1:
        raise ModelError(
            "a loss scale needs a program with one update per step, but this one has "
            f"{program.shape.optimizer_steps}",
            program=program.name,
        )


def _require_repeatable(
    program: Program, stages: Mapping[int, nn.Module], optimizer: OptimizerLike | None
) -> None:
    """Refuse an optimizer whose update could not be made again."""
    require_known_optimizer(optimizer, program.name)
    trains = any(p.requires_grad for module in stages.values() for p in module.parameters())
    if optimizer is None and trains:
        raise ModelError(
            "norm_check is 'after_step', so the executor may have to repeat an update, but this "
            "rank has no optimizer",
            program=program.name,
            hint="pass optimizer=..., or compile(..., norm_check='before_step')",
        )


def _require_accumulation_only(program: Program, optimizer: OptimizerLike | None) -> None:
    """Refuse accumulated gradients if the executor reduces, clips or steps them."""
    uses = {
        "sums gradients over replicas": program.dp > 1,
        "sums gradients over stage replicas": program.shape.placement_rows > 1
        and program.has_backward,
        "sums gradients over tensor-parallel ranks": program.sequence_parallel,
        "makes several updates": program.shape.optimizer_steps > 1,
        "computes the norm of the gradients": program.clip_grad_norm,
        "steps an optimizer": optimizer is not None,
    }
    if fact := next((what for what, it in uses.items() if it), ""):
        raise ModelError(
            f"accumulate_grads is True, but the executor {fact}",
            program=program.name,
            hint="set accumulate_grads=False: each step then has its own gradients",
        )


def _require_no_duplicates(optimizer: OptimizerLike | None, program: Program) -> None:
    """Refuse an optimizer that would step one weight twice."""
    keys: set[object] = set()
    # The 16-bit parameters of a MainOptimizer are checked, too: main parameters are separate
    # copies.
    rounded = [{"params": optimizer.parameters}] if isinstance(optimizer, MainOptimizer) else []
    for group in (*rounded, *getattr(optimizer, "param_groups", ())):
        for p in group["params"]:
            key = (p.data_ptr(), p.shape, p.stride()) if p.numel() and not p.is_meta else id(p)
            if key in keys:
                raise ModelError(
                    f"the optimizer has a weight of shape {list(p.shape)} twice",
                    program=program.name,
                    hint="remove duplicates: [*dict.fromkeys(parameters)]",
                )
            keys.add(key)


def _require_summed_over_tp(program: Program, stage: int, module: nn.Module) -> None:
    """Check that `summed_over_tp` of parameters fits the program.

    Full parameters must have the attribute if the program has sequence parallelism.
    """
    for name, p in module.named_parameters() if program.tp > 1 else ():
        if not p.requires_grad or (is_tp_sharded(p) and not is_summed_over_tp(p)):
            continue
        is_summed = getattr(p, "summed_over_tp", None)
        if is_summed is True and is_tp_sharded(p):
            raise ModelError(
                f"{name} of stage {stage} has summed_over_tp=True, but each tensor-parallel rank "
                "has another slice of it",
                program=program.name,
            )
        if is_summed is True and not program.sequence_parallel:
            raise ModelError(
                f"{name} of stage {stage} has summed_over_tp=True, but the program has "
                "sequence_parallel=False",
                program=program.name,
                hint="compile(..., sequence_parallel=True), or a model in which each "
                "rank gets the full sequence",
            )
        if is_summed is None and program.sequence_parallel:
            raise ModelError(
                "the program has sequence_parallel=True, but the full parameter "
                f"{name} of stage {stage} has no attribute summed_over_tp",
                program=program.name,
                hint=f"set {name}.summed_over_tp to True if each rank uses it for a part of the "
                "sequence, or to False if each rank uses it for the full sequence",
            )


def require_program_match(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    transport: Transport,
    boundary_table: BoundaryTable,
) -> None:
    """Refuse stages and a transport that do not fit the program.

    Args:
        program: The program.
        rank: The pipeline rank.
        stages: The stages of the rank, by number.
        transport: The transport of the rank.
        boundary_table: The boundaries of the program.

    Raises:
        ModelError: The rank has other stages, the transport other sizes, a frozen stage trained
            parameters, a parameter a wrong `summed_over_tp`, or a boundary does not fit.
    """
    expected_stages = program.shape.stages_on_rank[rank]

    def refuse(fact: str, hint: str = "") -> None:
        raise ModelError(fact, program=program.name, hint=hint)

    if sorted(stages) != list(expected_stages):
        refuse(f"`stages` has {sorted(stages)}, but rank {rank} has {list(expected_stages)}")
    if (program.tp, program.dp) != (transport.tp, transport.dp):
        refuse(
            f"the program has tp {program.tp} and dp {program.dp}, but the transport has "
            f"tp {transport.tp} and dp {transport.dp}"
        )
    for s, module in stages.items():
        learns = [name for name, p in module.named_parameters() if p.requires_grad]
        if program.has_backward and s < program.frozen_stages and learns:
            refuse(
                f"stage {s} is frozen, but its parameter {learns[0]} requires a gradient",
                f"stages[{s}].requires_grad_(False), or compile(..., frozen_stages={s})",
            )
        if program.has_backward:
            _require_summed_over_tp(program, s, module)
    boundary_table.require_program_fit(program)
