"""Tests of the output of commands for programs with ZeRO, and of their refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedir import PipelineShape, compile, schedules
from schedir.analysis.memory.unshard_counts import count_unshards, describe_sharding
from schedir.ir.text_format import to_text
from tests.cases import cases, each_value
from tests.commands import run_command

SHAPE_OPTIONS = ["--ranks=2", "--microbatches=4", "--stages-per-rank=4"]


@pytest.mark.parametrize("command", ["check", "simulate"])
def test_unshard_count_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The number is that of the program. Without ZeRO, the commands print none."""
    program = compile(schedules.looped_bfs, PipelineShape(2, 4, 4), dp=2, zero=3)
    (number,) = {[i.op.name for i in stream].count("Unshard") for stream in program.streams}
    out = run_command(capsys, command, "looped_bfs", *SHAPE_OPTIONS, "-O", "dp=2", "-O", "zero=3")
    assert f"each rank gathers weights {number} times per step" in out
    facts = json.loads(
        run_command(
            capsys, command, "looped_bfs", *SHAPE_OPTIONS, "-O", "dp=2", "-O", "zero=3", "--json"
        )
    )
    assert (facts["zero"], facts["unshards"]) == (3, [number, number])
    assert "gathers" not in run_command(capsys, command, "looped_bfs", *SHAPE_OPTIONS, "-O", "dp=2")
    assert "unshards" not in run_command(
        capsys, command, "looped_bfs", *SHAPE_OPTIONS, "-O", "dp=2", "--json"
    )


