"""Hypothesis strategies for shapes, drafts and programs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from schedir.compiler.compile import lower
from schedir.errors import ShapeError
from schedir.ir.isa.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instr
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import TiedStages, normalize_tied_stages
from schedir.ir.program import Program, Stream
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.schedules.schedule_algebra import Schedule, get_placement_mark, has_free_v

_F, _B = FORWARD, BACKWARD
_I, _W = BACKWARD_INPUT, BACKWARD_WEIGHT
PLACEMENT_KINDS = ("loop", "vee", "mirror", "given", "rows")


def shapes_for(
    schedule: Schedule, ranks: int = 4, microbatches: int = 6, stages_per_rank: int = 3
) -> list[PipelineShape]:
    """Return all shapes up to some sizes that a schedule can take, smaller ones first.

    The placement and the stages per rank are those of `with_placement`.  A schedule without this
    mark gets the placement "loop".  It gets several stages per rank only if it has a parameter `v`.

    Args:
        schedule: The schedule.
        ranks: The largest number of ranks.
        microbatches: The largest number of microbatches.
        stages_per_rank: The largest number of stages per rank, if the schedule does not fix it.

    Returns:
        The shapes, in ascending order of ranks, then microbatches, then stages per rank.

    Example:
        >>> from schedir.testing import shapes_for
        >>> for shape in shapes_for(
        ...     lambda rank, ranks, microbatches: None, ranks=2, microbatches=2
        ... ):
        ...     print(shape)
        PipelineShape(ranks=1, microbatches=1)
        PipelineShape(ranks=1, microbatches=2)
        PipelineShape(ranks=2, microbatches=1)
        PipelineShape(ranks=2, microbatches=2)
    """
    placement, v = get_placement_mark(schedule)
    if placement is None:
        placement, v = "loop", None if has_free_v(schedule) else 1
    stage_counts = [v] if v else range(1, stages_per_rank + 1)
    result: dict[PipelineShape, None] = {}
    for shape in product(range(1, ranks + 1), range(1, microbatches + 1), stage_counts):
        with suppress(ShapeError):  # such as a mirror of an odd number of ranks
            result[PipelineShape(*shape, placement)] = None
    return [*result]


@st.composite
def shapes(
    draw: st.DrawFn,
    ranks: int = 4,
    microbatches: int = 6,
    stages_per_rank: int = 3,
    placements: Sequence[str] = PLACEMENT_KINDS,
) -> PipelineShape:
    """Draw a small shape.

    Args:
        draw: Passed by hypothesis.
        ranks: The largest number of ranks.
        microbatches: The largest number of microbatches.
        stages_per_rank: The largest number of stages per rank.  With the placements "given" and
            "rows" it is the largest average over the ranks.
        placements: The kinds of placement to draw from.  "loop", "vee" and "mirror" are those of
            `PipelineShape`.  "given" is any list with one rank for each stage.  "rows" is any
            placement with two or three replicas of each stage, also an uneven one.  "vee" needs
            `stages_per_rank` of 2 or more.  "mirror" and "rows" also need 2 ranks and 2
            microbatches.

    Returns:
        The shape.

    Example:
        >>> from hypothesis import given
        >>> from schedir.testing import shapes
        >>> @given(shapes(ranks=2, microbatches=4))
        ... def every_stage_has_a_rank(shape):
        ...     placed = [stage for stages in shape.stages_on_rank for stage in stages]
        ...     assert {*placed} == {*range(shape.stages)}
        >>> every_stage_has_a_rank()
    """
    has_several_stages = stages_per_rank > 1
    allows_replicas = min(ranks, microbatches) > 1 and has_several_stages
    is_possible = {"vee": has_several_stages, "mirror": allows_replicas, "rows": allows_replicas}
    kind = draw(st.sampled_from([kind for kind in placements if is_possible.get(kind, True)]))
    if kind == "mirror":
        P = 2 * draw(st.integers(1, ranks // 2))
        return PipelineShape(P, draw(st.integers(2, microbatches)), placement=kind)
    if kind == "rows":
        return _draw_replicated_shape(draw, ranks, microbatches, stages_per_rank)
    P = draw(st.integers(1, ranks))
    m = draw(st.integers(1, microbatches))
    if kind == "given":
        others = draw(st.lists(st.integers(0, P - 1), max_size=P * (stages_per_rank - 1)))
        return PipelineShape(P, m, placement=tuple(draw(st.permutations([*range(P), *others]))))
    fewest = 2 if kind == "vee" else 1
    return PipelineShape(P, m, draw(st.integers(fewest, stages_per_rank)), kind)


def _draw_replicated_shape(
    draw: st.DrawFn, ranks: int, microbatches: int, stages_per_rank: int
) -> PipelineShape:
    """Draw a shape with two or three replicas of each stage, and no rank without a stage."""
    rows = draw(st.integers(2, min(3, ranks, microbatches)))
    stage = st.permutations(range(ranks)).map(lambda order: order[:rows])
    most = max(ranks * stages_per_rank // rows, 1)
    ranks_by_stage = draw(st.lists(stage, min_size=1, max_size=most))
    used_ranks = sorted({rank for replica_ranks in ranks_by_stage for rank in replica_ranks})
    placement = tuple(
        zip(
            *(
                [used_ranks.index(rank) for rank in replica_ranks]
                for replica_ranks in ranks_by_stage
            ),
            strict=True,
        )
    )
    return PipelineShape(
        len(used_ranks), draw(st.integers(rows, microbatches)), placement=placement
    )


@st.composite
def compute_programs(
    draw: st.DrawFn,
    ranks: int = 4,
    microbatches: int = 6,
    stages_per_rank: int = 3,
    split: float = 0.5,
    placements: Sequence[str] = PLACEMENT_KINDS,
) -> Program:
    """Draw a complete draft on a small shape.

    Without stage replicas, each stage runs its backwards in ascending order of microbatches.

    Args:
        draw: Passed by hypothesis.
        ranks: As for `shapes`.
        microbatches: As for `shapes`.
        stages_per_rank: As for `shapes`.
        split: The share of backwards that are split into I and W, from 0 to 1.
        placements: As for `shapes`.

    Returns:
        The draft.

    Example:
        >>> import schedir
        >>> from hypothesis import given
        >>> from schedir.testing import compute_programs
        >>> @given(compute_programs(ranks=2, microbatches=3))
        ... def every_draft_compiles(draft):
        ...     schedir.check(schedir.compile(draft))
        >>> every_draft_compiles()
    """
    shape = draw(shapes(ranks, microbatches, stages_per_rank, placements))
    return random_compute_program(
        shape, random.Random(draw(st.integers(0, 2**32 - 1))), split=split
    )


@st.composite
def programs(
    draw: st.DrawFn, ranks: int = 4, microbatches: int = 6, stages_per_rank: int = 3
) -> Program:
    """Draw a program that is legal under every progress model, with various attributes.

    The attributes are the tensor-parallel size, tied weights, gradient clipping and frozen stages.
    Opposite transfers are grouped in some of the programs.

    Args:
        draw: Passed by hypothesis.
        ranks: As for `shapes`.
        microbatches: As for `shapes`.
        stages_per_rank: As for `shapes`.

    Returns:
        The lowered program.

    Example:
        >>> import schedir
        >>> from hypothesis import given
        >>> from schedir.testing import programs
        >>> @given(programs(ranks=2, microbatches=3))
        ... def what_prints_parses(program):
        ...     assert schedir.from_text(schedir.to_text(program)) == program
        >>> what_prints_parses()
    """
    draft = draw(compute_programs(ranks, microbatches, stages_per_rank))
    clip, grouped = draw(st.booleans()), draw(st.booleans())
    tied, frozen = draw(tied_weights(draft.shape)), draw(st.integers(0, draft.shape.stages - 1))
    if any(stages[0] < frozen <= stages[-1] for stages in tied):
        frozen = 0
    tp = draw(st.integers(1, 2))
    program = lower(
        replace(draft, tp=tp, tied_weights=tied, clip_grad_norm=clip, frozen_stages=frozen)
    )
    return group_opposite_transfers(program) if grouped else program


def tied_weights(shape: PipelineShape) -> st.SearchStrategy[TiedStages]:
    """Return a strategy of the stages that share weights in a shape.

    It draws no tied weights, a weight of the first and the last stage, or up to two sets of stages.

    Args:
        shape: The shape.

    Returns:
        The strategy.  Its values are accepted by the `tied_weights` of `compile`.

    Example:
        >>> from hypothesis import given
        >>> import schedir
        >>> from schedir.testing import tied_weights
        >>> shape = schedir.PipelineShape(ranks=3, microbatches=2)
        >>> @given(tied_weights(shape))
        ... def any_ties_compile(tied):
        ...     schedir.compile(schedir.schedules.gpipe, shape, tied_weights=tied)
        >>> any_ties_compile()
    """
    if shape.stages == 1:
        return st.just(())
    stages = st.sets(st.integers(0, shape.stages - 1), min_size=2)
    any_sets = st.lists(stages.map(sorted), min_size=1, max_size=2)
    return st.one_of(st.booleans(), any_sets).map(lambda tied: normalize_tied_stages(tied, shape))


def random_compute_program(
    shape: PipelineShape, rng: random.Random, *, split: float = 0.5
) -> Program:
    """Return a draft in the order of a random execution.

    Each replica of a stage runs its backwards in ascending order of microbatches.

    Args:
        shape: The shape.
        rng: The source of random numbers.
        split: The share of backwards that are split into I and W, from 0 to 1.

    Returns:
        The draft, which is complete and can be lowered.

    Example:
        >>> import random
        >>> from schedir import PipelineShape
        >>> from schedir.testing import random_compute_program
        >>> shape = PipelineShape(ranks=2, microbatches=4)
        >>> random_compute_program(shape, random.Random(0), split=0.0)
        <draft random: 2 ranks, 16 instructions>
    """
    S, m = shape.stages, shape.microbatches
    streams: list[list[Instr]] = [[] for _ in range(shape.ranks)]
    ready = [Instr(_F, 0, mb) for mb in range(m)]
    backward = {(s, mb): _I if rng.random() < split else _B for s in range(S) for mb in range(m)}
    arrived_gradients: set[tuple[int, int]] = set()  # (stage, mb) whose output gradient has arrived
    # By row of stage replicas and by stage: the microbatch whose backward is next.
    next_backward = [[begin] * S for begin in shape.microbatch_row_offsets[:-1]]
    # By row and by stage: the microbatches with an I and no W yet.
    waiting_weights: list[list[list[int]]] = [[[] for _ in range(S)] for _ in next_backward]

    def offer(stage: int, row: int) -> None:
        """Add the next backward of a stage if it can run; a full backward waits for all W."""
        mb = next_backward[row][stage]
        if (stage, mb) in arrived_gradients and (
            backward[stage, mb] is _I or not waiting_weights[row][stage]
        ):
            arrived_gradients.remove((stage, mb))
            ready.append(Instr(backward[stage, mb], stage, mb))

    while ready:
        instr = ready.pop(rng.randrange(len(ready)))
        op, s, mb = instr
        row = int(shape.replica_row_of_microbatch(mb))
        next_mb, waiting = next_backward[row], waiting_weights[row]
        streams[int(shape.rank_of_stage(s, mb))].append(instr)
        if op is _F and s + 1 < S:
            ready.append(Instr(_F, s + 1, mb))
        elif op is _F:
            arrived_gradients.add((s, mb))
        elif op is _W:
            waiting[s].remove(mb)
            if waiting[s]:
                ready.append(Instr(_W, s, waiting[s][0]))
        else:
            next_mb[s] += 1
            if op is _I:
                waiting[s].append(mb)
                if len(waiting[s]) == 1:
                    ready.append(Instr(_W, s, mb))
            if s:
                arrived_gradients.add((s - 1, mb))
                offer(s - 1, row)
        offer(s, row)
    return Program("random", shape, tuple(map(Stream.from_instructions, streams)))
