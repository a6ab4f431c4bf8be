"""Hypothesis strategies for shapes, drafts and programs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
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
_RECOMPUTE_AT = ("early", "late")
PLACEMENT_KINDS = ("loop", "vee", "mirror", "given", "rows")


def shapes_for(
    schedule: Schedule, ranks: int = 4, microbatches: int = 6, stages_per_rank: int = 3
) -> list[PipelineShape]:
    """Return all pipeline shapes that a schedule can have, the smallest first.

    The decorator `with_placement` gives a schedule its placement and its stages per rank.  A
    schedule without this decorator gets the placement "loop", and several stages per rank only if
    it has a parameter `v`.

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
    """Generate a small pipeline shape (a hypothesis strategy).

    Args:
        draw: Passed by hypothesis.
        ranks: The largest number of ranks.
        microbatches: The largest number of microbatches.
        stages_per_rank: The largest number of stages per rank.  With the placements "given" and
            "rows" it is the largest average over the ranks.
        placements: The kinds of placement to draw from. "loop", "vee" and "mirror" mean the same as
            in `PipelineShape`. "given" is any list with one rank for each stage. "rows" is any
            placement with two or three replicas of each stage, also an uneven one. "vee" needs
            `stages_per_rank` of 2 or more. "mirror" and "rows" also need 2 ranks and 2
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
        other_ranks = draw(st.lists(st.integers(0, P - 1), max_size=P * (stages_per_rank - 1)))
        placement = tuple(draw(st.permutations([*range(P), *other_ranks])))
        return PipelineShape(P, m, placement=placement)
    min_stages = 2 if kind == "vee" else 1
    return PipelineShape(P, m, draw(st.integers(min_stages, stages_per_rank)), kind)


def _draw_replicated_shape(
    draw: st.DrawFn, ranks: int, microbatches: int, stages_per_rank: int
) -> PipelineShape:
    """Draw a shape with two or three replicas of each stage, and no rank without a stage."""
    rows = draw(st.integers(2, min(3, ranks, microbatches)))
    stage = st.permutations(range(ranks)).map(lambda order: order[:rows])
    max_stages = max(ranks * stages_per_rank // rows, 1)
    ranks_by_stage = draw(st.lists(stage, min_size=1, max_size=max_stages))
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
    optimizer_steps: int = 1,
) -> Program:
    """Generate a complete draft on a small shape (a hypothesis strategy).

    Without stage replicas, each stage runs its backwards in ascending order of microbatches.

    Args:
        draw: Passed by hypothesis.
        ranks: The largest number of ranks.
        microbatches: The largest number of microbatches.
        stages_per_rank: The largest number of stages per rank.
        split: The probability that a backward is split into I and W.
        placements: The kinds of placement to draw from, as in `shapes`.
        optimizer_steps: The largest number of optimizer steps.  A draft with several steps has no
            stage replicas, at most `microbatches` microbatches per step, and weight delays from 0
            to 2.

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
    if optimizer_steps > 1 and shape.placement_rows == 1:
        shape = draw(_optimizer_steps(shape, optimizer_steps))
    return random_compute_program(
        shape, random.Random(draw(st.integers(0, 2**32 - 1))), split=split
    )


@st.composite
def _optimizer_steps(draw: st.DrawFn, shape: PipelineShape, max_steps: int) -> PipelineShape:
    """Draw the number of optimizer steps of a shape, and the weight delays."""
    steps = draw(st.integers(1, max_steps))
    if steps == 1:
        return shape
    delay = st.integers(0, 2)
    delays = st.tuples(*[delay] * shape.stages)
    return replace(
        shape,
        microbatches=steps * shape.microbatches,
        optimizer_steps=steps,
        weight_delay=draw(delay | delays),
    )


