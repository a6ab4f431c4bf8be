"""Tests of microbatch chunks: their order, their overlap with collectives, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    check,
    compile,
    evaluation_program,
    from_text,
    schedules,
    simulate,
    split_costs,
    to_text,
)
from schedir.errors import SchedirError, ShapeError, UsageError
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import COMPUTE_OPS, Instr, Opcode, find_segment_collectives
from tests.commands import run_command
from tests.mutants import built_in_schedules
from tests.oracle_threads import verdict
from tests.pure.test_stage_segments import NAMES, refused, shape_of


@pytest.mark.parametrize("schedule", built_in_schedules(), ids=NAMES)
def test_built_in_schedules_in_chunks(schedule: Any) -> None:
    """Programs in chunks are legal under every model, and reduce in the same order.

    An independent machine agrees. If chunks have no extra cost, such a program is no slower and
    needs no more memory.
    """
    shape = shape_of(schedule)
    costs, sizes = Costs(F=6, B=12, I=6, W=6, tp_reduce=1), Sizes(activation=2.0, saved=12.0)
    try:
        unchunked = compile(schedule, shape, tp=2, stage_segments=3)
    except SchedirError:
        pytest.skip("not for this shape")
    program = compile(schedule, shape, tp=2, stage_segments=3, microbatch_chunks=2)
    assert check(program, "blocking_serial") and verdict(program, "per_edge").kind == "ok"
    assert from_text(to_text(program)) == program and len(program) > len(unchunked)
    assert program.reduces_in_microbatch_order == unchunked.reduces_in_microbatch_order
    unchunked_run, chunked_run = (
        simulate(
            source,
            split_costs(costs, 3, shape, chunks=n),
            sizes=split_costs(sizes, 3, shape, chunks=n),
        )
        for source, n in ((unchunked, 1), (program, 2))
    )
    assert chunked_run.span <= unchunked_run.span * (1 + 1e-9)
    assert (chunked_run.peak_memory <= unchunked_run.peak_memory * (1 + 1e-9)).all()


@given(st.integers(1, 16), st.integers(0, 1000), st.integers(0, 1000), st.booleans())
def test_chunked_product_overlaps_its_sum(n: int, g: int, s: int, back: bool) -> None:
    """A product of time g and its sum of time s overlap in n chunks without extra cost.

    They are two machines in a row with n equal jobs, so the time is
    g/n + (n - 1) max(g, s)/n + s/n. For many chunks it approaches max(g, s), as in T3 (arXiv
    2401.16677).
    """
    schedule = schedules.gpipe if back else schedules.forward_only
    program = compile(
        schedule,
        PipelineShape(1, 1),
        tp=2,
        stage_segments="f" if back else "g",
        microbatch_chunks=n,
    )
    chunk_costs = Costs(F=0, B=(0, g), tp_reduce=s) if back else Costs(F=(g, 0), tp_reduce=s)
    assert simulate(program, chunk_costs).span == g + (n - 1) * max(g, s) + s
    split = split_costs(
        chunk_costs, 1, PipelineShape(1, 1, 2), chunks=n
    )  # from the costs of a whole microbatch
    span = simulate(program, split).span
    assert span == pytest.approx(g / n + (n - 1) * max(g, s) / n + s / n, rel=1e-12)


def test_chunks_pass_through_segment_in_order() -> None:
    program = compile(
        schedules.zb_h1, PipelineShape(1, 2), tp=2, stage_segments="g", microbatch_chunks=2
    )
    instructions = [
        str(i)
        for i in program.streams[0]
        if i.op not in find_segment_collectives(sequence_parallel=False)
    ]
    assert instructions[:4] == ["F 0.0", "F 0.1", "F 1.0", "F 1.1"]
    assert instructions[4:8] == ["I 1.0", "I 1.1", "I 0.0", "I 0.1"]
    assert instructions[8:12] == ["W 1.0", "W 1.1", "W 0.0", "W 0.1"]
    assert program.shape.microbatches == 4 and program.shape.stages == 2
    without_segments = compile(schedules.one_f_one_b, PipelineShape(2, 3), microbatch_chunks=2)
    assert without_segments.shape == PipelineShape(2, 6)
    assert [str(i) for i in without_segments.streams[1] if i.op in (0, 1)] == [
        f"{op} 1.{2 * mb + k}" for mb in range(3) for op in "FB" for k in range(2)
    ]
    assert compile(schedules.gpipe, PipelineShape(2, 2), microbatch_chunks=1) == compile(
        schedules.gpipe, PipelineShape(2, 2)
    )


def test_draft_with_segments_is_compiled_in_chunks() -> None:
    drafted = compile(
        schedules.one_f_one_b, PipelineShape(1, 4), tp=2, stage_segments="gf", microbatch_chunks=2
    )
    text = "F 0.0; F 0.1; F 1.0; F 1.1; B 1.0; B 1.1; B 0.0; B 0.1"
    header = "stages_per_rank 2 placement 0,0 tp 2\nmeets g"
    draft = from_text(f"schedir 1\nprogram p\nranks 1 microbatches 2 {header}\nrank 0\n  {text}")
    assert (
        compile(draft, microbatch_chunks=3).segment_boundaries == "g"
        and drafted.segment_boundaries == "gf"
    )


def test_chunks_keep_updates_rows_and_sequences() -> None:
    """A chunk belongs to the update, the placement row and the sequence of its microbatch."""
    program = compile(
        schedules.pipedream_2bw,
        PipelineShape(2, 4, optimizer_steps=2, weight_delay=1),
        tp=2,
        stage_segments=3,
        microbatch_chunks=3,
    )
    assert program.shape.optimizer_steps == 2 and program.shape.microbatches_per_update == 6
    program = compile(
        schedules.chimera,
        PipelineShape(2, 4, 2, "mirror"),
        tp=2,
        stage_segments=3,
        microbatch_chunks=2,
    )
    assert program.shape.microbatch_row_offsets == (0, 4, 8)
    shape = PipelineShape(2, 4, sequence_chunks=2)
    text = "F 0.0; F 0.1; F 0.2; F 0.3; B 0.1; B 0.0; B 0.3; B 0.2"
    header = "stages_per_rank 1 placement 0 segments 2"
    draft = from_text(f"schedir 1\nprogram p\nranks 1 microbatches 4 {header}\nrank 0\n  {text}")
    microbatches = [
        i.mb for i in compile(draft, microbatch_chunks=2).streams[0] if str(i)[0] in "FB"
    ]
    assert microbatches == [0, 2, 1, 3, 4, 6, 5, 7, 1, 3, 0, 2, 5, 7, 4, 6]
    costs = split_costs(Costs(F=((1, 2, 3, 4),), B=2), 1, shape, chunks=2)
    assert costs.F == ((0.5, 1.0, 0.5, 1.0, 1.5, 2.0, 1.5, 2.0),) and costs.B == 1


def test_activations_are_counted_in_whole_microbatches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk counts as a part of an activation in `--max-activations`, tables and pictures."""
    for argv in (
        ("compare", "gpipe", "one_f_one_b"), ("recommend", "--max-activations=2",
                                              "--stages-per-rank=1"),
    ):  # fmt: skip
        rows = {
            chunks: json.loads(
                run_command(
                    capsys, *argv, "--ranks=2", "--microbatches=4", "-O", "stage_segments=3", "-O",
                    "tp=2",
                    "--costs=F=1,B=2,tp_reduce=1", "-O", f"microbatch_chunks={chunks}", "--json",
                )
            )
            for chunks in (1, 2)
        }  # fmt: skip
        peaks = [
            {r["program"]: r["peak_activations"] for r in rows_of_chunks}
            for rows_of_chunks in rows.values()
        ]
        assert peaks[0]["one_f_one_b"] == peaks[1]["one_f_one_b"] == 2
        assert peaks[0].get("gpipe") == peaks[1].get("gpipe") == {"compare": 4}.get(argv[0])
    drawn_axes = list[Any]()
    monkeypatch.setattr("schedir.viz.save", lambda figure, path: drawn_axes.append(figure.axes[0]))
    for chunks in (1, 2):
        run_command(
            capsys, "compare", "gpipe", "one_f_one_b", "--ranks=2", "--microbatches=4", "-O",
            "stage_segments=3",
            "-O", "tp=2", "-O", f"microbatch_chunks={chunks}", "--tradeoff", "-o", "x.png",
        )  # fmt: skip
    assert [a.collections[-1].get_offsets()[:, 0].tolist() for a in drawn_axes] == 2 * [[4, 2]]


