"""Change legal programs by random mutations, and compare the checker with the oracle.

The name of a mutation and a seed are enough to repeat a trial.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count
from types import FunctionType
from typing import Any, Final, NamedTuple

from schedir import schedules
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import lower
from schedir.errors import SchedirError
from schedir.ir.isa.instructions import OPS_OFF_COMPUTE_LANE, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import find_named_placement
from schedir.ir.pipeline.skip_connections import Skips
from schedir.ir.pipeline.tied_weights import TiedStages, normalize_tied_stages
from schedir.ir.program import Program
from schedir.ir.text_format import to_text
from schedir.passes.communication.transfer_overlap import (
    group_opposite_transfers,
    post_receives_early,
    start_gathers_early,
)
from schedir.passes.memory.checkpoint_snapshots import insert_snapshots
from schedir.passes.pass_registry import LOWERING_PASSES
from schedir.schedules import schedule_algebra
from schedir.schedules.schedule_expansion import expand_schedule as drafted
from schedir.testing import random_compute_program
from schedir.verify.check import check, check_draft
from tests import edits, mutations_of_shape  # noqa: F401 (importing it fills the table)
from tests.cases import ALL
from tests.mutations_of_activation_offload import ACTIVATION_OFFLOAD_MUTATIONS, offload_activations
from tests.mutations_of_optimizer_offload import OPTIMIZER_OFFLOAD_MUTATIONS, offload_optimizer
from tests.mutations_of_segments import SEGMENT_MUTATIONS
from tests.mutations_of_snapshots import SNAPSHOT_MUTATIONS
from tests.mutations_of_zero import ZERO_MUTATIONS
from tests.oracle_threads import verdict


@cache
def built_in_schedules() -> list[schedule_algebra.Schedule]:
    """Return all schedules of `schedir.schedules`, sorted by name."""
    return [
        value
        for name, value in sorted(vars(schedules).items())
        if isinstance(value, FunctionType)
        and not name.startswith("_")
        and value.__module__.startswith("schedir.schedules")
        and len(inspect.signature(value).parameters) >= 3
    ]


MUTATIONS = edits.MUTATIONS

CORPUS: Final = 0 if ALL else 24  # number of shared legal programs of each kind; 0 is no sharing
FEW: Final = min(CORPUS, 12)  # the same number for tests that try few mutants

# Mutations whose mutants are always legal, mutations whose mutants are rarely wrong, and mutations
# that often exchange independent instructions.
HARMLESS = (
    "fuse_backward", "split_backward", "ungroup_computes", "drop_sharded_pair", "evaluate",
    "drop_recompute", "renumber", "rename", "list_placement", "stay_on_host",
)  # fmt: skip
RARELY_WRONG = (
    "ungroup", "join_transfers", "join_both_sides", "run_order", "unshard_once_more",
    "reduce_once_less",
)  # fmt: skip
COMMUTING = ("swap_neighbors", "early_receive", "late_send", "join_both_sides", "run_order")

# Mutations that make legal programs more varied than those of the lowering. A mutant is used only
# if it is legal.
VARIATIONS = (
    "run_order", "evaluate", "early_receive", "late_send", "join_computes",
    "join_next_transfer", "join_next_transfer", "cross_in_groups",
)  # fmt: skip


# Mutation -> another mutation to apply first, because few programs have something to mutate.
PREPARED = {
    "ungroup": "join_next_transfer", "reorder_group": "join_next_transfer",
    "ungroup_computes": "join_computes",
}  # fmt: skip


def draw_legal_program(
    rng: random.Random,
    first: str | None = None,
    *,
    zero: bool = False,
    snapshots: bool = False,
    offload: bool = False,
    optimizer_offload: bool = False,
    segments: bool = False,
) -> Program:
    """Return a small random program that is legal at least under `per_edge`."""
    from_schedule = zero or rng.random() < (0.6 if optimizer_offload else 0.7)
    states = "cpu_step" if optimizer_offload else "device"
    program = (
        draw_lowered_program(rng, zero=zero, offload=offload, segments=segments)
        if from_schedule
        else draw_program_of_updates_with(rng, states)
    )
    while segments and not program.segment_boundaries:
        program = draw_lowered_program(rng, segments=True)
    while (snapshots or offload or optimizer_offload) and not program.has_backward:
        program = draw_lowered_program(rng)
    if snapshots:
        program = insert_snapshots(replace(program, checkpoint_snapshots=True))
    if optimizer_offload and program.optimizer_placement == "device":
        program = offload_optimizer(program, rng)
    if offload and program.used_opcodes.isdisjoint(OPS_OFF_COMPUTE_LANE[Value.SAVED]):
        program = offload_activations(program, rng)
    more = [rng.choice(VARIATIONS) for _ in range(rng.choice([0, 0, 0, 1, 2, 3]))]
    for name in [first, *more] if first else more:
        varied = MUTATIONS[name](program, rng)
        if varied and verdict(varied, "per_edge").kind == "ok":
            program = varied
    return program


def draw_ties(shape: PipelineShape, rng: random.Random) -> TiedStages:
    """Draw tied weights: none, a weight of the first and last stage, or any stages."""
    ends = rng.choice([False, False, True])
    if shape.stages < 3 or rng.random() < 0.7:
        return normalize_tied_stages(ends, shape)
    stages = range(shape.stages)
    return normalize_tied_stages(
        [rng.sample(stages, rng.randint(2, 3)) for _ in range(rng.randint(1, 2))], shape
    )


def draw_replica_ranks(rng: random.Random, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Draw the ranks of two or three replicas of each stage. The result may be no placement."""
    each = min(rng.choice([2, 2, 3]), ranks)
    holders = [rng.sample(range(ranks), each) for _ in range(rng.randint(1, 4))]
    return tuple(zip(*holders, strict=True))


