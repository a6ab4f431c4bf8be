"""Tests of torch's CSV: exports import again, and errors name the row and the column."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schedir.analysis.memory.unshard_counts import count_unshards
from schedir.compiler.compile import compile, finish_lowering, lower
from schedir.errors import (
    CompletenessError,
    CsvCellError,
    GroupError,
    LoweringLevelError,
    ReductionError,
    UsageError,
)
from schedir.io import torch_csv
from schedir.ir.isa.instructions import COMPUTE_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream
from schedir.ir.text_format import from_text
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.schedules import chimera, dualpipe_v, forward_only, gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import B, F, RankSchedule, overlapped_pair
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compute_programs
from schedir.verify.check import check
from tests.commands import run_command

GOLDEN = Path(__file__).parents[1] / "golden"


def list_compute_words(program: Program) -> list[list[int]]:
    return [s.words[np.isin(s.op, COMPUTE_OPS)].tolist() for s in program.streams]


@given(
    compute_programs().filter(lambda d: d.shape.placement_rows == 1),
    st.sampled_from(torch_csv.CSV_FORMATS),
)
def test_exported_csv_imports(draft: Program, form: str) -> None:
    assume(draft.shape.placement_rows == 1)
    lowered = lower(draft)
    imported = torch_csv.from_csv(torch_csv.to_csv(lowered, form), draft.name)
    if imported.is_draft:
        assert imported.digest == draft.digest
        assert torch_csv.to_csv(imported) == torch_csv.to_csv(draft)
        imported = lower(imported)
    else:
        imported = finish_lowering(imported)
    assert imported.digest == lowered.digest


@given(
    compute_programs(stages_per_rank=4).filter(lambda d: d.shape.placement_rows == 1),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_sharded_program_exports_and_imports(draft: Program, zero: int, active: int) -> None:
    """With zero=3, an import gathers no more often than the export, and its export is the same."""
    options: dict[str, Any] = (
        {"unsharded_stages": min(active, max(map(len, draft.shape.stages_on_rank)))}
        if zero == 3
        else {}
    )
    lowered = compile(draft, dp=2, zero=zero, **options)
    text = torch_csv.to_csv(lowered, "torch-2.13")
    imported = check(
        finish_lowering(replace(torch_csv.from_csv(text, draft.name, zero=zero), dp=2))
    )
    if zero < 3:
        assert imported.streams == lowered.streams and "SHARD" not in text
    assert list_compute_words(imported) == list_compute_words(lowered)
    assert torch_csv.to_csv(imported, "torch-2.13") == text
    before, after = count_unshards(lowered), count_unshards(imported)
    assert all(a <= b for a, b in zip(after.max_unsharded, before.max_unsharded, strict=True))
    assert after.reductions == before.reductions


def test_torch_unshards_are_kept_with_zero_3() -> None:
    text = (GOLDEN / "torch_interleaved_1f1b.csv").read_text()
    program = check(finish_lowering(torch_csv.from_csv(text, zero=3)))
    assert (
        count_unshards(program).unshards
        == [2] * 4
        == [slots.unsharded_params for slots in program.slots]
    )
    assert torch_csv.to_csv(program, "torch-2.13") == text
    assert "SHARD" not in torch_csv.to_csv(finish_lowering(torch_csv.from_csv(text)), "torch-2.13")


def test_repeated_reductions_are_not_exported() -> None:
    program = compile(
        interleaved, PipelineShape(2, 4, 2), dp=2, zero=2, reduce_scatter_at="each_backward"
    )
    assert torch_csv.to_csv(program) == torch_csv.to_csv(
        expand_schedule(interleaved, PipelineShape(2, 4, 2))
    )
    with pytest.raises(UsageError, match="gradients of a stage several times"):
        torch_csv.to_csv(program, "torch-2.13")


def test_import_reports_skipped_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["import", str(GOLDEN / "torch_interleaved_1f1b.csv"), "-o", "x.sched"]
    assert "skipped 8 UNSHARD" in run_command(capsys, *argv)
    assert "unshard" not in Path("x.sched").read_text()
    zero1 = run_command(capsys, *argv, "-O", "zero=1", "-O", "dp=2")
    assert "skipped 8 UNSHARD, because weights are not sharded" in zero1
    assert "skipped" not in run_command(capsys, *argv, "-O", "zero=3", "-O", "dp=2")
    assert "unshard 4" in Path("x.sched").read_text()


@pytest.mark.parametrize("form", torch_csv.CSV_FORMATS)
def test_overlapped_pairs_round_trip(form: str) -> None:
    program = compile(dualpipe_v, PipelineShape(3, 7, placement="vee"))
    text = torch_csv.to_csv(program, form)
    assert text.count(")OVERLAP_F_B") == sum(int(s.joined.sum()) for s in program.streams) > 0
    imported = torch_csv.from_csv(text)
    assert imported.shape == program.shape
    assert list_compute_words(imported) == list_compute_words(program)
    imported = lower(imported) if imported.is_draft else finish_lowering(imported)
    assert imported.streams == program.streams


def test_csv_formats_match_torch() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 2))
    assert torch_csv.to_csv(program) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert torch_csv.to_csv(program, "torch-2.13") == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1REDUCE_GRAD,1SEND_B1\n"
    )


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("0F0,0B0\n1F0,1B0\n", PipelineShape(2, 1)),
        ("0F0,2F0,2B0,0B0\r\n1F0,3F0,3B0,1B0\r\n", PipelineShape(2, 1, 2)),
        ("0F0,,,3F0,3B0,,,0B0\n,1F0,2F0,,,2B0,1B0,\n\n,,\n", PipelineShape(2, 1, 2, "vee")),
        ("1F0,1B0\n0F0,0B0\n", PipelineShape(2, 1, placement=(1, 0))),
        ('\ufeff"0F0", 1F0 ,1B0,0B0', PipelineShape(1, 1, 2)),
        (
            "0UNSHARD,0F0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD",
            PipelineShape(1, 1),
        ),
    ],
)
def test_shape_is_inferred(text: str, shape: PipelineShape) -> None:
    program = torch_csv.from_csv(text)
    assert program.shape == shape and program.is_draft


@pytest.mark.parametrize(
    ("text", "row", "column", "message"),
    [
        ("", 1, 1, "0F0"),
        ("\n,,\n", 1, 1, "0F0"),
        ("0UNSHARD,0RESHARD\n", 1, 1, "no cell has a microbatch"),
        ("time,loss\n1,2\n", 1, 1, "'time'"),
        ("0F0,0B0\n1F0,1SEND", 2, 2, "SEND_F"),
        ("0F0,0B\n", 1, 2, "0B0"),
        ("0F0,0B0,0REDUCE_GRAD0\n", 1, 3, "no microbatch"),
        ("0F0,0Q0\n", 1, 2, "'0Q0'"),
        ("0F0,-1F0\n", 1, 2, "'-1F0'"),
        ("0F0\t0B0\n", 1, 1, "is not an action"),
        ("0F0,0B0\n,,\n1F0,1B0\n", 2, 1, "rank 1"),
        ("0F0,0B0\n0F1,0B1\n", 2, 1, "stage 0 is on rank 0: '0F0' in row 1, column 1"),
        ("0F0,0B0,1RECV_B0\n1F0,1B0\n", 2, 1, "stage 1 is on rank 0"),
        ("0F0,0B0\n7F0,7B0\n", 2, 1, "no row has stage 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", 1, 2, "stage 1 has only 1 forwards"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n", 1, 2, "stage 1, but no row has this stage"),
        ("0RECV_F0,0F0,0B0,0SEND_B0\n", 1, 1, "stage -1"),
        ("0F0,0B1000000\n", 1, 2, "stage 0 has only 1 forwards"),
        ("0F0,0B99999999\n", 1, 2, "microbatches are allowed"),
        ("40000F0,0B0\n", 1, 1, "stages are allowed"),
        ("0F0,0F" + "1" * 100_000, 1, 2, "..."),
        ("0F0," + "x" * 200_000, 1, 1, "field limit"),
        ("(0F0;0B0)\n", 1, 1, "OVERLAP_F_B"),
        ("(0F0;0F1)OVERLAP_F_B\n", 1, 1, "a forward and a backward"),
        ("(0F0;0B0;0W0)OVERLAP_F_B\n", 1, 1, "a pair of actions"),
        ("(0F0;0UNSHARD)OVERLAP_F_B\n", 1, 1, "a pair of actions"),
        ("(0F0;0B0OVERLAP_F_B\n", 1, 1, "is not an action"),
        ("0F0;0B0\n", 1, 1, "hint: put commas between the actions"),
    ],
)
def test_bad_cell_errors_have_row_and_column(
    text: str, row: int, column: int, message: str
) -> None:
    with pytest.raises(CsvCellError) as caught:
        torch_csv.from_csv(text)
    error = caught.value
    assert (error.line, error.column) == (row, column)
    assert message in str(error) and len(str(error)) < 400
    assert str(error).startswith(f"row {row}, column {column}: ")


@pytest.mark.parametrize("form", torch_csv.CSV_FORMATS)
@pytest.mark.parametrize(
    "program",
    [
        compile(one_f_one_b, PipelineShape(3, 4)),
        compile(interleaved, PipelineShape(3, 6, 2)),
        compile(dualpipe_v, PipelineShape(3, 7, placement="vee")),
    ],
    ids=lambda p: p.name,
)
def test_missing_rows_are_refused(program: Program, form: str) -> None:
    rows = torch_csv.to_csv(program, form).splitlines(keepends=True)
    assert torch_csv.from_csv("".join(rows), ranks=3).shape == program.shape
    for kept_rows in (rows[:2], rows[:1], rows[:1] + rows[2:], rows[1:]):
        text = "".join(kept_rows)
        with pytest.raises(CsvCellError, match=f"for 3 ranks: rank {len(kept_rows)} has no row"):
            torch_csv.from_csv(text, ranks=3)
        if form != "torch" or program.shape.stages > 3 or kept_rows not in (rows[:2], rows[:1]):
            with pytest.raises(CsvCellError, match=r"no row has(?s:.*)missing|on rank"):
                torch_csv.from_csv(text)
    with pytest.raises(CsvCellError, match="3 rows for 2 ranks: row 3 has no rank"):
        torch_csv.from_csv("".join(rows), ranks=2)


def test_unsupported_instructions_are_not_exported() -> None:
    shape = PipelineShape(2, 4)
    with pytest.raises(CompletenessError):
        torch_csv.to_csv(compile(forward_only, shape))
    with pytest.raises(LoweringLevelError):
        torch_csv.to_csv(expand_schedule(gpipe, shape), "torch-2.13")
    with pytest.raises(UsageError):
        torch_csv.to_csv(compile(chimera, PipelineShape(2, 4, placement="mirror")))
    grouped = group_opposite_transfers(compile(one_f_one_b, shape))
    assert torch_csv.to_csv(grouped) == torch_csv.to_csv(compile(one_f_one_b, shape))
    with pytest.raises(GroupError) as caught:
        torch_csv.to_csv(grouped, "torch-2.13")
    assert len(caught.value.sites) == 2 and "send" in str(caught.value)

    def two_forwards(r: int, P: int, m: int) -> RankSchedule:
        return overlapped_pair(F, F) + 2 * B

    with pytest.raises(GroupError):
        torch_csv.to_csv(expand_schedule(two_forwards, PipelineShape(1, 2)))
    three = expand_schedule(gpipe, PipelineShape(1, 2)).streams[0].words | np.array(
        [0, 0, 1 << 56, 1 << 56]
    )
    with pytest.raises(GroupError):
        torch_csv.to_csv(Program("three", PipelineShape(1, 2), (Stream(three),)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "all"}, "the program offloads activations"),
        ({"recompute": "all"}, "only inside a backward"),
        ({"frozen_stages": 1}, "frozen"),
        ({"skips": ((0, 2),)}, "has skip connections, but torch's stages"),
        ({"tp": 2, "stage_segments": 3}, "collectives between the segments"),
        ({"dp": 2, "ep": 2, "stage_segments": "dc"}, "collectives between the segments"),
    ],
)
def test_programs_that_torch_cannot_run_are_not_exported(
    options: dict[str, Any], message: str
) -> None:
    program = compile(one_f_one_b, PipelineShape(3, 4), **options)
    for form in torch_csv.CSV_FORMATS:
        with pytest.raises(UsageError, match=message):
            torch_csv.to_csv(program, form)


def test_import_keeps_or_adds_reductions() -> None:
    """Without REDUCE_GRAD, torch does not scale a gradient and gives no warning."""
    program = compile(one_f_one_b, PipelineShape(2, 4))
    text = torch_csv.to_csv(program, "torch-2.13")
    one_is_missing = finish_lowering(torch_csv.from_csv(text.replace(",1REDUCE_GRAD", "")))
    with pytest.raises(ReductionError):
        check(one_is_missing)
    none_are_there = torch_csv.from_csv(re.sub(r",\dREDUCE_GRAD", "", text))
    assert check(finish_lowering(none_are_there)).streams == program.streams


# ---------------------------------------------------------------- commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", torch_csv.CSV_FORMATS)
def test_export_and_import_commands(
    capsys: pytest.CaptureFixture[str], folder: Path, form: str
) -> None:
    shape = ["--ranks", "4", "--microbatches", "8", "--stages-per-rank", "2"]
    out = run_command(capsys, "export", "interleaved", *shape, "--to", form, "-o", "my shape.csv")
    assert out == "wrote my shape.csv\n"
    program = compile(interleaved, PipelineShape(4, 8, 2), tp=2, clip_grad_norm=True)
    options = ["-O", "tp=2", "-O", "clip_grad_norm", "-O", "buffer_sharing=minimal"]
    out = run_command(capsys, "import", "my shape.csv", "-o", "x.sched", *options)
    imported = from_text((folder / "x.sched").read_text())
    assert out.startswith("wrote x.sched: 4 ranks, 8 stages, 8 microbatches, ")
    assert imported.name == "my_shape"
    assert imported.shape == program.shape
    assert imported.clip_grad_norm
    assert len(imported.slots) == 4
    if form == "torch":
        assert imported.streams == program.streams
    else:  # torch sends whole activations, and so do imported programs
        assert list_compute_words(imported) == list_compute_words(program)
    output = run_command(capsys, "export", "x.sched", "--to", form, "-o", "y.csv")
    assert output == "wrote y.csv\n"
    assert (folder / "y.csv").read_text() == (folder / "my shape.csv").read_text()
