"""Lower the compute instructions of a program again, with the options of its first lowering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import compile
from schedir.errors import SchedirError, ShapeError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import COMPUTE_OPS, RECOMPUTE
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import format_tied_weights, normalize_tied_stages
from schedir.ir.program import ATTRIBUTE_FIELDS, Program, Stream
from schedir.passes.insertion import drop_instructions
from schedir.passes.pass_registry import LOWERING_PASSES
from schedir.passes.splitting.stage_segmentation import split_like
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import Schedule
from schedir.schedules.schedule_expansion import expand_schedule


def extract_compute(program: Program) -> Program:
    """Return the compute instructions of a program as a draft, in the order of each rank.

    Args:
        program: A lowered program or a draft.

    Returns:
        The draft. It has the attributes of `program`, and no slots.

    Example:
        >>> from schedir import PipelineShape, compile, expand_schedule, schedules
        >>> shape = PipelineShape(ranks=4, microbatches=8)
        >>> draft = expand_schedule(schedules.gpipe, shape)
        >>> extract_compute(compile(schedules.gpipe, shape)) == draft
        True
    """
    streams = tuple(Stream(s.words[np.isin(s.op, COMPUTE_OPS)]) for s in program.streams)
    return replace(program, streams=streams, slots=(), message_order={})


def infer_options(
    program: Program, progress_model: ProgressModel, draft: Program | None = None
) -> dict[str, Any]:
    """Return the options of `compile` with which a program was lowered.

    Only options that have an effect on the program can be inferred.

    Args:
        program: A lowered program.
        progress_model: The progress model for which the program was lowered.
        draft: The draft that you want to lower with the options. Options without an effect on this
            draft are left out. The default is `program`.

    Returns:
        Name of the argument of `compile` -> value.
    """
    options: dict[str, Any] = {}
    for lowering_pass in LOWERING_PASSES:
        if lowering_pass.applies_to(program if draft is None else draft):
            options |= lowering_pass.read_options(program, progress_model)
            if not program.used_opcodes.isdisjoint(lowering_pass.opcodes):
                options |= dict.fromkeys(lowering_pass.option_names, True)
    return options


def adapt_options(options: Mapping[str, Any], shape: PipelineShape) -> dict[str, Any]:
    """Adapt the options of a program to another shape.

    If `unsharded_stages` is larger than the largest number of stages on a rank of the other shape,
    it is reduced to this number.

    Args:
        options: The options that `infer_options` returned.
        shape: The other shape.

    Returns:
        Name of the argument of `compile` -> value.
    """
    max_local_stages = max(map(len, shape.stages_on_rank))
    return {
        k: min(v, max_local_stages) if k == "unsharded_stages" and v else v
        for k, v in options.items()
    }


def remove_recompute(draft: Program) -> Program:
    """Remove the recompute instructions (R) from a draft.

    An instruction that was joined to the R before it is no longer joined.

    Args:
        draft: The draft. It is not changed.

    Returns:
        The new draft.
    """
    return drop_instructions(draft, draft.op == RECOMPUTE)


def find_matching_schedule(program: Program) -> Schedule | None:
    """Return the built-in schedule that has the program's name and gives the same compute order.

    Args:
        program: A lowered program or a draft.

    Returns:
        The schedule function, or None if there is no such schedule or its compute order differs.
    """
    schedule = get_built_in_schedules().get(program.name)
    if schedule is None:
        return None
    try:
        draft = split_like(expand_schedule(schedule, program.unsegmented_shape), program)
    except SchedirError:
        return None
    # The order of messages depends on costs that the program does not contain.  So the test
    # compares the compute instructions only.
    return schedule if draft.streams == extract_compute(program).streams else None


class Lowering:
    """Lowers drafts with the options of a reference program.

    Args:
        program: The reference: a lowered program. Its options are inferred from its instructions.
        progress_model: The progress model for which the reference was lowered.

    Attributes:
        reference: The reference program.
        progress_model: The progress model.
        options: The options of the reference: name of the argument of `compile` -> value.
    """

    def __init__(self, program: Program, progress_model: ProgressModel) -> None:
        self.reference = program
        self.progress_model = progress_model
        self.options = infer_options(program, progress_model)

    def compile_draft(self, draft: Program, costs: Costs | None, **options: Any) -> Program:
        """Compile a draft with the options of the reference program.

        If the reference recomputes and the draft does not, all forwards of the draft are
        recomputed. If the reference offloads activations and the draft has another shape, all
        forwards of the draft are offloaded.

        Args:
            draft: The draft.
            costs: Times of instructions, or None.
            **options: Options of `compile` that replace options of the reference.

        Returns:
            The checked program.

        Raises:
            ShapeError: The draft has another number of stages, and the reference has frozen stages,
                skip connections, or tied weights of other stages than the first and the last.
            SchedirError: See `compile`.
        """
        reference = self.reference
        attributes = {f.name: getattr(reference, f.name) for f in ATTRIBUTE_FIELDS}
        ops = reference.used_opcodes - draft.used_opcodes
        forced_options = {"recompute": "all"} if RECOMPUTE in ops else {}
        # The selection of forwards that the reference offloads is valid only for the reference's
        # shape.
        if draft.shape != reference.shape:
            forced_options |= {
                name: "all" for name in ("offload", "offload_to_disk") if self.options.get(name)
            }
        if draft.shape.stages != reference.shape.stages:
            tied = normalize_tied_stages(
                format_tied_weights(reference.tied_weights, reference.shape) == "yes", draft.shape
            )
            attributes |= {"tied_weights": tied}
            change = f"cannot be converted to {draft.shape.stages} stages"
            if reference.tied_weights and not tied:
                raise ShapeError(f"tied_weights {change}")
            if reference.frozen_stages:
                raise ShapeError(f"frozen_stages {change}")
            if reference.skips:
                raise ShapeError(f"skips {change}")
        return compile(
            draft,
            progress_model=self.progress_model,
            costs=costs,
            **(attributes | adapt_options(self.options, draft.shape) | forced_options | options),
        )