def draw_frozen_stages(shape: PipelineShape, rng: random.Random) -> int:
    """Draw the number of frozen stages, mostly 0."""
    return rng.randrange(shape.stages) if rng.random() < 0.3 else 0


def draw_skips(shape: PipelineShape, rng: random.Random) -> Skips:
    """Draw skip connections, often none."""
    if shape.stages < 3 or rng.random() < 0.6:
        return ()
    found: list[tuple[int, int]] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        begin, end = sorted(rng.sample(range(shape.stages), 2))
        if end > begin + 1 and all(begin != s and end != t for s, t in found):
            found.append((begin, end))
    return tuple(found)


def draw_options(rng: random.Random, program: Program, *, offload: bool = False) -> dict[str, Any]:
    """Draw options of the lowering passes. Offload is possible only if `offload` is True."""
    stages = max(map(len, program.shape.stages_on_rank))
    values = {
        "recompute": lambda s, m: rng.random() < 0.6,
        "recompute_at": "late",
        "unsharded_stages": rng.randint(1, stages),
        "unshard_prefetch": rng.randint(0, 2),
        "offload": lambda s, m: rng.random() < 0.7,
        "offload_to_disk": lambda s, m: rng.random() < 0.4,
        "stage_segments": rng.choice([1, 2, 3]),
        "microbatch_chunks": rng.choice([1, 2, 2, 3]),
    }
    without = {"host_memory_limit"}  # needs sizes
    without |= {"fill_collective_waits"}  # needs costs
    without |= {"optimizer_device_buffers"}  # `offload_optimizer` sets it
    without |= {"unsharded_stages", "unshard_prefetch"} if program.zero < 3 else set()
    without |= {"offload", "offload_to_disk"} if not offload else set()
    options = [o for each in LOWERING_PASSES for o in each.option_names if o not in without]
    return {option: values.get(option, True) for option in options if rng.random() < 0.4}


def draw_zero(rng: random.Random) -> dict[str, Any]:
    """Draw a ZeRO level, and the time at which gradients are reduced."""
    zero = rng.choice([1, 2, 3, 3, 3])
    return {
        "zero": zero,
        "reduce_scatter_at": rng.choice(["update_end", "each_backward"])
        if zero > 1
        else "update_end",
    }


