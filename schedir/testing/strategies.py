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
    """All shapes up to these sizes of the kind that a schedule is written for, smaller ones first.

    As its mark says (`with_placement`); else any stages per rank if it takes `v`, or one.

    >>> from schedir.testing import shapes_for
    >>> for shape in shapes_for(lambda rank, ranks, microbatches: None, ranks=2, microbatches=2):
    ...     print(shape)
    PipelineShape(ranks=1, microbatches=1)
    PipelineShape(ranks=1, microbatches=2)
    PipelineShape(ranks=2, microbatches=1)
    PipelineShape(ranks=2, microbatches=2)
    """
    placement, v = get_placement_mark(schedule)
    if placement is None:
        placement, v = "loop", None if has_free_v(schedule) else 1
    each = [v] if v else range(1, stages_per_rank + 1)
    found: dict[PipelineShape, None] = {}
    for shape in product(range(1, ranks + 1), range(1, microbatches + 1), each):
        with suppress(ShapeError):  # a mirror of an odd number of ranks, for one
            found[PipelineShape(*shape, placement)] = None
    return [*found]


@st.composite
def shapes(
    draw: st.DrawFn,
    ranks: int = 4,
    microbatches: int = 6,
    stages_per_rank: int = 3,
    placements: Sequence[str] = PLACEMENT_KINDS,
) -> PipelineShape:
    """Small shapes, up to these sizes.

    A "given" placement is any with one holder of each stage, and "rows" any with two or three,
    uneven ones among them; there `stages_per_rank` is the most on average.  "vee" and "mirror" need
    two.

    >>> from hypothesis import given
    >>> from schedir.testing import shapes
    >>> @given(shapes(ranks=2, microbatches=4))
    ... def every_stage_has_a_rank(shape):
    ...     placed = [stage for stages in shape.stages_on_rank for stage in stages]
    ...     assert {*placed} == {*range(shape.stages)}
    >>> every_stage_has_a_rank()
    """
    more = stages_per_rank > 1
    paired = min(ranks, microbatches) > 1 and more
    can = {"vee": more, "mirror": paired, "rows": paired}
    kind = draw(st.sampled_from([kind for kind in placements if can.get(kind, True)]))
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
    """A shape of which each stage has two or three holders, on ranks of all that hold any."""
    rows = draw(st.integers(2, min(3, ranks, microbatches)))
    stage = st.permutations(range(ranks)).map(lambda order: order[:rows])
    most = max(ranks * stages_per_rank // rows, 1)
    holders = draw(st.lists(stage, min_size=1, max_size=most))
    held = sorted({rank for own in holders for rank in own})
    placement = tuple(zip(*([held.index(rank) for rank in own] for own in holders), strict=True))
    return PipelineShape(len(held), draw(st.integers(rows, microbatches)), placement=placement)


@st.composite
def compute_programs(
    draw: st.DrawFn,
    ranks: int = 4,
    microbatches: int = 6,
    stages_per_rank: int = 3,
    split: float = 0.5,
    placements: Sequence[str] = PLACEMENT_KINDS,
) -> Program:
    """Complete drafts on small shapes, as of `shapes`; `split` is the share of I and W.

    They ascend, where stages have one holder.

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
    """Programs that are legal under every progress model, with all kinds of traits.

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
    """What may be tied in a shape: nothing, first and last stage, or up to two sets of any.

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
    """A draft in the order in which a random execution would meet its instructions.

    Every holder's backwards ascend.  `split` is the share of backwards cut into I and W.

    >>> import random
    >>> from schedir import PipelineShape
    >>> from schedir.testing import random_compute_program
    >>> random_compute_program(PipelineShape(ranks=2, microbatches=4), random.Random(0), split=0.0)
    <draft random: 2 ranks, 16 instructions>
    """
    S, m = shape.stages, shape.microbatches
    streams: list[list[Instr]] = [[] for _ in range(shape.ranks)]
    ready = [Instr(_F, 0, mb) for mb in range(m)]
    backward = {(s, mb): _I if rng.random() < split else _B for s in range(S) for mb in range(m)}
    arrived: set[tuple[int, int]] = set()  # (stage, mb) whose gradient is there
    # Of each stage, and of the microbatches of each of its holders by themselves:
    turns = [
        [begin] * S for begin in shape.microbatch_row_offsets[:-1]
    ]  # the microbatch whose backward is next
    late: list[list[list[int]]] = [[[] for _ in range(S)] for _ in turns]  # I ran, W did not

    def offer(stage: int, row: int) -> None:
        """The stage's next backward, if its gradient is there; a whole one waits for all W."""
        mb = turns[row][stage]
        if (stage, mb) in arrived and (backward[stage, mb] is _I or not late[row][stage]):
            arrived.remove((stage, mb))
            ready.append(Instr(backward[stage, mb], stage, mb))

    while ready:
        instr = ready.pop(rng.randrange(len(ready)))
        op, s, mb = instr
        row = int(shape.replica_row_of_microbatch(mb))
        turn, weights = turns[row], late[row]
        streams[int(shape.rank_of_stage(s, mb))].append(instr)
        if op is _F and s + 1 < S:
            ready.append(Instr(_F, s + 1, mb))
        elif op is _F:
            arrived.add((s, mb))
        elif op is _W:
            weights[s].remove(mb)
            if weights[s]:
                ready.append(Instr(_W, s, weights[s][0]))
        else:
            turn[s] += 1
            if op is _I:
                weights[s].append(mb)
                if len(weights[s]) == 1:
                    ready.append(Instr(_W, s, mb))
            if s:
                arrived.add((s - 1, mb))
                offer(s - 1, row)
        offer(s, row)
    return Program("random", shape, tuple(map(Stream.from_instructions, streams)))
