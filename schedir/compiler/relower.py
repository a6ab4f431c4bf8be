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
from schedir.ir.program import ATTRIBUTE_FIELDS, JOINED_BIT, Program, Stream
from schedir.passes.pass_registry import LOWERING_PASSES
from schedir.passes.splitting.stage_segmentation import split_like
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import Schedule
from schedir.schedules.schedule_expansion import expand_schedule


def extract_compute(program: Program) -> Program:
    """Return a program's compute as a draft, in each rank's order.

    >>> from schedir import PipelineShape, compile, expand_schedule, schedules
    >>> shape = PipelineShape(ranks=4, microbatches=8)
    >>> extract_compute(compile(schedules.gpipe, shape)) == expand_schedule(schedules.gpipe, shape)
    True
    """
    work = tuple(Stream(s.words[np.isin(s.op, COMPUTE_OPS)]) for s in program.streams)
    return replace(program, streams=work, slots=(), message_order={})


def infer_options(
    program: Program, progress_model: ProgressModel, draft: Program | None = None
) -> dict[str, Any]:
    """Return the options of `compile` with which a program was lowered.

    Only options that leave a trace in the program can be found.  If there is a `expand_schedule`,
    options that do not apply to its traits are left out.
    """
    options: dict[str, Any] = {}
    for each in LOWERING_PASSES:
        if each.applies_to(program if draft is None else draft):
            options |= each.read_options(program, progress_model)
    return options


def adapt_options(options: Mapping[str, Any], shape: PipelineShape) -> dict[str, Any]:
    """Return the options of a program for another shape.

    The shape may have fewer stages on a rank.  `active` is then at most this number.
    """
    own = max(map(len, shape.stages_on_rank))
    return {k: min(v, own) if k == "unsharded_stages" and v else v for k, v in options.items()}


def remove_recompute(draft: Program) -> Program:
    """Return a draft without its recomputations (R).

    An instruction that was joined to the R before it is no longer joined.
    """
    streams = []
    for stream in draft.streams:
        gone, words = stream.op == RECOMPUTE, stream.words.copy()
        words[1:][gone[:-1]] &= ~JOINED_BIT
        streams.append(Stream(words[~gone]))
    return replace(draft, streams=tuple(streams))


def find_matching_schedule(program: Program) -> Schedule | None:
    """Return the built-in schedule of the program's name, if it gives this program."""
    schedule = get_built_in_schedules().get(program.name)
    if schedule is None:
        return None
    try:
        again = split_like(expand_schedule(schedule, program.unsegmented_shape), program)
    except SchedirError:
        return None
    # The costs for which the program was lowered are not known, so only the compute is compared.
    return schedule if again.streams == extract_compute(program).streams else None


class Lowering:
    """Lowers drafts with the options with which a program was lowered."""

    def __init__(self, program: Program, progress_model: ProgressModel) -> None:
        self.reference, self.progress_model = program, progress_model
        self.options = infer_options(program, progress_model)

    def compile_draft(self, draft: Program, costs: Costs | None, **options: Any) -> Program:
        """Compile a draft with the program's options; `options` replaces some of them.

        If the program recomputes and the draft does not, every forward of the draft is recomputed.
        If the program offloads or spills and the draft has another shape, every forward is.
        """
        like = self.reference
        traits = {f.name: getattr(like, f.name) for f in ATTRIBUTE_FIELDS}
        ops = like.used_opcodes - draft.used_opcodes
        again = {"recompute": "all"} if RECOMPUTE in ops else {}
        if draft.shape != like.shape:  # the choice of forwards is for the program's shape only
            again |= {
                name: "all" for name in ("offload", "offload_to_disk") if self.options.get(name)
            }
        if draft.shape.stages != like.shape.stages:
            tied = normalize_tied_stages(
                format_tied_weights(like.tied_weights, like.shape) == "yes", draft.shape
            )
            traits |= {"tied_weights": tied}
            if like.tied_weights and not tied:
                raise ShapeError("of a model that is cut otherwise it is not known what is tied")
            if like.frozen_stages:
                raise ShapeError("of a model that is cut otherwise it is not known what is frozen")
            if like.skips:
                raise ShapeError("of a model that is cut otherwise it is not known what skips what")
        return compile(
            draft,
            progress_model=self.progress_model,
            costs=costs,
            **(traits | adapt_options(self.options, draft.shape) | again | options),
        )