def draw_lowered_program(
    rng: random.Random, *, zero: bool = False, offload: bool = False, segments: bool = False
) -> Program:
    """Return a built-in schedule or a random draft, lowered with random options."""
    while True:
        ranks, m = rng.choice([1, 2, 2, 3, 3, 4]), rng.choice([1, 2, 2, 3, 3, 4, 6])
        if zero:
            ranks, m = rng.choice([1, 1, 2, 2, 3]), rng.choice([1, 2, 2, 3])
        schedule = rng.choice(built_in_schedules()) if rng.random() < 0.5 else None
        anywhere: Any = rng.choice(
            ["loop", "loop", "vee", "mirror", draw_replica_ranks(rng, ranks)]
        )
        placement, v = getattr(schedule, "placed", (anywhere, None))
        v = v or (1 if isinstance(placement, tuple) else rng.choice([1, 1, 2, 3 if zero else 1]))
        if isinstance(placement, str):
            v = max(v, find_named_placement(placement).stages_per_rank)
        tp, clip = 2 if segments else rng.choice([1, 1, 2]), rng.random() < 0.5
        model = rng.choice(
            [model for model in MODELS if model != "torch_lazy"]
        )  # torch_lazy allows programs that are not legal under per_edge
        try:
            shape = PipelineShape(ranks, m, v, placement)
            draft = drafted(schedule, shape) if schedule else random_compute_program(shape, rng)
            whole = replace(
                check_draft(draft), tp=tp, tied_weights=draw_ties(shape, rng), clip_grad_norm=clip
            )
            whole = replace(whole, sequence_parallel=tp > 1 and rng.random() < 0.5)
            whole = replace(
                whole, frozen_stages=draw_frozen_stages(shape, rng), skips=draw_skips(shape, rng)
            )
            if zero or rng.random() < 0.2:
                whole = replace(whole, dp=2, **draw_zero(rng))
            has_experts = segments and rng.random() < 0.5
            if has_experts:
                whole = replace(whole, dp=2, ep=2)
            added = draw_options(rng, whole, offload=offload)
            if segments:
                letters = ["dc", "gdc", "d.cf"] if has_experts else [2, 3, "gf", "f.g"]
                added["stage_segments"] = rng.choice(letters)
            program = lower(whole, **added)
        except SchedirError:
            continue  # some schedules do not support all shapes
        if added and verdict(program, "per_edge").kind != "ok":
            continue  # some passes do not support all drafts
        if rng.random() < 0.4:
            ahead = rng.randint(1, 3)
            program = start_gathers_early(group_opposite_transfers(program), ahead)
            program = post_receives_early(program, model, ahead)
        return program


def draw_program_of_updates(rng: random.Random) -> Program:
    """Return a legal program of several updates, from a schedule or from a random draft."""
    return draw_program_of_updates_with(rng, "device")


def draw_program_of_updates_with(rng: random.Random, states: str) -> Program:
    """Return a program as `updating` does, with `states` as its `optimizer_placement`."""
    while True:
        updates, delay = rng.choice([2, 2, 3]), rng.choice([0, 1, 1, 2, 2])
        ranks, each, v = rng.choice([1, 2, 2, 3]), rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
        shape = PipelineShape(ranks, each * updates, v, optimizer_steps=updates, weight_delay=delay)
        tied, clip = rng.random() < 0.5, rng.random() < 0.5
        try:
            draft = (
                drafted(
                    rng.choice([schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h1]), shape
                )
                if v == 1 and rng.random() < 0.6
                else random_compute_program(shape, rng, split=rng.choice([0, 0.5, 1, 1]))
            )
            whole = replace(
                check_draft(draft),
                tied_weights=normalize_tied_stages(tied, shape),
                clip_grad_norm=clip,
            )
            whole = replace(whole, optimizer_placement=states)
            whole = replace(whole, tp=2, sequence_parallel=True) if rng.random() < 0.3 else whole
            whole = replace(
                whole, frozen_stages=draw_frozen_stages(shape, rng), skips=draw_skips(shape, rng)
            )
            program = lower(whole, **draw_options(rng, whole))
        except SchedirError:
            continue
        if verdict(program, "per_edge").kind == "ok":
            return program


@dataclass
class Trial:
    """The result of one mutation.

    `outcome` is "rejected" if the mutant is wrong under a progress model under which the original
    program is right.  It is "equivalent" if there is no such model, and "no program" if the mutant
    is not a valid program.
    """

    mutation: str
    seed: int
    outcome: str
    mutant: Program | None = None
    disagreements: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = to_text(self.mutant) if self.mutant else ""
        return "\n".join([f"trial({self.mutation!r}, {self.seed})", *self.disagreements, text])


class Kind(NamedTuple):
    """The arguments of `legal` for programs that a mutation can change."""

    first: str | None = None
    zero: bool = False
    snapshots: bool = False
    offload: bool = False
    optimizer_offload: bool = False
    segments: bool = False