def test_invalid_chunks_are_refused() -> None:
    def compile_in_chunks(chunks: Any) -> Any:
        return lambda: compile(
            schedules.gpipe, PipelineShape(2, 2), tp=2, stage_segments="g", microbatch_chunks=chunks
        )

    for invalid in (0, 2.5, True, "x", (1, 2)):
        refused(compile_in_chunks(invalid), ShapeError, "microbatch_chunks")
    refused(compile_in_chunks(2**20), ShapeError, "microbatches must be from 1 to")
    odd_shape = PipelineShape(2, 3, 2, "mirror")
    refused(
        lambda: compile(schedules.chimera, odd_shape, microbatch_chunks=2),
        UsageError, "the shares of 3 microbatches", "[2, 3]", "[3, 6]",
    )  # fmt: skip
    refused(
        lambda: split_costs(Costs(), 1, odd_shape, chunks=0), ShapeError, "chunks must be from 1"
    )


# ---------------------------------------------------------------- skips, holders, evaluation

WITH_SKIPS: dict[Any, tuple[PipelineShape, tuple[tuple[int, int], ...]]] = {
    schedules.one_f_one_b: (PipelineShape(3, 4), ((0, 2),)),
    schedules.zb_v: (PipelineShape(2, 4, 2, "vee"), ((0, 3),)),
    schedules.interleaved: (PipelineShape(2, 4, 3), ((0, 5), (1, 4))),
    schedules.dualpipe: (PipelineShape(4, 8, 2, "mirror"), ((0, 2), (1, 3))),
    schedules.pipedream_2bw: (PipelineShape(3, 6, optimizer_steps=2, weight_delay=1), ((0, 2),)),
    schedules.forward_only: (PipelineShape(3, 2), ((0, 2),)),
}


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(WITH_SKIPS, key=lambda checked: str(checked.__name__))),
    st.integers(2, 3), st.sampled_from([1, 2, "gf"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_chunks_with_skips_replicas_and_evaluation(
    schedule: Any, chunks: int, pieces: Any, skipping: bool, overlap: bool
) -> None:
    """Chunks and their skips pass through the same ranks and stages as their microbatch.

    This holds for evaluations too. `check` and an independent machine agree.
    """
    shape, skips = WITH_SKIPS[schedule]
    options: dict[str, Any] = {
        "tp": 2,
        "stage_segments": pieces,
        "skips": skips if skipping else None,
    }
    unchunked = compile(schedule, shape, **options)
    program = compile(schedule, shape, microbatch_chunks=chunks, overlap=overlap, **options)
    assert len(program.skips) == len(unchunked.skips) == len(skips) * skipping
    for checked in (program, evaluation_program(program)):
        assert check(checked, "per_edge") and verdict(checked, "per_edge").kind == "ok"
    for chunked, expected_program in zip(
        (program, evaluation_program(program)),
        (unchunked, evaluation_program(unchunked)),
        strict=True,
    ):
        for rank, stream in enumerate(expected_program.streams):
            expected = list_chunk_instructions(stream, 1, 0)
            for chunk in range(chunks):
                assert list_chunk_instructions(chunked.streams[rank], chunks, chunk) == expected


def list_chunk_instructions(
    stream: Iterable[Instr], chunks: int, chunk: int
) -> list[tuple[Opcode, int, int]]:
    """Return the computes of one chunk of each microbatch in order, then its skips sorted."""
    instructions = [
        (i.op, i.stage, i.mb // chunks) for i in stream if i.mb % chunks == chunk and i.mb >= 0
    ]
    skips = sorted(
        instruction for instruction in instructions if "Skip" in Opcode(instruction[0]).name
    )
    return [instruction for instruction in instructions if instruction[0] in COMPUTE_OPS] + skips
