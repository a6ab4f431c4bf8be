"""Find the program that a `Schedule` runs: load or compile it for the stages of the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import compile, finish_lowering
from schedir.errors import UsageError, describe
from schedir.io import torch_csv
from schedir.io.files import read_text
from schedir.io.source_loader import load_source
from schedir.ir.isa.instructions import OPTIMIZER_STEP_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.stage_segments import has_collectives
from schedir.ir.pipeline.tied_weights import TiedStages
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import Schedule
from schedir.transports.process_groups import get_backend_name, get_nccl_progress_model

ProgramSource = Program | str | os.PathLike[str]
EXAMPLE = "schedule='zb_v', or program=schedir.compile(schedule, shape)"


def load_schedule_or_program(
    schedule: Schedule | str | None, program: ProgramSource | None
) -> Schedule | Program:
    """Return the schedule or the Program that the user gives; a Program may be a draft.

    Args:
        schedule: A schedule, its name, or a "file.py:function", or None.
        program: A Program, or the path of a .sched or .csv file, or None.

    Raises:
        UsageError: Both arguments are None, neither is None, or one has the wrong type.
        SchedirError: The file does not contain a valid program.
    """
    if (schedule is None) == (program is None):
        count_text = "both are" if schedule is not None else "none is"
        raise UsageError(
            f"give exactly one of schedule and program: {count_text} given",
            hint=EXAMPLE,
            fields=["schedule", "program"],
        )
    if schedule is not None:
        source = load_source(schedule) if isinstance(schedule, str) else schedule
        if not callable(source) and not isinstance(source, Program):
            raise UsageError(
                f"schedule must be a function or its name, not {describe(schedule)}",
                hint=EXAMPLE,
                fields=["schedule"],
            )
        return source
    if isinstance(program, str | os.PathLike):
        path = os.fspath(program)
        if path.endswith(".csv"):
            return torch_csv.from_csv(read_text(path), name=Path(path).stem)
        if path.endswith(".sched"):
            return load_source(path)
    if not isinstance(program, Program):
        raise UsageError(
            "program must be a Program, or the path of a .sched or .csv file, not "
            f"{describe(program)}",
            hint=EXAMPLE,
            fields=["program"],
        )
    return program


def compile_for_stages(
    source: Schedule | Program, shape: PipelineShape, tied_weights: TiedStages
) -> Program:
    """Return the program for stages of a given shape.

    Args:
        source: A schedule or a Program.
        shape: The shape of the stages of all ranks.
        tied_weights: The stages of each tied weight. This argument is ignored if `source` is a
            Program with tied weights.

    Raises:
        UsageError: The Program has a different shape, has a ZeRO level, or has collectives between
            segments.
        SchedirError: The schedule does not compile.
    """
    if not isinstance(source, Program):
        return compile(source, shape, tied_weights=tied_weights)
    program_shape = source.shape
    layout = (
        program_shape.ranks,
        program_shape.microbatches,
        program_shape.replica_ranks.tolist(),
    )
    if layout != (shape.ranks, shape.microbatches, shape.replica_ranks.tolist()):
        raise UsageError(
            f"the program is for {_describe_shape(program_shape)}, but the ranks have "
            f"{_describe_shape(shape)}",
            program=source.name,
            fields=["program"],
        )
    if source.zero:
        raise UsageError(
            f"the program has zero {source.zero}, but Schedule shards stages by fully_shard only",
            program=source.name,
            hint="compile it with zero=0, and apply fully_shard to the modules of the stages",
            fields=["program"],
        )
    if has_collectives(source.segment_boundaries):
        raise UsageError(
            "the program has collectives between the segments of a stage, which Schedule does not "
            "run",
            program=source.name,
            hint="run it with schedir.runtime.Executor",
            fields=["program"],
        )
    if source.is_draft:
        return compile(source, tied_weights=source.tied_weights or tied_weights)
    # A CSV file may have transfers, but has no optimizer step and no reductions of tied weights.
    if not source.used_opcodes.isdisjoint(OPTIMIZER_STEP_OPS):
        return source
    return finish_lowering(replace(source, tied_weights=source.tied_weights or tied_weights))


def _describe_shape(shape: PipelineShape) -> str:
    rank_stages = "; ".join(
        f"rank {rank}: {', '.join(map(str, stages))}"
        for rank, stages in enumerate(shape.stages_on_rank)
    )
    return f"{shape.stages} stages, {shape.microbatches} microbatches ({rank_stages})"


# ------------------------------------------------------------ stages of ranks


def infer_shape(
    stages_of_ranks: Sequence[Sequence[int]], stages: int, microbatches: int
) -> PipelineShape:
    """Return the pipeline shape for the stages of each rank.

    Args:
        stages_of_ranks: The stages of each rank.
        stages: The number of stages.
        microbatches: The number of microbatches.

    Raises:
        UsageError: A stage is on no rank, on two ranks, or twice on a rank.
    """
    rank_of: dict[int, int] = {}
    for rank, rank_stages in enumerate(stages_of_ranks):
        for s in rank_stages:
            if s in rank_of:
                raise UsageError(
                    f"stage {s} must be on one rank, not on {rank_of[s]} and {rank}"
                    if rank_of[s] != rank
                    else f"stage {s} is twice in the stages of rank {rank}",
                    fields=["stages"],
                )
            rank_of[s] = rank
    if missing_stages := [s for s in range(stages) if s not in rank_of]:
        raise UsageError(
            f"num_stages is {stages}, but no rank has stage {missing_stages[0]}", fields=["stages"]
        )
    return torch_csv.find_shape(
        len(stages_of_ranks), microbatches, [rank_of[s] for s in range(stages)]
    )


def get_progress_model(group: Any, device: torch.device) -> tuple[ProgressModel, bool]:
    """Return the progress model of torch's runtime on a group, and whether hosts are blocking.

    torch's runtime posts each message by a separate isend or irecv (`_batch_p2p` in its
    schedules.py). The model follows from the backend:

    - NCCL: Each pair of ranks has a communicator for its messages ("torch_lazy"). If the group is
      bound to a device, all messages use the communicator of the group ("per_device").
    - Gloo: Activations and gradients from one rank to another have the same tag, so Gloo matches
      them in the order of posting. "per_pair" has this rule. This model is stricter than Gloo, in
      which the two directions of a pair do not wait for each other.
    - Any other backend: "blocking_serial", which makes no assumption.

    Args:
        group: The process group of the pipeline.
        device: The device of the stages.

    Returns:
        The progress model, and True if hosts are blocking.
    """
    name = get_backend_name(group, device)
    if name == "gloo":
        return "per_pair", True
    if name == "nccl":
        return get_nccl_progress_model(group), device.type == "cpu"
    return "blocking_serial", True


def get_process_group(stage: Any) -> Any:
    """Return the process group of a stage.

    Args:
        stage: A stage of torch.
    """
    return stage.group if stage.group is not None else dist.group.WORLD