def kind_of(name: str, rng: random.Random, *, mixed: bool) -> Kind:
    """Return the kind of program for a mutation. `mixed` adds offload to some programs."""
    optimizer_offload = name in OPTIMIZER_OFFLOAD_MUTATIONS
    return Kind(
        PREPARED.get(name),
        offload=name in ACTIVATION_OFFLOAD_MUTATIONS or (mixed and rng.random() < 0.2),
        snapshots=name in SNAPSHOT_MUTATIONS or (optimizer_offload and rng.random() < 0.3),
        zero=name in ZERO_MUTATIONS or (optimizer_offload and rng.random() < 0.3),
        optimizer_offload=optimizer_offload,
        segments=name in SEGMENT_MUTATIONS,
    )


def mutate(
    name: str, seed: int, share: int = 4, *, mixed: bool = False, corpus: int = 0
) -> tuple[Program, Program]:
    """Return a legal program and its mutant. Raises a SchedirError if the mutant is no program.

    Args:
        name: The mutation.
        seed: The seed of the mutant.
        share: The number of seeds that share a legal program.
        mixed: True to use offload in some programs, although the mutation does not concern it.
        corpus: If positive, all mutations share this number of programs of each kind, because
            drawing a legal program takes longer than to judge a mutant of it.
    """
    rng = random.Random(f"{name} {seed}")
    start = rng.randrange(corpus) if corpus else 0
    for again in count():
        if corpus:
            program = in_corpus(name, (start + again) % corpus + again // corpus * corpus, mixed)
        else:
            program = base(name, seed // share, again, mixed)
        mutant = MUTATIONS[name](program, rng)
        if mutant is not None and mutant != program:
            return program, mutant
    raise AssertionError("some program can be changed")


@lru_cache(256)  # more programs than any mutation tries before it can change one
def base(name: str, seed: int, again: int, mixed: bool) -> Program:
    """Return a program for a mutation. `again` counts the programs that it could not change."""
    rng = random.Random(f"{name} {seed} {again}")
    return draw_legal_program(rng, **kind_of(name, rng, mixed=mixed)._asdict())


def in_corpus(name: str, number: int, mixed: bool) -> Program:
    """Return a program for a mutation from those that all mutations share."""
    return legal_of_kind(kind_of(name, random.Random(number), mixed=mixed), number)


@lru_cache(2048)
def legal_of_kind(kind: Kind, number: int) -> Program:
    """Return a legal program of a kind, the same for each number."""
    return draw_legal_program(random.Random(f"{kind} {number}"), **kind._asdict())


def any_legal(seed: int, *, zero: bool = False, corpus: int = CORPUS) -> Program:
    """Return a legal program, one of those that mutations share."""
    return legal_of_kind(Kind(zero=zero), seed % corpus if corpus else seed)


def trial(
    name: str,
    seed: int,
    models: Sequence[ProgressModel] = MODELS,
    share: int = 4,
    corpus: int = 0,
) -> Trial:
    """Make a mutant of a legal program, and compare checker and oracle under some models."""
    rng = random.Random(seed)
    try:
        program, mutant = mutate(name, seed, share, mixed=True, corpus=corpus)
    except SchedirError:
        return Trial(name, seed, "no program")
    wrong, differ = [], []
    for model in models:
        refused, ran = refusal(mutant, model), verdict(mutant, model, rng.randrange(2**32))
        if ran.kind != "ok":
            wrong.append(model)
        if bool(refused) == (ran.kind == "ok"):
            differ.append(f"{model}: the checker says {refused or 'ok'}, but {ran}")
    # All legal programs finish under `per_edge`. To run one under another model takes long.
    spoiled = "per_edge" in wrong or any(verdict(program, model).kind == "ok" for model in wrong)
    return Trial(name, seed, "rejected" if spoiled else "equivalent", mutant, tuple(differ))


def reordered(program: Program, rng: random.Random) -> Program:
    """Return a program with some instructions moved, so that it stays legal under `per_edge`."""
    for name in rng.choices(("late_send", "run_order", "swap_neighbors"), k=3):
        changed = MUTATIONS[name](program, rng)
        if changed and verdict(changed, "per_edge").kind == "ok":
            program = changed
    return program


def refusal(program: Program, progress_model: ProgressModel) -> str:
    """Return the error of the checker, or "" if it accepts the program."""
    try:
        check(program, progress_model)
    except SchedirError as error:
        return f"{type(error).__name__}: {error.fact}"
    return ""
