"""A text chart for doctests, with one cell per unit of time."""

from __future__ import annotations

import numpy as np

from schedir.compiler.compile import compile
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules.schedule_algebra import Schedule


def draw_timeline(timeline: Timeline) -> str:
    """Return a text chart of the compute lanes of a timeline.

    A cell has the letter and the microbatch of the instruction that starts in it. The number of '
    characters after the microbatch is the local stage. `--` continues the instruction, and `..` is
    idle time. If two instructions run together, the second one begins in the middle of their cells.

    Args:
        timeline: The timeline. A cell is one unit of its time.

    Returns:
        One line per rank.
    """
    shape, spans = timeline.program.shape, timeline.spans
    is_shown = (spans["lane"] == Lane.COMPUTE) & (spans["end"] > spans["start"])
    columns = round(timeline.span)
    cells = np.full((shape.ranks, columns), "..", dtype=object)
    for s, is_second in zip(spans[is_shown], timeline.is_second_of_pair[is_shown], strict=True):
        begin, end = (round(float(s[k] - timeline.start_time)) for k in ("start", "end"))
        begin += is_second * (end - begin) // 2
        cells[s["rank"], begin:end] = "--"
        if begin < columns:
            local_stage = int(shape.local_stage(s["stage"], s["rank"]))
            label = f"{INSTRUCTIONS[s['op']].text}{s['mb']}{local_stage * chr(39)}"
            cells[s["rank"], begin] = label
    width = max(map(len, cells.flat), default=2)
    lines = [
        f"rank {rank}  {' '.join(f'{c:<{width}}' for c in row)}".rstrip()
        for rank, row in enumerate(cells)
    ]
    return "\n".join(lines)


def draw_schedule(
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    placement: Placement = "loop",
    costs: Costs | None = None,
) -> str:
    """Return the text chart of a schedule.

    Args:
        schedule: The schedule.
        ranks: The number of ranks.
        microbatches: The number of microbatches.
        stages_per_rank: The number of stages per rank. None means the default of the schedule.
        placement: The placement.
        costs: The costs. None means the defaults of `Costs`.
    """
    costs = costs or Costs()
    options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    shape = PipelineShape(ranks, microbatches, placement=placement, **options)
    program = compile(schedule, shape, costs=costs)
    return draw_timeline(simulate(program, costs))
