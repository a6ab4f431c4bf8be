"""Tests of options of the command line that depend on each other or on a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import schedir
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.schedules import interleaved, zb_v
from tests.commands import run_command, run_refused_command


def test_run_is_checked_under_its_progress_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = schedir.compile(
        zb_v, PipelineShape(2, 8, placement="vee"), progress_model="per_edge", overlap=True
    )
    schedir.save_timeline(schedir.simulate(program, progress_model="per_edge"), "x.timeline")
    assert "finish under per_edge, but not under per_pair" in run_command(
        capsys, "check", "x.timeline"
    )
    assert "wait for each other" in run_refused_command(
        capsys, "check", "x.timeline", "--progress-model=per_device"
    )
    run_command(capsys, "export", "x.timeline", "--to", "torch", "-o", "x.csv")


def test_compare_divides_reduction_cost_among_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`compare` takes costs of a rank. A stage with half of its weights takes half of the time."""
    costs = "--costs=F=1,B=2,reduce_grads=4"
    alone, compared = (
        json.loads(run_command(capsys, *argv, "-O", "dp=2", "--json"))
        for argv in (
            ("simulate", "interleaved", "--costs=F=0.5,B=1,reduce_grads=2"),
            ("compare", "interleaved", "one_f_one_b", costs),
        )
    )
    assert compared[0]["span"] == alone["span"]
    unsegmented = json.loads(
        run_command(capsys, "simulate", "one_f_one_b", costs, "-O", "dp=2", "--json")
    )
    assert compared[1]["span"] == unsegmented["span"]


def test_overlapped_pairs_do_not_make_stage_slow(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage with more pairs is not reported as slow."""
    assert "x the mean" not in run_command(
        capsys, "explain", "dualpipe_v", "--costs=F=1,B=2,send=0.1"
    )
    slow = "--costs=F=1:1:1:1.5,B=2:2:2:3,send=0.1"
    assert "it takes 0.89x the mean" in run_command(capsys, "explain", "one_f_one_b", slow)


def test_size_with_or_without_leading_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """A number may be given with or without a leading 0."""
    for half in ("0.5GB", ".5GB", "500MB", "5e2 MB"):
        assert "500 MB" in run_command(capsys, "simulate", "one_f_one_b", f"--sizes=saved={half}")


def test_print_compute_only_reads_all_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command(
        capsys,
        "print",
        "gpipe",
        "--compute-only",
        "-O",
        "tp=2",
        "-O",
        "clip_grad_norm",
        "-o",
        "d.sched",
    )
    draft = schedir.from_text(Path("d.sched").read_text())
    assert draft.is_draft and (draft.tp, draft.clip_grad_norm) == (2, True)
    assert "no size 'nonsense'" in run_refused_command(
        capsys, "print", "d.sched", "--sizes=nonsense=1"
    )


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("overlaps", "did you mean 'overlap'?"),
        ("colour", "the options are shape, tp, dp, progress_model, costs"),
    ],
)
def test_unknown_compile_option_is_refused(option: str, hint: str) -> None:
    options: dict[str, Any] = {option: True}
    with pytest.raises(schedir.errors.UsageError) as error:
        schedir.compile(interleaved, PipelineShape(2, 2), **options)
    assert error.value.fields == (option,) and error.value.hint.startswith(hint)
