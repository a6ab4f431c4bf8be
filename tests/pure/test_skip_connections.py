"""Tests of skip connections in programs, the checker and the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    check,
    compile,
    from_text,
    schedules,
    simulate,
    to_text,
)
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import SLOT_KINDS, count_min_slots
from schedir.analysis.memory.footprint import compute_footprints
from schedir.analysis.progress_models import MODELS
from schedir.errors import DeadlockError, ShapeError, UsageError
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode, PeerRule, Value
from schedir.ir.pipeline.skip_connections import Skips
from schedir.ir.program import Program, Stream
from schedir.ir.stream import OP_SHIFT
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import random_compute_program
from tests.cases import ALL
from tests.mutants import refusal
from tests.oracle import Machine
from tests.oracle_threads import verdict

SKIP_OPS = (Opcode.SendSkip, Opcode.RecvSkip, Opcode.SendSkipGrad, Opcode.RecvSkipGrad)
SMALL: list[tuple[Schedule, PipelineShape, Skips]] = [
    (schedules.one_f_one_b, PipelineShape(3, 3), ((0, 2),)),
    (schedules.zb_h1, PipelineShape(4, 4), ((0, 3),)),
    (schedules.interleaved, PipelineShape(2, 2, 2), ((0, 3),)),
    (schedules.zb_v, PipelineShape(2, 3, 2, "vee"), ((0, 2), (1, 3))),
    (schedules.dualpipe, PipelineShape(4, 8, 2, "mirror"), ((0, 2), (1, 3))),
    (schedules.forward_only, PipelineShape(3, 2), ((0, 2),)),
]
NAMES = [schedule.__name__ for schedule, _, _ in SMALL]


@pytest.mark.parametrize(("schedule", "shape", "skips"), SMALL, ids=NAMES)
def test_skips_are_legal_under_every_model(
    schedule: Schedule, shape: PipelineShape, skips: Skips
) -> None:
    program = compile(schedule, shape, skips=skips)
    for model in MODELS:
        check(from_text(to_text(program)), model, blocking_hosts=True)
        assert verdict(program, model, 1).kind == "ok"
    stages = {(i.op, i.stage) for stream in program.streams for i in stream if i.op in SKIP_OPS}
    crossing = {
        (s, t)
        for s, t in skips
        if (
            shape.rank_of_stage(s, range(shape.microbatches))
            != shape.rank_of_stage(t, range(shape.microbatches))
        ).any()
    }
    assert stages == {
        (op, end)
        for s, t in crossing
        for op, end in zip(SKIP_OPS, (s, t, t, s), strict=True)
        if program.has_backward or op in SKIP_OPS[:2]
    }


def replace_stream(program: Program, rank: int, words: list[int]) -> Program:
    streams = [*program.streams]
    streams[rank] = Stream(np.array(words, np.int64))
    return replace(program, streams=tuple(streams), message_order={})


@pytest.mark.parametrize(("schedule", "shape", "skips"), SMALL, ids=NAMES)
def test_mutated_skip_agrees_with_oracle(
    schedule: Schedule, shape: PipelineShape, skips: Skips
) -> None:
    """Each instruction of a skip is dropped, doubled, swapped with its neighbour, or replaced."""
    program = compile(schedule, shape, skips=skips)
    num_refused = num_mutants = 0
    for rank, stream in enumerate(program.streams):
        words = stream.words.tolist()
        for k, i in enumerate(stream):
            if i.op not in SKIP_OPS:
                continue
            other_word = words[k] + ((int(Opcode.SendAct) - int(Opcode.SendSkip)) << OP_SHIFT)
            if len(stream) > 24 and i.mb not in (0, shape.microbatches - 1):
                continue  # large programs test only the first and the last microbatch
            for mutant in (
                words[:k] + words[k + 1 :],
                [*words[: k + 1], *words[k:]],
                [*words[:k], *words[k + 1 : k + 2], words[k], *words[k + 2 :]],
                [*words[: max(k - 1, 0)], words[k], *words[max(k - 1, 0) : k], *words[k + 1 :]],
                [*words[:k], words[k] + (1 << 32), *words[k + 1 :]],  # the next stage
                [*words[:k], other_word, *words[k + 1 :]],
            ):
                if mutant == words:
                    continue
                changed_program = replace_stream(program, rank, mutant)
                models = MODELS if ALL else [MODELS[num_mutants % len(MODELS)]]
                num_mutants += 1
                for model in models:
                    outcome = verdict(changed_program, model, k)
                    error = refusal(changed_program, model)
                    assert bool(error) == (outcome.kind != "ok"), (
                        to_text(changed_program),
                        model,
                        error,
                        outcome,
                    )
                    num_refused += bool(error)
    assert num_refused


@given(st.integers(0, 2**32 - 1), st.sampled_from(MODELS), st.sampled_from(["", "minimal"]))
def test_times_match_machine(seed: int, model: Any, slots: Any) -> None:
    """Times of random drafts with a skip equal those of the independent machine."""
    rng = np.random.default_rng(seed)
    ranks, v = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    shape = PipelineShape(
        ranks, int(rng.integers(1, 5)), v, rng.choice(["loop", "vee"]) if v > 1 else "loop"
    )
    skip_ends = sorted(rng.permutation(shape.stages)[:2].tolist())
    skips = [(skip_ends[0], skip_ends[1])] if skip_ends[1] > skip_ends[0] + 1 else []
    draft = random_compute_program(shape, random.Random(seed))
    program = compile(draft, skips=skips, buffer_sharing=slots or None)
    costs = Costs(F=1, I=1.5, W=0.5, B=2, send=0.25)
    machine = Machine(program, model, costs)
    assert machine.run()
    begins = program.offsets.tolist()
    end = simulate(program, costs, progress_model=model).spans["end"]
    for (rank, k), end_time in machine.ended.items():
        assert end[begins[rank] + k] == pytest.approx(end_time)


def test_memory_counts_skip_on_both_ranks() -> None:
    shape, skip = PipelineShape(3, 4), 10.0
    program = compile(schedules.one_f_one_b, shape, skips=((0, 2),), buffer_sharing="minimal")
    min_slots = dict(zip(SLOT_KINDS, count_min_slots(program).T.tolist(), strict=True))
    # Rank 0 keeps its skip until it is sent. Rank 2 keeps it from its arrival until F uses it.
    assert min_slots[Value.SKIP_OUT] == [1, 0, 0] and min_slots[Value.SKIP_GRAD_OUT] == [0, 0, 1]
    assert (
        min_slots[Value.SKIP_IN][0]
        == min_slots[Value.SKIP_IN][1]
        == 0
        < min_slots[Value.SKIP_IN][2]
    )
    sizes = Sizes(skip=(skip, 0, 0))
    number = np.array(
        [
            sum(min_slots[kind][rank] for kind in min_slots if "SKIP" in kind.name)
            for rank in range(3)
        ]
    )
    assert simulate(program, sizes=sizes).peak_memory.tolist() == (skip * number).tolist()
    unslotted = compile(schedules.one_f_one_b, shape, skips=((0, 2),))
    assert simulate(unslotted, sizes=sizes).peak_memory.tolist() == [2 * 4 * skip, 0, 2 * 4 * skip]
    # On one rank the skip is handed over, and stays in place until it is used.
    vee = compile(schedules.zb_v, PipelineShape(2, 3, 2, "vee"), skips=((0, 3),))
    assert vee.used_opcodes.isdisjoint(SKIP_OPS)
    (first_rank, second_rank) = compute_footprints(vee, Sizes(skip=(skip, 0, 0, 0)))
    assert first_rank.total_bytes.max() >= skip
    assert first_rank.total_bytes[-1] == 0
    assert not second_rank.total_bytes.any()


def test_programs_without_skips_are_unchanged() -> None:
    program = compile(schedules.zb_h1, PipelineShape(4, 8))
    assert "skips" not in to_text(program) and len(Dataflow.from_program(program).givers) == 2
    assert not any(
        program.uses_value(INSTRUCTIONS[op].needs[0])
        for op in (Opcode.SendSkip, Opcode.SendSkipGrad)
    )
    assert compile(schedules.zb_h1, PipelineShape(4, 8), skips=()).digest == program.digest
    with_skips = compile(schedules.zb_h1, PipelineShape(4, 8), skips=[(0, 2)])
    assert replace(program, skips=((0, 2),)).digest not in (program.digest, with_skips.digest)
    assert len(Dataflow.from_program(with_skips).givers) == 3
    assert from_text(to_text(with_skips)) == with_skips
    assert from_text(to_text(with_skips)).skips == ((0, 2),)


def test_neighbor_stages_of_skips() -> None:
    program = compile(schedules.gpipe, PipelineShape(4, 1), skips=((0, 2), (1, 3)))
    assert program.neighbor_stages(PeerRule.NEXT).tolist() == [1, 2, 3, -1]
    assert program.neighbor_stages(PeerRule.PREVIOUS).tolist() == [-1, 0, 1, 2]
    assert program.neighbor_stages(PeerRule.SKIP_TO).tolist() == [2, 3, -1, -1]
    assert program.neighbor_stages(PeerRule.SKIP_FROM).tolist() == [-1, -1, 0, 1]
    index = Graph.from_program(program).index
    for rule, opposite_rule in pairwise((PeerRule.SKIP_TO, PeerRule.SKIP_FROM)):
        positions = index.positions[Opcode.Forward]
        skip_keys = index.find_neighbor_keys(rule, positions)
        back = index.find_neighbor_keys(
            opposite_rule, index.find_positions(Opcode.Forward, skip_keys)[skip_keys >= 0]
        )
        assert back.tolist() == index.key[positions][skip_keys >= 0].tolist()


REFUSED: list[tuple[object, str, str]] = [
    (3, "pairs of a source and a target stage", ""),
    ("0=2", "pairs of a source and a target stage", ""),
    (((0, 1, 2),), "pairs of a source and a target stage", ""),
    (((0, 9),), "the stages are 0 to 4", ""),
    (((2, 0),), "must lead to a later stage", ""),
    (((0, 1),), "neighbours", "return the value as another output of stage 0"),
    (((0, 2), (0, 4)), "two skips begin at stage 0", "skips=((0, 2), (2, 4))"),
    (((0, 2), (0, 3)), "two skips begin at stage 0", "skips=((0, 2),), and a boundary of several"),
    (((0, 4), (2, 4)), "two skips end at stage 4", "let stage 2 pass on both"),
    (((0, 2), (0, 2)), "two skips begin at stage 0", "remove one of the two"),
]


@pytest.mark.parametrize(("skips", "fact", "hint"), REFUSED, ids=str)
def test_invalid_skips_are_refused(skips: Any, fact: str, hint: str) -> None:
    with pytest.raises(ShapeError) as caught:
        compile(schedules.gpipe, PipelineShape(5, 4), skips=skips)
    assert fact in caught.value.fact and hint in caught.value.hint
    assert [*caught.value.fields] == ["skips"]


def test_eager_limit_needs_skip_size() -> None:
    """A skip of unknown size is not small."""
    program = compile(schedules.gpipe, PipelineShape(3, 2), skips=((0, 2),))
    for sizes in (Sizes(activation=16e6), Sizes(skip=16e6)):
        with pytest.raises(UsageError) as caught:
            check(program, eager_limit=512e3, sizes=sizes)
        assert caught.value.fields == ("sizes",)
        assert "activation=16e6, skip=16e6" in caught.value.hint
    check(program, eager_limit=512e3, sizes=Sizes(activation=16e6, skip=1e3))

    # Rank 0 sends its skip first, and rank 2 receives its activation first.
    hangs = to_text(program, folded=False)
    for original, replacement in (
        ("send_act 0.0\n  send_skip 0.0", "send_skip 0.0\n  send_act 0.0"),
        (
            "recv_skip 2.0\n  recv_skip 2.1\n  recv_act 2.0",
            "recv_act 2.0\n  recv_skip 2.0\n  recv_skip 2.1",
        ),
    ):
        assert original in hangs
        hangs = hangs.replace(original, replacement)
    with pytest.raises(DeadlockError) as deadlock:
        check(from_text(hangs), "per_device", sizes=Sizes(activation=16e6))
    assert deadlock.value.eager_limit is None and "finishes" not in deadlock.value.hint
    with pytest.raises(DeadlockError) as deadlock:
        check(from_text(hangs), "per_device", sizes=Sizes(activation=16e6, skip=1e3))
    assert deadlock.value.eager_limit == 1e3
