"""Simulate a program: the longest path through its dependency graph is its time."""

from __future__ import annotations

from schedir.analysis.critical_path.longest_path import Times, compute_earliest_times
from schedir.analysis.deadlock import explain_deadlock
from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import SIZES_EXAMPLE, lower
from schedir.errors import CostsError, require_bool, require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.program import Program
from schedir.predict.timeline import MAX_TIME, Timeline, build_spans
from schedir.verify.check import build_complete_graph, check_draft, prove


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    progress_model: ProgressModel = "per_device",
    blocking_hosts: bool = False,
    sizes: Sizes | None = None,
    skip_checks: bool = False,
) -> Timeline:
    """The Timeline that a program will have at the given costs under a progress model.

    Every instruction starts as soon as its queue, its values and its partners let it.  Of a
    draft it is the program that `compile` makes of it for this model, in the order of these
    costs.  `blocking_hosts` says that hosts wait themselves, as on CPUs (`Graph`): then a message
    waits for the computes before it in its Stream.  With `sizes`, memory is told in bytes.

    Raises what `check` raises for a program that is wrong, and CostsError if the costs add up to
    more than 1e300.  A program that `check` has proven is not looked at again.  With `skip_checks`
    it need only be complete and finish: what it computes may be wrong.

    >>> from schedir import Costs, PipelineShape, compile, schedules, simulate
    >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=4, microbatches=8))
    >>> simulate(program, Costs(F=1, B=2))
    <predicted Timeline of one_f_one_b: span 33, bubble 27.3%>
    >>> simulate(program, Costs(F=1, B=2, send=0.25), progress_model="per_edge").span
    37.0
    """
    require_type(program, Program, "schedir.compile(schedule, shape)")
    blocking_hosts, skip_checks = (
        require_bool(blocking_hosts, "blocking_hosts"),
        require_bool(skip_checks, "skip_checks"),
    )
    if costs is not None:
        require_type(costs, Costs, "Costs(F=1, B=2)")
    if sizes is not None:
        require_type(sizes, Sizes, SIZES_EXAMPLE)
        sizes.validate(program.shape)
    if program.is_draft and (program.has_backward or program.shape.ranks > 1):  # else it is whole
        program = lower(check_draft(program), costs, progress_model)
    graph = build_complete_graph(program, progress_model, blocking_hosts=blocking_hosts)
    reached = compute_earliest_times(graph, costs)
    if not skip_checks:
        prove(graph, reached)
    elif not reached.is_done.all():
        raise explain_deadlock(graph, reached)
    require_representable(reached.end, program)
    start, end = reached.start, reached.end
    del graph, reached  # makes room for the spans
    spans = build_spans(program, start, end)
    return Timeline(
        program, spans, progress_model=progress_model, sizes=sizes, blocking_hosts=blocking_hosts
    )


def require_representable(end: Times, program: Program) -> None:
    """Raise CostsError if an instruction ends later than `MAX_TIME`, the latest time of a Timeline.

    Args:
        end: The end time of each instruction.
        program: The program of these instructions.

    Raises:
        CostsError: A time is later than `MAX_TIME`, infinite or NaN.
    """
    if not end.max(initial=0.0) <= MAX_TIME:  # also where it is NaN
        raise CostsError(
            f"the costs add up to more than {MAX_TIME:g}, the latest time of a Timeline",
            program=program.name,
            hint="give all costs in a larger unit",
        )
