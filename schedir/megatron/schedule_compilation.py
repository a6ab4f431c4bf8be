"""Compile a schedule for the pipeline of a Megatron run, and refuse what Megatron cannot run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import compile, finish_lowering, require_option_names
from schedir.compiler.evaluation_program import evaluation_program
from schedir.errors import CompletenessError, ShapeError, UsageError, describe
from schedir.io.source_loader import load_source
from schedir.ir.isa.instructions import (
    BACKWARD_INPUT_OPS,
    FORWARD,
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    Instr,
    Opcode,
)
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import Schedule
from schedir.verify.check import check

# Options of `compile` whose values the run of Megatron decides.
_MEGATRON_OPTIONS: Final = ("shape", "ranks", "microbatches", "stages_per_rank", "progress_model")

# Receive -> the send of the message, and the distance of the sender's stage.
_SENDER_OF: Final = {
    Opcode.RecvAct: (Opcode.SendAct, -1),
    Opcode.RecvGrad: (Opcode.SendGrad, 1),
}


@dataclass(frozen=True)
class PipelineSetting:
    """The pipeline of a Megatron run, for which a program is compiled.

    Args:
        ranks: The pipeline-parallel size.
        chunks: The number of model chunks of each rank: the virtual pipeline size, or 1.
        microbatches: The number of microbatches of a step.
        forward_only: True for a program with forwards only, for evaluation.
        variable_seq_lengths: True if microbatches have different lengths, so each activation is
            sent with its shape.
    """

    ranks: int
    chunks: int
    microbatches: int
    forward_only: bool
    variable_seq_lengths: bool = False


def load_schedule(schedule: str | Schedule | Program) -> Schedule | Program:
    """Return the schedule or the program that a user gives.

    Args:
        schedule: The name of a built-in schedule, "FILE.py:FUNCTION", "FILE.sched", a schedule
            function, or a program.

    Raises:
        UsageError: `schedule` is none of these, or the name or the file does not exist.
    """
    if isinstance(schedule, str):
        return load_source(schedule)
    if not callable(schedule) and not isinstance(schedule, Program):
        raise UsageError(
            f"schedule must be a name, a schedule function or a Program, not {describe(schedule)}",
            hint='forward_backward("zb_h1")',
            fields=["schedule"],
        )
    return schedule


def compile_program(
    schedule: Schedule | Program,
    setting: PipelineSetting,
    progress_model: ProgressModel,
    blocking_hosts: bool,
    options: Mapping[str, Any],
    supported_ops: Collection[int],
) -> Program:
    """Compile and check the program that a Megatron run executes.

    Args:
        schedule: The schedule or the program.
        setting: The pipeline of the run.
        progress_model: The progress model of the messages.
        blocking_hosts: True if the host waits for the inputs of each compute, as on CPUs.
        options: Further options of `schedir.compile`, for a schedule or a draft.
        supported_ops: The opcodes that the step can run.

    Raises:
        UsageError: The program does not fit the run, or has instructions that Megatron cannot run.
        SchedirError: The schedule is wrong, or could hang under the progress model.
    """
    program = _lower(schedule, setting, progress_model, options)
    require_runnable(program, setting, supported_ops)
    if setting.forward_only:
        program = evaluation_program(program, progress_model)
    if setting.variable_seq_lengths:
        require_shapes_before_receives(program)
    return check(program, progress_model, blocking_hosts=blocking_hosts)


def require_compile_options(options: Mapping[str, Any]) -> None:
    """Refuse options that `schedir.compile` does not have, or that Megatron decides.

    Args:
        options: The options that the user gives to `forward_backward`.

    Raises:
        UsageError: An option is unknown, or Megatron decides its value.
    """
    if "num_microbatches" in options:
        raise UsageError(
            "num_microbatches cannot be given: Megatron gives it at each step",
            hint="leave out num_microbatches",
            fields=["num_microbatches"],
        )
    require_option_names(options)
    for name in _MEGATRON_OPTIONS:
        if name in options:
            raise UsageError(
                f"{name} cannot be given: it is that of Megatron's run",
                hint=f"leave out {name}",
                fields=[name],
            )


def _lower(
    schedule: Schedule | Program,
    setting: PipelineSetting,
    progress_model: ProgressModel,
    options: Mapping[str, Any],
) -> Program:
    if not isinstance(schedule, Program):
        try:
            return compile(
                schedule,
                ranks=setting.ranks,
                microbatches=setting.microbatches,
                stages_per_rank=setting.chunks,
                progress_model=progress_model,
                **options,
            )
        except (CompletenessError, ShapeError) as error:
            raise UsageError(
                f"the schedule does not run the {setting.chunks} model chunks of each rank: "
                f"{error.fact}",
                program=error.program,
                hint="change Megatron's virtual pipeline size, which is the number of model "
                "chunks, or choose another schedule; a schedule for a vee also needs "
                "schedir.megatron.model_provider",
                fields=["schedule"],
            ) from error
    if schedule.is_draft:
        return compile(schedule, progress_model=progress_model, **options)
    if options:
        raise UsageError(
            f"{', '.join(options)} cannot be applied to a program that is already compiled",
            program=schedule.name,
            hint="pass the options to schedir.compile",
            fields=[*options],
        )
    has_step = not schedule.used_opcodes.isdisjoint(OPTIMIZER_STEP_OPS)
    return schedule if has_step else finish_lowering(schedule)


def require_runnable(
    program: Program, setting: PipelineSetting, supported_ops: Collection[int]
) -> None:
    """Refuse a program that a Megatron run cannot execute.

    Args:
        program: A lowered program of a training step.
        setting: The pipeline of the run.
        supported_ops: The opcodes that the step can run.

    Raises:
        UsageError: The program has a different shape or parallelism than the run. Or it has
            instructions that the step cannot run, or a stage whose forwards are not in ascending
            order of microbatches.
    """
    shape = program.shape
    counts = (shape.ranks, shape.stages_per_rank, shape.microbatches)
    if counts != (setting.ranks, setting.chunks, setting.microbatches):
        raise UsageError(
            f"the program is for {_describe(*counts)}, but the run has "
            f"{_describe(setting.ranks, setting.chunks, setting.microbatches)}",
            program=program.name,
            fields=["program"],
        )
    if (program.tp, program.dp, program.zero) != (1, 1, 0):
        raise UsageError(
            f"the program has tp {program.tp}, dp {program.dp} and zero {program.zero}",
            program=program.name,
            hint="compile it with tp=1, dp=1 and zero=0: Megatron runs its own tensor-parallel and "
            "data-parallel collectives",
            fields=["tp", "dp", "zero"],
        )
    if shape.placement_rows > 1:
        raise UsageError(
            "the schedule puts each stage on several ranks, but Megatron has each on one",
            program=program.name,
            fields=["placement"],
        )
    if shape.optimizer_steps > 1:
        raise UsageError(
            f"the program has {shape.optimizer_steps} optimizer steps, but Megatron's trainer "
            "runs one optimizer step after each call",
            program=program.name,
            fields=["optimizer_steps"],
        )
    if unsupported_ops := sorted({*program.used_opcodes} - {*supported_ops}):
        raise UsageError(
            f"{', '.join(INSTRUCTIONS[op].text for op in unsupported_ops)} cannot run inside "
            "Megatron",
            program=program.name,
            hint="compile the schedule without the option that adds it",
        )
    for rank, stream in enumerate(program.streams):
        next_mb = dict.fromkeys(shape.stages_on_rank[rank], 0)
        for instr in stream:
            if instr.op != FORWARD:
                continue
            stage = int(instr.stage)
            if instr.mb != next_mb[stage]:
                raise UsageError(
                    f"rank {rank} runs the forward of microbatch {instr.mb} of stage {stage} "
                    f"before that of microbatch {next_mb[stage]}, but Megatron's data iterators "
                    "return the microbatches in ascending order",
                    program=program.name,
                    hint="use a schedule that runs the forwards of each stage in ascending order",
                )
            next_mb[stage] += 1


def require_shapes_before_receives(program: Program) -> None:
    """Refuse a program whose hosts could wait for each other for the shapes of messages.

    With `variable_seq_lengths`, the host waits at the receive of an activation until the sender's
    host has run the send, because the shape comes with the send. At the receive of a gradient, the
    host must have run the send of the activation, whose shape the gradient has. This function runs
    the messages of all ranks, and lets a rank wait at each receive until the send has run. No rank
    then waits forever, so both conditions hold.

    Args:
        program: A lowered program.

    Raises:
        UsageError: A rank waits forever for a shape.
    """
    streams = [[*stream] for stream in program.streams]
    next_index = [0] * len(streams)
    sent: set[tuple[int, int, int]] = set()
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, stream in enumerate(streams):
            for instr in stream[next_index[rank] :]:
                if instr.op in _SENDER_OF and _find_send(instr) not in sent:
                    break
                sent.add((instr.op, instr.stage, instr.mb))
                next_index[rank] += 1
                has_progress = True
    for rank, stream in enumerate(streams):
        if next_index[rank] < len(stream):
            raise UsageError(
                f"variable_seq_lengths=True is not supported for this program: rank {rank} waits "
                f"at {stream[next_index[rank]]} for a shape, and the rank that sends the shape "
                "waits for another one",
                program=program.name,
                hint="use a schedule that starts each receive after the send of the message, such "
                "as all built-in ones",
                fields=["variable_seq_lengths"],
            )


def _find_send(receive: Instr) -> tuple[int, int, int]:
    """Return the opcode, the stage and the microbatch of the send of a receive."""
    op, distance = _SENDER_OF[receive.op]
    return op, receive.stage + distance, receive.mb


def has_split_backward(program: Program) -> bool:
    """Return whether a program splits at least one backward into I and W.

    Args:
        program: The program.
    """
    return not program.used_opcodes.isdisjoint(BACKWARD_INPUT_OPS)


def _describe(ranks: int, chunks: int, microbatches: int) -> str:
    return f"{ranks} ranks with {chunks} stages each and {microbatches} microbatches"
