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
from schedir.ir.isa.instructions import COMPUTE, RECOMPUTE
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import show_tied, tied_stages
from schedir.ir.program import JOINED, TRAITS, Program, Stream
from schedir.passes.pass_registry import LOWERING
from schedir.passes.splitting.stage_segmentation import cut_like
from schedir.schedules import built_in
from schedir.schedules.schedule_algebra import Schedule
from schedir.schedules.schedule_expansion import expand_schedule


def compute_of(program: Program) -> Program:
    """Return a program's compute as a draft, in each rank's order.

    >>> from schedir import PipelineShape, compile, expand_schedule, schedules
    >>> shape = PipelineShape(ranks=4, microbatches=8)
    >>> compute_of(compile(schedules.gpipe, shape)) == expand_schedule(schedules.gpipe, shape)
    True
    """
    work = tuple(Stream(s.words[np.isin(s.op, COMPUTE)]) for s in program.streams)
    return replace(program, streams=work, slots=(), order={})


def options_of(
    program: Program, progress_model: ProgressModel, draft: Program | None = None
) -> dict[str, Any]:
    """Return the options of `compile` with which a program was lowered.

    Only options that leave a trace in the program can be found.  If there is a `expand_schedule`,
    options that do not apply to its traits are left out.
    """
    options: dict[str, Any] = {}
    for each in LOWERING:
        if each.applies(program if draft is None else draft):
            options |= each.read(program, progress_model)
    return options


def fitting(options: Mapping[str, Any], shape: PipelineShape) -> dict[str, Any]:
    """Return the options of a program for another shape.

    The shape may have fewer stages on a rank.  `active` is then at most this number.
    """
    own = max(map(len, shape.stages_of))
    return {k: min(v, own) if k == "unsharded_stages" and v else v for k, v in options.items()}


def without_recompute(draft: Program) -> Program:
    """Return a draft without its recomputations (R).

    An instruction that was joined to the R before it is no longer joined.
    """
    streams = []
    for stream in draft.streams:
        gone, words = stream.op == RECOMPUTE, stream.words.copy()
        words[1:][gone[:-1]] &= ~JOINED
        streams.append(Stream(words[~gone]))
    return replace(draft, streams=tuple(streams))


def built_in_schedule_of(program: Program) -> Schedule | None:
    """Return the built-in schedule of the program's name, if it gives this program."""
    schedule = built_in().get(program.name)
    if schedule is None:
        return None
    try:
        again = cut_like(expand_schedule(schedule, program.whole), program)
    except SchedirError:
        return None
    # The costs for which the program was lowered are not known, so only the compute is compared.
    return schedule if again.streams == compute_of(program).streams else None


class Lowering:
    """Lowers drafts with the options with which a program was lowered."""

    def __init__(self, program: Program, progress_model: ProgressModel) -> None:
        self.like, self.progress_model = program, progress_model
        self.options = options_of(program, progress_model)

    def of(self, drafted: Program, costs: Costs | None, **options: Any) -> Program:
        """Compile a draft with the program's options; `options` replaces some of them.

        If the program recomputes and the draft does not, every forward of the draft is recomputed.
        If the program offloads or spills and the draft has another shape, every forward is.
        """
        like = self.like
        traits = {f.name: getattr(like, f.name) for f in TRAITS}
        ops = like.ops - drafted.ops
        again = {"recompute": "all"} if RECOMPUTE in ops else {}
        if drafted.shape != like.shape:  # the choice of forwards is for the program's shape only
            again |= {
                name: "all" for name in ("offload", "offload_to_disk") if self.options.get(name)
            }
        if drafted.shape.stages != like.shape.stages:
            tied = tied_stages(show_tied(like.tied_weights, like.shape) == "yes", drafted.shape)
            traits |= {"tied_weights": tied}
            if like.tied_weights and not tied:
                raise ShapeError("of a model that is cut otherwise it is not known what is tied")
            if like.frozen_stages:
                raise ShapeError("of a model that is cut otherwise it is not known what is frozen")
            if like.skips:
                raise ShapeError("of a model that is cut otherwise it is not known what skips what")
        return compile(
            drafted,
            progress_model=self.progress_model,
            costs=costs,
            **(traits | fitting(self.options, drafted.shape) | again | options),
        )
