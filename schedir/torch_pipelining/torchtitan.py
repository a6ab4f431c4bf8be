"""Make torchtitan's trainer run a schedule of schedir."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any, Final

from torch.distributed.pipelining import schedules as theirs

from schedir.errors import UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.autograd.splittable_layers import SplitLinear
from schedir.schedules.schedule_algebra import Schedule as ScheduleFunction
from schedir.schedules.schedule_algebra import apply_schedule_defaults
from schedir.torch_pipelining.program_selection import ProgramSource, load_schedule_or_program
from schedir.torch_pipelining.schedule import Schedule

# The versions of torchtitan that this patch was written for.
KNOWN_VERSIONS: Final = ("0.2.1", "0.2.2", "0.3.0")
# torchtitan places the stages of this schedule in a vee, and logs the losses of rank 0.
VEE_NAME: Final = "ZBVZeroBubble"


def patch_torchtitan(
    schedule: ScheduleFunction | str | None = None,
    *,
    program: ProgramSource | None = None,
    **options: Any,
) -> type[Schedule]:
    """Make torchtitan's trainer run a schedule of schedir instead of torch's.

    Call this function on every rank before torchtitan builds its trainer. The call replaces the
    function by which `torchtitan.distributed.pipeline_parallel` finds a schedule class. The trainer
    then creates the stages that the schedule needs: one or several per rank, in a loop or in a vee.
    A later call replaces the schedule of an earlier one.

    torchtitan logs the losses of the rank that its option `pipeline_parallel_schedule` implies. For
    a vee, the option must be "ZBVZeroBubble". For any other placement, it must be another name.

    Args:
        schedule: A schedule, its name, or a "file.py:function", as in `Schedule`.
        program: A Program, or the path of a .sched or .csv file, instead of `schedule`.
        **options: Other keywords of `Schedule`, such as `runtime`.

    Returns:
        The class that torchtitan uses: `Schedule` with these keywords as defaults.

    Raises:
        UsageError: This version of torchtitan is not known, or torchtitan cannot place the stages.

    Example:
        At the top of a script that runs torchtitan's trainer::

            schedir.torch_pipelining.patch_torchtitan("zb_h1")
    """
    pipeline_parallel = _import_pipeline_parallel()
    source = load_schedule_or_program(schedule, program)
    shape = _get_shape(source)
    is_vee = shape.placement == "vee" and shape.stages_per_rank == 2
    if not is_vee and shape.placement != "loop":
        raise UsageError(
            "torchtitan places stages in a loop, or two per rank in a vee, but the schedule "
            f"needs placement {shape.placement!r} with {shape.stages_per_rank_text}",
            hint="patch_torchtitan('zb_v'), or another schedule with placement loop or vee",
            fields=["schedule" if program is None else "program"],
        )
    source_option = {"schedule": schedule} if program is None else {"program": program}
    replacement = Schedule.with_options(**source_option, **options)
    if shape.stages_per_rank == 1:
        # torchtitan makes one stage per rank for subclasses of PipelineScheduleSingle, and several
        # for all other classes.
        theirs.PipelineScheduleSingle.register(replacement)

    def get_schedule_class(name: str) -> type[Schedule]:
        if (name == VEE_NAME) != is_vee:
            raise UsageError(
                f"the schedule has its stages in {'a vee' if is_vee else 'a loop'}, but "
                f"pipeline_parallel_schedule is {name!r}: torchtitan would log the losses of the "
                "wrong rank",
                hint=f"--parallelism.pipeline_parallel_schedule {VEE_NAME if is_vee else '1F1B'}",
            )
        return replacement

    pipeline_parallel.get_schedule_class = get_schedule_class
    vee = replacement if is_vee else theirs.ScheduleZBVZeroBubble
    pipeline_parallel.ScheduleZBVZeroBubble = vee
    if options.get("runtime") == "schedir" and metadata.version("torchtitan") == KNOWN_VERSIONS[-1]:
        # Models of this version store the `forward` of each Linear when they are built, before the
        # executor could replace it. So the class gets the splittable forward now.
        linear = import_module("torchtitan.models.common.linear")
        linear.Linear.forward = SplitLinear.forward
    return replacement


def _import_pipeline_parallel() -> Any:
    """Return torchtitan's module that chooses the schedule class."""
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        version = "not installed"
    if version not in KNOWN_VERSIONS:
        raise UsageError(
            f"torchtitan is {version}, but schedir supports versions {', '.join(KNOWN_VERSIONS)}",
            hint=f"pip install torchtitan=={KNOWN_VERSIONS[-1]}",
        )
    return import_module("torchtitan.distributed.pipeline_parallel")


def _get_shape(source: ScheduleFunction | Program) -> PipelineShape:
    """Return the shape of a program, or a shape with the placement that a schedule needs."""
    if isinstance(source, Program):
        return source.shape
    return apply_schedule_defaults(source, PipelineShape(ranks=2, microbatches=2))
