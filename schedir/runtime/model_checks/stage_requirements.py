"""Check that stages and a transport fit a program."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.parameters.buckets import get_expert_slice, is_summed_over_tp
from schedir.runtime.parameters.gradient_buffers import is_tp_sharded
from schedir.transports.transport import Transport


def require_matching_stages(program: Program, rank: int, stages: Mapping[int, nn.Module]) -> None:
    """Check that the stages of a rank fit the program.

    Args:
        program: The program.
        rank: The pipeline rank.
        stages: The stages of the rank, by number.

    Raises:
        ModelError: `stages` are not the rank's stages, a frozen stage has trained parameters, or a
            parameter has a wrong `summed_over_tp`.
    """
    expected_stages = program.shape.stages_on_rank[rank]
    if sorted(stages) != list(expected_stages):
        raise ModelError(
            f"`stages` has {sorted(stages)}, but rank {rank} needs {list(expected_stages)}"
        )
    for s, module in stages.items() if program.has_backward else ():
        trained_names = [name for name, p in module.named_parameters() if p.requires_grad]
        if s < program.frozen_stages and trained_names:
            raise ModelError(
                f"stage {s} is frozen, but its parameter {trained_names[0]} requires a gradient",
                hint=f"stages[{s}].requires_grad_(False), or compile(..., frozen_stages={s})",
            )
        _require_summed_over_tp(program, s, module)


def require_matching_transport(program: Program, transport: Transport) -> None:
    """Check that a transport has as many tensor-parallel ranks and replicas as the program.

    Args:
        program: The program.
        transport: The transport of the rank.

    Raises:
        ModelError: The numbers of tensor-parallel ranks or replicas differ.
    """
    if (program.tp, program.dp) != (transport.tp, transport.dp):
        raise ModelError(
            f"the program has tp {program.tp} and dp {program.dp}, but the transport has "
            f"tp {transport.tp} and dp {transport.dp}"
        )


def require_matching_experts(
    program: Program, transport: Transport, stages: Mapping[int, nn.Module]
) -> None:
    """Check that the experts in the stages belong to this replica.

    Args:
        program: The program.
        transport: The transport of the rank.
        stages: The stages of the rank, by number.

    Raises:
        ModelError: The attribute `expert_slice` of a parameter names the experts of another
            replica, or another size of the expert-parallel group than `program.ep`.
    """
    expected = transport.dp_rank % program.ep, program.ep
    for s, module in stages.items():
        for name, p in module.named_parameters():
            expert_slice = get_expert_slice(p)
            if expert_slice is not None and expert_slice != expected:
                raise ModelError(
                    f"{name} of stage {s} belongs to expert slice {expert_slice[0]} of "
                    f"{expert_slice[1]}, but replica {transport.dp_rank} of a program with "
                    f"ep={program.ep} has slice {expected[0]} of {expected[1]}",
                    hint=f"build_stage(..., ep={expected[1]}, ep_rank={expected[0]})",
                )


def _require_summed_over_tp(program: Program, stage: int, module: nn.Module) -> None:
    """Check that the attribute `summed_over_tp` of parameters fits the program.

    If the program has sequence parallelism, parameters that each tensor-parallel rank has in full
    must have the attribute.
    """
    for name, p in module.named_parameters() if program.tp > 1 else ():
        if not p.requires_grad or (is_tp_sharded(p) and not is_summed_over_tp(p)):
            continue
        is_summed = getattr(p, "summed_over_tp", None)
        if is_summed is True and is_tp_sharded(p):
            raise ModelError(
                f"{name} of stage {stage} has summed_over_tp=True, but each tensor-parallel rank "
                "has a different slice of it",
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


def find_device(stages: Mapping[int, nn.Module]) -> torch.device:
    """Return the device of a rank's parameters, or the CPU if the rank has no parameters.

    Args:
        stages: The local stages by number.

    Raises:
        ModelError: The parameters are on several devices.
    """
    devices = {p.device for stage in stages.values() for p in stage.parameters()}
    if len(devices) > 1:
        raise ModelError(
            "the parameters of a rank must be on one device, not on "
            f"{' and '.join(sorted(map(str, devices)))}"
        )
    return next(iter(devices), torch.device("cpu"))
