"""Tests of chunks of a sequence: forwards start at the first, and backwards at the last."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from runpy import run_path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    EMPTY,
    B,
    Costs,
    F,
    I,
    Instr,
    PipelineShape,
    RankSchedule,
    W,
    check,
    compile,
    expand_schedule,
    from_text,
    to_text,
)
from schedir.analysis.memory.footprint import peak_in_flight
from schedir.analysis.progress_models import MODELS
from schedir.errors import OrderError, SchedirError, ScheduleError
from schedir.predict.simulate import simulate
from schedir.predict.what_if import advise
from schedir.schedules import forward_only, one_f_one_b
from schedir.training.config.config_file import read_config

ROOT = Path(__file__).parents[2]


@st.composite
def orders(draw: st.DrawFn) -> tuple[PipelineShape, list[tuple[str, int, int]]]:
    """Draw a shape of one rank and an order of its compute, with each input before its use."""
    segments, sequences, stages = (draw(st.integers(1, n)) for n in (3, 2, 2))
    shape = PipelineShape(1, segments * sequences, stages, sequence_chunks=segments)
    split = draw(st.booleans())
    ahead: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    for mb in range(shape.microbatches):
        for s in range(stages):
            ahead["F", s, mb] = [("F", s - 1, mb)] * (s > 0)
            backward_op = "I" if split else "B"
            ahead[backward_op, s, mb] = [("F", s, mb)] + [(backward_op, s + 1, mb)] * (
                s + 1 < stages
            )
            if split:
                ahead["W", s, mb] = [("I", s, mb)]
    done: list[tuple[str, int, int]] = []
    # Some orders keep the order of the chunks. Otherwise hardly any order would be legal.
    tidy = draw(st.booleans())
    while len(done) < len(ahead):
        ready = [i for i in ahead if i not in done and all(j in done for j in ahead[i])]
        if tidy:
            ready = [i for i in ready if find_out_of_order([*done, i], shape) is None] or ready
        done.append(draw(st.sampled_from(ready)))
    return shape, done


def find_out_of_order(
    done: list[tuple[str, int, int]], shape: PipelineShape
) -> tuple[str, int, int] | None:
    """Return the first instruction that runs before another chunk it should follow, or None."""
    for k, (op, s, mb) in enumerate(done):
        if op == "W":
            continue
        first_chunk = mb // shape.sequence_chunks * shape.sequence_chunks
        earlier = (
            range(first_chunk, mb)
            if op == "F"
            else range(mb + 1, first_chunk + shape.sequence_chunks)
        )
        if any((op, s, other_mb) not in done[:k] for other_mb in earlier):
            return op, s, mb
    return None


@given(orders())
def test_wrong_chunk_order_is_refused(
    given: tuple[PipelineShape, list[tuple[str, int, int]]],
) -> None:
    shape, done = given
    letters = {"F": F, "B": B, "I": I, "W": W}

    def mine(rank: int, ranks: int, microbatches: int) -> RankSchedule:
        return sum((letters[op][s].at(mb) for op, s, mb in done), EMPTY)

    drafted = expand_schedule(mine, shape)
    out_of_order = find_out_of_order(done, shape)
    if out_of_order is None:
        program = compile(drafted)
        assert from_text(to_text(program)) == program
        assert program.shape.sequence_chunks == shape.sequence_chunks
        return
    with pytest.raises(OrderError) as caught:
        compile(drafted)
    early_instr, late_instr = (cast("Instr", site.instr) for site in caught.value.sites)
    assert early_instr.op is late_instr.op and early_instr.stage == late_instr.stage
    assert early_instr.mb // shape.sequence_chunks == late_instr.mb // shape.sequence_chunks
    assert (early_instr.mb > late_instr.mb) is (str(early_instr)[0] == "F")
    texts = [f"{op} {s}.{mb}" for op, s, mb in done]
    assert texts.index(str(early_instr)) < texts.index(str(late_instr))
    # Without sequence chunks, any order is legal.
    assert compile(expand_schedule(mine, PipelineShape(1, shape.microbatches, shape.stages)))


def test_schedule_receives_sequence_chunks() -> None:
    received = set()

    def record_chunks(
        rank: int, ranks: int, microbatches: int, sequence_chunks: int
    ) -> RankSchedule:
        received.add(sequence_chunks)
        return microbatches * F

    expand_schedule(record_chunks, PipelineShape(2, 6, sequence_chunks=3))
    expand_schedule(record_chunks, PipelineShape(2, 6))
    assert received == {3, 1}


def test_sequence_chunks_change_digest() -> None:
    three, without_chunks = (
        compile(forward_only, PipelineShape(2, 6, sequence_chunks=n)) for n in (3, 1)
    )
    assert three.digest != without_chunks.digest
    assert "sequence_chunks" not in to_text(without_chunks)
    assert "sequence_chunks 3" in to_text(three)
    assert check(from_text(to_text(three))).shape == PipelineShape(2, 6, sequence_chunks=3)


def test_advice_keeps_chunk_order() -> None:
    """1F1B and others would be shorter, but compute something else."""

    def late(rank: int, ranks: int, microbatches: int) -> Any:
        yield microbatches * F
        for first_mb in range(0, microbatches, 2):
            yield B.at(first_mb + 1) + B.at(first_mb)

    run = simulate(compile(late, PipelineShape(2, 6, sequence_chunks=2)), Costs(F=(1, 2), B=(2, 4)))
    for change in advise(run, Costs(F=(1, 2), B=(2, 4)), late).changes:
        assert "GPipe" not in change.description and "one_f_one_b" not in change.description
        assert change.run.program.shape.sequence_chunks == 2
    with pytest.raises(SchedirError):
        compile(one_f_one_b, PipelineShape(2, 6, sequence_chunks=2))


def test_training_run_refuses_sequence_chunks(tmp_path: Path) -> None:
    (tmp_path / "p.sched").write_text(
        to_text(compile(forward_only, PipelineShape(1, 4, sequence_chunks=2)))
    )
    (tmp_path / "c.toml").write_text(f'[pipeline]\nschedule = "{tmp_path}/p.sched"\n')
    with pytest.raises(SchedirError, match="splits each sequence into 2 chunks"):
        read_config(str(tmp_path / "c.toml"))


def test_unknown_schedule_parameter_is_refused() -> None:
    def bound(
        rank: int, ranks: int, microbatches: int, sequence_chunks: int, more: int
    ) -> RankSchedule:
        return EMPTY

    with pytest.raises(ScheduleError, match="takes"):
        expand_schedule(bound, PipelineShape(1, 2, sequence_chunks=2))


def test_seq1f1b_example() -> None:
    """Seq1F1B finishes under every model, and has fewer activations in flight than 1F1B.

    With whole sequences it is 1F1B.
    """
    example = run_path(str(ROOT / "examples/seq1f1b.py"))
    for ranks in (1, 2, 3, 4):
        for segments in (1, 2, 3):
            shape = PipelineShape(ranks, 4 * segments, sequence_chunks=segments)
            program = compile(example["seq1f1b"], shape)
            for model in MODELS:
                check(program, model)
            if segments == 1:
                assert program.streams == compile(one_f_one_b, shape).streams
            # 1F1B would hold P - rank sequences of `segments` each.
            alive = [min(ranks - r - 1 + segments, 4 * segments) for r in range(ranks)]
            assert peak_in_flight(program).tolist() == alive
    plain, even, balanced = example["timelines"]()
    assert balanced.span < 0.8 * plain.span < 0.8 * even.span
    assert (balanced.peak_memory < 0.5 * plain.peak_memory.max()).all()
    printed = (ROOT / "docs/how-to/write-a-schedule.md").read_text()
    with redirect_stdout(StringIO()) as out:
        example["main"]()
    assert f"$ python examples/seq1f1b.py\n{out.getvalue()}```" in printed