@st.composite
def programs(
    draw: st.DrawFn, ranks: int = 4, microbatches: int = 6, stages_per_rank: int = 3
) -> Program:
    """Generate a program with various attributes that finishes under every progress model.

    The attributes are the tensor-parallel size, tied weights, gradient clipping and frozen stages.
    Opposite transfers are grouped in some of the programs.

    Args:
        draw: Passed by hypothesis.
        ranks: The largest number of ranks.
        microbatches: The largest number of microbatches.
        stages_per_rank: The largest number of stages per rank.

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
    clip_grad_norm, groups_transfers = draw(st.booleans()), draw(st.booleans())
    tied_sets = draw(tied_weights(draft.shape))
    frozen_stages = draw(st.integers(0, draft.shape.stages - 1))
    if any(stages[0] < frozen_stages <= stages[-1] for stages in tied_sets):
        frozen_stages = 0
    tp = draw(st.integers(1, 2))
    program = lower(
        replace(
            draft,
            tp=tp,
            tied_weights=tied_sets,
            clip_grad_norm=clip_grad_norm,
            frozen_stages=frozen_stages,
        )
    )
    return group_opposite_transfers(program) if groups_transfers else program


@st.composite
def compile_options(draw: st.DrawFn, draft: Program) -> dict[str, Any]:
    """Generate options of `compile` that a draft allows (a hypothesis strategy).

    The options are tied weights, frozen stages, skip connections, gradient clipping, the time of
    the norm check, and overlap. All other options concern memory: ZeRO, the placement of the
    optimizer state, snapshots, recomputation, activation offload and buffer sharing.

    Args:
        draw: Passed by hypothesis.
        draft: The draft to compile.

    Returns:
        The options by name.

    Example:
        >>> import schedir
        >>> from hypothesis import given
        >>> from hypothesis import strategies as st
        >>> from schedir.testing import compile_options, compute_programs
        >>> @given(compute_programs(ranks=2, microbatches=3), st.data())
        ... def every_option_compiles(draft, data):
        ...     schedir.compile(draft, **data.draw(compile_options(draft)))
        >>> every_option_compiles()
    """
    shape, booleans = draft.shape, st.booleans()
    tied_sets, frozen_stages = _draw_tied_and_frozen(draw, shape)
    options: dict[str, Any] = {
        "tied_weights": tied_sets,
        "frozen_stages": frozen_stages,
        "skips": _draw_skips(draw, shape),
        "clip_grad_norm": draw(booleans),
        "overlap": draw(booleans),
        "buffer_sharing": draw(st.sampled_from([None, "minimal", "latency_preserving"])),
        "checkpoint_snapshots": draw(booleans),
    }
    trained_pairs = [*product(range(frozen_stages, shape.stages), range(shape.microbatches))]
    some_pairs = st.sets(st.sampled_from(trained_pairs)).map(sorted)
    selections = st.one_of(st.just(trained_pairs), some_pairs)
    if draw(booleans):
        options |= {"recompute": draw(selections)}
        options |= {"recompute_at": draw(st.sampled_from(_RECOMPUTE_AT))}
    keywords = st.sampled_from(["all", "half"])
    if draw(booleans):
        options |= {"offload": draw(keywords)}
        if draw(booleans):
            options |= {"offload_to_disk": draw(keywords)}
    options |= _draw_state_placement(draw, shape, options["clip_grad_norm"])
    if options.get("norm_check") == "after_step":
        options |= {"checkpoint_snapshots": False}
    return options


def _draw_tied_and_frozen(draw: st.DrawFn, shape: PipelineShape) -> tuple[TiedStages, int]:
    """Draw a number of frozen stages, and tied weights of the other stages."""
    frozen_stages = draw(st.integers(0, shape.stages - 1))
    tied_sets = draw(tied_weights(shape))
    return tuple(stages for stages in tied_sets if stages[0] >= frozen_stages), frozen_stages


def _draw_skips(draw: st.DrawFn, shape: PipelineShape) -> list[tuple[int, int]]:
    """Draw skip connections, at most one from each source stage and to each target stage."""
    stages = range(shape.stages)
    pairs = [(begin, end) for begin in stages for end in stages if begin + 1 < end]
    skips: list[tuple[int, int]] = []
    for begin, end in draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []:
        if all(begin != skip[0] and end != skip[1] for skip in skips):
            skips.append((begin, end))
    return sorted(skips)


def _draw_state_placement(draw: st.DrawFn, shape: PipelineShape, clips: bool) -> dict[str, Any]:
    """Draw the placement of the optimizer state, the ZeRO level, and the time of the norm check."""
    has_several_steps = shape.optimizer_steps > 1
    placements = ["device", "cpu_step"]
    if not has_several_steps:
        placements = ["device", "host", "disk", "cpu_step"]
    options: dict[str, Any] = {"optimizer_placement": draw(st.sampled_from(placements))}
    if options["optimizer_placement"] in ("host", "disk"):
        options |= {"optimizer_device_buffers": draw(st.integers(1, 3))}
    if options["optimizer_placement"] == "disk":
        options |= {"optimizer_host_buffers": draw(st.integers(1, 3))}
    if has_several_steps:
        return options
    options |= {"zero": draw(st.sampled_from([0, 0, 1, 2, 3]))}
    if options["zero"] == 3:
        options |= {"unshard_prefetch": draw(st.integers(0, 2))}
    if clips and options["zero"] == 0 and options["optimizer_placement"] == "device":
        options |= {"norm_check": draw(st.sampled_from(["before_step", "after_step"]))}
    return options


def tied_weights(shape: PipelineShape) -> st.SearchStrategy[TiedStages]:
    """Return a hypothesis strategy that draws which stages of a shape share weights.

    The strategy draws no tied weights, a weight of the first and the last stage, or up to two sets
    of stages.

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

    Each replica of a stage runs its backwards in ascending order of microbatches.  A forward that
    needs the weights after an optimizer step runs after all backwards of this step.

    Args:
        shape: The shape.
        rng: The source of random numbers.
        split: The probability that a backward is split into I and W.

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
    backward_op = {(s, mb): _I if rng.random() < split else _B for s in range(S) for mb in range(m)}
    arrived_gradients: set[tuple[int, int]] = set()  # (stage, mb) whose output gradient arrived.
    # next_backward[row][stage]: the microbatch of the next backward. Row k of the placement has
    # the k-th replica of each stage.
    next_backward = [[begin] * S for begin in shape.microbatch_row_offsets[:-1]]
    # waiting_weights[row][stage]: the microbatches with an I and no W yet.
    waiting_weights: list[list[list[int]]] = [[[] for _ in range(S)] for _ in next_backward]
    steps = _StepOrder(shape)

    def offer(stage: int, row: int) -> None:
        """Add a stage's next backward to `ready` if possible.  B runs after all earlier W."""
        mb = next_backward[row][stage]
        if (stage, mb) in arrived_gradients and (
            backward_op[stage, mb] is _I or not waiting_weights[row][stage]
        ):
            arrived_gradients.remove((stage, mb))
            ready.append(Instr(backward_op[stage, mb], stage, mb))

    while ready:
        choices = steps.find_possible(ready)
        instr = choices[rng.randrange(len(choices))]
        ready.remove(instr)
        steps.record(instr)
        op, s, mb = instr
        row = int(shape.replica_row_of_microbatch(mb))
        next_mb, waiting_mbs = next_backward[row], waiting_weights[row]
        streams[int(shape.rank_of_stage(s, mb))].append(instr)
        if op is _F and s + 1 < S:
            ready.append(Instr(_F, s + 1, mb))
        elif op is _F:
            arrived_gradients.add((s, mb))
        elif op is _W:
            waiting_mbs[s].remove(mb)
            if waiting_mbs[s]:
                ready.append(Instr(_W, s, waiting_mbs[s][0]))
        else:
            next_mb[s] += 1
            if op is _I:
                waiting_mbs[s].append(mb)
                if len(waiting_mbs[s]) == 1:
                    ready.append(Instr(_W, s, mb))
            if s:
                arrived_gradients.add((s - 1, mb))
                offer(s - 1, row)
        offer(s, row)
    return Program("random", shape, tuple(map(Stream.from_instructions, streams)))