@pytest.mark.parametrize(("zero", "command"), each_value([1, 2, 3], ["check", "simulate"]))
def test_zero_with_one_replica_is_reported(
    zero: int, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_command(capsys, command, "looped_bfs", *SHAPE_OPTIONS, "-O", f"zero={zero}")
    assert f"zero {zero} saves no memory: dp is 1" in out


def test_compare_has_unshard_column(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "looped_bfs", "interleaved", *SHAPE_OPTIONS, "-O", "dp=2"]
    heads, _, *rows = run_command(capsys, *argv, "-O", "zero=3").splitlines()
    assert heads.endswith("gathers")
    for name, row in zip(("looped_bfs", "interleaved"), rows, strict=True):
        times = count_unshards(
            compile(getattr(schedules, name), PipelineShape(2, 4, 4), dp=2, zero=3)
        ).unshards
        assert row.endswith(f"  {min(times)} to {max(times)}") or row.endswith(f"  {times[0]}")
    assert "gathers" not in run_command(capsys, *argv)


@pytest.mark.parametrize("reduce_at", cases(["each_backward"], ["update_end"]))
def test_recommend_ranks_all_schedules(reduce_at: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranking includes schedules that only run forward and reduce nothing."""
    out = run_command(
        capsys,
        "recommend",
        "--ranks=2",
        "--microbatches=4",
        "-O",
        "dp=2",
        "-O",
        "zero=2",
        "-O",
        f"reduce_scatter_at={reduce_at}",
    )
    assert "dualpipe  " in out and "refused dualpipe" not in out
    program = compile(
        schedules.forward_only, PipelineShape(2, 4), dp=2, zero=2, reduce_scatter_at=reduce_at
    )
    assert count_unshards(program).reductions == [0, 0]


def test_zero_levels_name_sharded_values() -> None:
    descriptions = [
        describe_sharding(compile(schedules.gpipe, PipelineShape(2, 4), dp=4, zero=zero))
        for zero in range(4)
    ]
    assert descriptions[0] == ""
    assert descriptions[1].startswith("zero 1: optimizer state split into 4 shards")
    assert descriptions[2].startswith("zero 2: gradients and optimizer state split into 4 shards")
    assert descriptions[3].startswith(
        "zero 3: weights, gradients and optimizer state split into 4 shards"
    )


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "looped_bfs", "zb_v", "chimera"])
@pytest.mark.parametrize("zero", [1, 3])
def test_max_unsharded_stages_match_instructions(name: str, zero: int) -> None:
    """The expected number is counted instruction by instruction."""
    schedule = getattr(schedules, name)
    v = {"interleaved": 2, "looped_bfs": 2, "zb_v": 2, "chimera": 2}.get(name, 1)
    placement = {"zb_v": "vee", "chimera": "mirror"}.get(name, "loop")
    program = compile(schedule, PipelineShape(2, 4, v, placement), dp=2, zero=zero)
    for stream, max_unsharded in zip(
        program.streams, count_unshards(program).max_unsharded, strict=True
    ):
        unsharded, peak = set[int](), 0
        for i in stream:
            if i.op.name == "Unshard":
                unsharded.add(i.stage)
            elif i.op.name == "Reshard":
                unsharded.remove(i.stage)
            peak = max(peak, len(unsharded))
        assert max_unsharded == peak and not unsharded


def test_relower_drops_options_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program lowered again at another level drops options without effect."""
    path = str(tmp_path / "one.sched")
    (tmp_path / "one.sched").write_text(
        to_text(
            compile(schedules.interleaved, PipelineShape(2, 4, 2), dp=2, zero=3, unsharded_stages=1)
        )
    )
    assert "at most 1 of their 2 stages" in run_command(capsys, "check", path, "--relower")
    assert "at most 2 of its 2 stages" in run_command(
        capsys, "check", path, "--relower", "-O", "zero=1"
    )
    assert "zero" not in run_command(capsys, "check", path, "--relower", "-O", "zero=0")


def test_recommend_names_refused_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_command(
        capsys,
        "recommend",
        "--ranks=2",
        "--microbatches=4",
        "-O",
        "dp=2",
        "-O",
        "zero=3",
        "-O",
        "unsharded_stages=1",
    )
    assert (
        "refused dualpipe, dualpipe_v: unsharded_stages is 1, but one group of instructions uses 2"
        in out
    )


def test_found_program_is_relowered_with_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of `search --zero` contains these options of `--relower`."""
    monkeypatch.chdir(tmp_path)
    shape = ("--ranks=2", "--microbatches=4", "--max-evaluations=1")
    run_command(capsys, "search", *shape, "-o", "found.sched")
    options = ("--relower", "-O", "dp=2", "-O", "zero=3")
    facts = json.loads(run_command(capsys, "simulate", "found.sched", *options, "--json"))
    assert (facts["zero"], facts["unshards"]) == (3, [1, 1])


@pytest.mark.parametrize(
    ("zero", "costs", "names", "command"),
    each_value(
        [
            (0, "unshard=2,reduce_scatter=1", ["unshard", "reduce_scatter"]),
            (3, "reduce_grads=2,unshard=1", ["reduce_grads"]),
            (0, "reduce_grads=2", []),
            (0, "reduce_grads=2,unshard=0", []),  # a free cost may be absent
            (3, "unshard=1,reduce_scatter=1", []),
        ],
        ["simulate", "draw", "explain", "compare"],
    ),
)
def test_unused_costs_are_reported(
    zero: int, costs: str, names: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--ranks=2", "--microbatches=4", "-O", "dp=2", "-O", f"zero={zero}")
    out = run_command(capsys, command, "one_f_one_b", *shape, f"--costs=F=1,B=2,{costs}")
    line = f"the cost of {' and '.join(names)} is not used: with zero {zero}, programs use "
    assert line in out if names else "is not used" not in out
    if command in ("simulate", "explain"):
        argv = (*shape, f"--costs=F=1,B=2,{costs}", "--json")
        assert (
            json.loads(run_command(capsys, command, "one_f_one_b", *argv)).get("unused_costs", [])
            == names
        )


def test_cost_used_by_one_compared_program_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{zero}.sched" for zero in (0, 3)]
    for zero, file in zip((0, 3), files, strict=True):
        file.write_text(
            to_text(compile(schedules.one_f_one_b, PipelineShape(2, 4), dp=2, zero=zero))
        )
    costs = "--costs=F=1,B=2,reduce_grads=2,unshard=1,reduce_scatter=1"
    assert "is not used" not in run_command(capsys, "compare", *map(str, files), costs)
    assert "is not used" in run_command(capsys, "compare", str(files[0]), costs)
