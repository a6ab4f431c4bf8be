"""Simulate a program: its time is the longest path through its dependency graph."""

from __future__ import annotations

from schedir.analysis.critical_path.longest_path import Times, compute_earliest_times
from schedir.analysis.deadlock import explain_deadlock
from schedir.analysis.progress_models import ProgressModel
from schedir.call_errors import explain_wrong_calls
from schedir.compiler.compile import SIZES_EXAMPLE, compile, lower
from schedir.errors import CostsError, UsageError, require_bool, require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.placement import Placement
from schedir.ir.program import Program
from schedir.predict.timeline import MAX_TIME, Timeline, build_spans
from schedir.schedules import find_schedule
from schedir.schedules.schedule_algebra import Schedule
from schedir.verify.check import build_complete_graph, check_draft, prove


@explain_wrong_calls("simulate(program, Costs(F=1, B=2))")
def simulate(
    program: str | Schedule | Program,
    costs: Costs | None = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    placement: Placement | None = None,
    progress_model: ProgressModel = "per_device",
    blocking_hosts: bool = False,
    sizes: Sizes | None = None,
    skip_checks: bool = False,
) -> Timeline:
    """Predict the Timeline of a program from the costs of its instructions.

    Each instruction starts as soon as its queue is free, its inputs exist, and its partners are
    ready.

    Args:
        program: A program, a schedule function, or the name of a built-in schedule. A draft or a
            schedule is compiled first, for this progress model and these costs. The messages of a
            program keep their order. For the best order, pass the same costs to `compile`.
        costs: The cost of each instruction. The default is `Costs()`.
        ranks: Number of pipeline ranks. A schedule needs `ranks` and `microbatches`.
        microbatches: Number of microbatches.
        stages_per_rank: Number of stages on each rank. See `compile`.
        placement: The rank of each stage. See `compile`.
        progress_model: The progress model of the transport.
        blocking_hosts: True if hosts are blocking, as on CPUs. Then a message waits for the
            computes before it in its Stream.
        sizes: The sizes of values. With sizes, the memory of the Timeline is in bytes.
        skip_checks: True to skip the checks of the order of values, slots and messages. The program
            must still be complete and free of deadlocks.

    Raises:
        SchedirError: `check` refuses the program. A program that `check` has proven is not checked
            again.
        CostsError: The costs add up to more than `MAX_TIME`, 1e300.
        UsageError: An argument has the wrong type, or the sizes do not match the program.

    Example:
        >>> from schedir import Costs, PipelineShape, compile, schedules, simulate
        >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=4, microbatches=8))
        >>> simulate(program, Costs(F=1, B=2))
        <predicted Timeline of one_f_one_b: span 33, bubble 27.3%>
        >>> simulate(program, Costs(F=1, B=2, send=0.25), progress_model="per_edge").span
        37.0
        >>> simulate("zb_h1", Costs(F=1, B=2), ranks=4, microbatches=8).span
        27.0
    """
    shape = {
        "ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank,
        "placement": placement,
    }  # fmt: skip
    given_names = [name for name, value in shape.items() if value is not None]
    if isinstance(program, Program) and given_names:
        raise UsageError(
            f"{', '.join(given_names)} cannot be applied to a program, which has its own shape",
            program=program.name,
            fields=given_names,
        )
    if isinstance(program, str):
        program = find_schedule(program)
    if callable(program):
        if not given_names:
            raise UsageError(
                "simulate needs ranks and microbatches for this schedule",
                hint="simulate(schedule, costs, ranks=4, microbatches=8)",
                fields=["ranks", "microbatches"],
            )
        program = compile(
            program, costs=costs, progress_model=progress_model, blocking_hosts=blocking_hosts,
            **shape,  # type: ignore[arg-type]
        )  # fmt: skip
    require_type(program, "program", Program, 'simulate("zb_h1", ranks=4, microbatches=8)')
    assert isinstance(program, Program)
    blocking_hosts = require_bool(blocking_hosts, "blocking_hosts")
    skip_checks = require_bool(skip_checks, "skip_checks")
    if costs is not None:
        require_type(costs, "costs", Costs, "Costs(F=1, B=2)")
    if sizes is not None:
        require_type(sizes, "sizes", Sizes, SIZES_EXAMPLE)
        sizes.validate(program.shape)
    # A draft of one rank without backwards needs no further instructions.
    if program.is_draft and (program.has_backward or program.shape.ranks > 1):
        program = lower(check_draft(program), costs, progress_model)
    graph = build_complete_graph(program, progress_model, blocking_hosts=blocking_hosts)
    reached = compute_earliest_times(graph, costs)
    if not skip_checks:
        prove(graph, reached)
    elif not reached.is_done.all():
        raise explain_deadlock(graph, reached)
    require_representable(reached.end, program)
    start, end = reached.start, reached.end
    del graph, reached  # frees memory for the spans
    spans = build_spans(program, start, end)
    return Timeline(
        program, spans, progress_model=progress_model, sizes=sizes, blocking_hosts=blocking_hosts
    )


def require_representable(end: Times, program: Program) -> None:
    """Refuse times that are later than `MAX_TIME`, the latest time of a Timeline.

    Args:
        end: The end time of each instruction.
        program: The program of these instructions.

    Raises:
        CostsError: A time is later than `MAX_TIME`, infinite or NaN.
    """
    if not end.max(initial=0.0) <= MAX_TIME:  # the comparison is also False for NaN
        raise CostsError(
            f"the costs add up to more than {MAX_TIME:g}, the largest time of a Timeline",
            program=program.name,
            hint="give all costs in a larger unit",
        )