class _StepOrder:
    """Counts the missing gradients of each optimizer step, during a random execution.

    Args:
        shape: The shape of the draft.
    """

    def __init__(self, shape: PipelineShape) -> None:
        self.shape = shape
        # [optimizer step, rank] -> the number of gradients that are missing.
        self.missing = np.zeros((shape.optimizer_steps, shape.ranks), int)
        for stage, mb in product(range(shape.stages), range(shape.microbatches)):
            update = mb // shape.microbatches_per_update
            self.missing[update, int(shape.rank_of_stage(stage, mb))] += 1

    def find_possible(self, ready: list[Instr]) -> list[Instr]:
        """Return the ready instructions that wait for no optimizer step with missing gradients."""
        if self.shape.optimizer_steps == 1:
            return ready
        return [instr for instr in ready if self._is_possible(instr)]

    def _is_possible(self, instr: Instr) -> bool:
        op, stage, mb = instr
        if op is _F:
            return not self.missing[: int(self.shape.weight_version(stage, mb))].any()
        rank = int(self.shape.rank_of_stage(stage, mb))
        return not self.missing[: mb // self.shape.microbatches_per_update, rank].any()

    def record(self, instr: Instr) -> None:
        """Record that an instruction has run."""
        op, stage, mb = instr
        if self.shape.optimizer_steps > 1 and op in (_B, _W):
            update = mb // self.shape.microbatches_per_update
            self.missing[update, int(self.shape.rank_of_stage(stage, mb))] -= 1
