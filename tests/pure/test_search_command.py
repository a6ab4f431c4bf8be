"""Tests of `schedir search`: its output, the files it writes, and commands that read them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schedir
from schedir import Costs, PipelineShape, from_text, load_timeline, schedules, simulate
from schedir.commands.common.schedule_options import parse_costs
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError, SchedirError, UsageError
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.predict.calibrate import calibrate, fill_missing_backwards
from schedir.schedule_search.search_results import describe_numba
from tests.commands import ENV, run_command, run_refused_command

RUN = Path(__file__).parents[2] / "examples" / "traced.timeline"
OPTIONS = ("--ranks=4", "--microbatches=8", "--costs=F=2,I=2,W=1,send=0.1", "--max-evaluations=40")
COSTS, SHAPE = Costs(F=2, I=2, W=1, send=0.1), PipelineShape(4, 8)


def test_file_has_program_and_search_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("search", *OPTIONS, "--max-in-flight=4", "-o", "best.sched")
    output = run_command(capsys, *argv)
    text = Path("best.sched").read_text()
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert text.startswith("\n".join(comments))
    assert comments[0] == f"# schedir {shlex.join(argv)}"
    keys = [line.split(":")[0].removeprefix("# ") for line in comments[1:]]
    assert keys == ["shape", "costs", "limit", "span", "bound", "seed"]
    run = simulate(from_text(text), COSTS)
    assert (run.peak_in_flight <= 4).all()
    assert f"span {run.span:.6g}," in output and f"span: {run.span:.6g};" in text
    lower_bound = schedir.lower_bound(SHAPE, COSTS, max_in_flight=4)
    assert f"is shorter than {lower_bound.value:.6g}:" in output
    assert f"bound: {lower_bound.value:.6g};" in text
    assert lower_bound.explanation in output and lower_bound.explanation in text
    assert "zb_h1 " in output and "zb_h2 (7 in flight)" in output
    assert f"\nsearched {describe_numba('not needed')}\nwrote best.sched\n" in output
    assert output.endswith("wrote best.sched\n")


def test_bound_mentions_split_backwards_if_full_ones_are_shorter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ("search", "--ranks=4", "--microbatches=8", "--max-in-flight=4", "--max-evaluations=40")
    output = run_command(capsys, *shape, "--costs=F=1,B=1,I=1,W=1")
    assert "with split backwards within this memory is shorter than 27" in output
    assert "one_f_one_b 22" in output
    assert "split backwards" not in run_command(capsys, *shape, "--costs=F=1,B=2,I=1,W=1")


def test_equal_searches_write_equal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("search", *OPTIONS, "--max-in-flight=3", "--seed=7", "-o", "best.sched")
    run_command(capsys, *argv)
    first_bytes = Path("best.sched").read_bytes()
    run_command(capsys, *argv)
    assert Path("best.sched").read_bytes() == first_bytes


def test_every_command_accepts_found_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command(capsys, "search", *OPTIONS, "--max-in-flight=4", "-o", "best.sched")
    costs = OPTIONS[2]
    assert "search" in run_command(capsys, "check", "best.sched")
    for model in ("blocking_serial", "per_edge", "per_pair", "per_direction"):
        run_command(capsys, "check", "best.sched", f"--progress-model={model}")
    span = json.loads(run_command(capsys, "simulate", "best.sched", costs, "--json"))["span"]
    assert span == simulate(from_text(Path("best.sched").read_text()), COSTS).span
    run_command(capsys, "explain", "best.sched", costs)
    run_command(capsys, "print", "best.sched", "-o", "shown.sched")
    assert from_text(Path("shown.sched").read_text()) == from_text(Path("best.sched").read_text())
    run_command(capsys, "draw", "best.sched", costs)
    run_command(capsys, "draw", "best.sched", costs, "-o", "best.svg")
    run_command(capsys, "compare", "best.sched", "zb_h1", "--ranks=4", "--microbatches=8", costs)
    for form in ("torch", "torch-2.13"):
        run_command(capsys, "export", "best.sched", "--to", form, "-o", "best.csv")
        program = schedir.torch_csv.from_csv(Path("best.csv").read_text())
        assert program.shape == SHAPE
    run_command(
        capsys,
        "search",
        *OPTIONS,
        "--max-in-flight=4",
        "--initial-schedules",
        "best.sched",
        "zb_h1",
    )


def test_built_in_schedules_are_compared_at_same_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, shape in (
        ((), SHAPE),
        (("--stages-per-rank=2",), PipelineShape(4, 8, 2)),
        (("--placement=vee",), PipelineShape(4, 8, placement="vee")),
    ):
        row = json.loads(
            run_command(capsys, "search", *OPTIONS, *options, "--max-in-flight=9", "--json")
        )
        assert row["compared_schedules"]
        assert {compared_row["program"] for compared_row in row["compared_schedules"]}.isdisjoint(
            row["over_limit"]
        )
        lengths = [compared_row["objective_value"] for compared_row in row["compared_schedules"]]
        assert lengths == sorted(lengths)
        for compared_row in row["compared_schedules"]:
            program = compile(getattr(schedules, compared_row["program"]), shape, costs=COSTS)
            run = simulate(program, COSTS)
            assert run.span == compared_row["objective_value"] and run.peak_in_flight.max() <= 9
        for name, held in row["over_limit"].items():
            run = simulate(compile(getattr(schedules, name), shape))
            assert held == f"{run.peak_in_flight.max()} in flight"
        assert row["bound"] <= row["span"] and row["gap_to_bound"] == row["span"] / row["bound"] - 1


def test_limit_per_rank_is_compared_with_number_per_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = json.loads(run_command(capsys, "search", *OPTIONS, "--max-in-flight=9:2:2:2", "--json"))
    assert row["over_limit"]
    for name, text in row["over_limit"].items():
        peaks = simulate(compile(getattr(schedules, name), SHAPE)).peak_in_flight
        assert text == f"{':'.join(map(str, peaks))} in flight" and (peaks > [9, 2, 2, 2]).any()


def test_byte_limit_agrees_with_compile(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--sizes=activation=1MB,saved=1GB,deferred_wgrad=0.5GB,model_states=2GB",
        "--memory-limit=7GB",
    )
    sizes = Sizes(activation=1e6, saved=1e9, deferred_wgrad=0.5e9, model_states=2e9)
    row = json.loads(run_command(capsys, "search", *OPTIONS, *options, "--json"))
    fit = {compared_row["program"] for compared_row in row["compared_schedules"]}
    assert fit and row["over_limit"]
    for name in fit:
        compile(getattr(schedules, name), SHAPE, costs=COSTS, sizes=sizes, memory_limit=7e9)
    for name in row["over_limit"]:
        with pytest.raises(MemoryLimitError):
            compile(getattr(schedules, name), SHAPE, costs=COSTS, sizes=sizes, memory_limit=7e9)


def test_search_full_backwards_by_active_span(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "x.sched")
    output = run_command(
        capsys, "search", *OPTIONS, "--no-split-backward", "--objective=active_span", "-o", file
    )
    program = from_text(Path(file).read_text())
    assert BACKWARD_INPUT not in program.used_opcodes
    active_span = simulate(program, COSTS).active_span.max()
    assert f"longest active span {active_span:.6g}," in output
    assert "with full backwards is shorter" in output
    assert "zb_h1" not in output


def test_old_objective_name_is_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = schedir.lower_bound(SHAPE, COSTS, objective="active_span")
    assert schedir.lower_bound(SHAPE, COSTS, objective="own") == expected  # type: ignore[arg-type]
    command = ("search", *OPTIONS, "--objective=own", "--json")
    assert json.loads(run_command(capsys, *command))["objective"] == "active_span"


def test_costs_from_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search takes shape, mean times and unit from the run, and compares with its program."""
    run, file = load_timeline(RUN), str(tmp_path / "x.sched")
    options = ("--costs-from", str(RUN), "--max-evaluations=40", "--max-in-flight=12")
    output = run_command(capsys, "search", *options, "-o", file)
    program = from_text(Path(file).read_text())
    assert program.shape == run.program.shape
    costs = fill_missing_backwards(calibrate(run), run.program)
    predicted = simulate(program, costs)
    assert f"span {predicted.span:.6g} s" in output
    traced = simulate(
        run.program, costs, progress_model=run.progress_model, blocking_hosts=run.blocking_hosts
    )
    row = json.loads(run_command(capsys, "search", *options, "--json"))
    assert row["unit"] == "s"
    as_it_ran = simulate(
        program, costs, progress_model=run.progress_model, blocking_hosts=run.blocking_hosts
    ).span
    assert as_it_ran > predicted.span  # the hosts of the run wait too
    assert f"compared under per_edge, as in the run: search {as_it_ran:.6g} s, " in output
    assert {"program": "traced", "objective_value": traced.span} in row["compared_schedules"]
    assert f"which has {run.peak_in_flight.max()} in flight; " in output
    assert f"takes {traced.span:.6g} s under per_edge, 1.7% less than the run" in output
    assert "I and W cost half of one each" in output
    assert "cost half" not in run_command(capsys, "search", *options, "--no-split-backward")
    row = json.loads(run_command(capsys, "search", *options, "--microbatches=12", "--json"))
    assert "traced" not in [compared_row["program"] for compared_row in row["compared_schedules"]]


def test_run_with_unsupported_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search refuses features that it cannot ignore, and prints the options that it ignores."""
    run, best = str(tmp_path / "x.timeline"), str(tmp_path / "x.sched")
    for source in (["one_f_one_b", "-O", "frozen_stages=2"], ["one_f_one_b", "-O", "recompute=all"],
                   ["forward_only"], ["dualpipe"],
                   ["pipedream_2bw", "-O", "optimizer_steps=2"]):  # fmt: skip
        run_command(capsys, "simulate", *source, "-o", run)
        run_refused_command(capsys, "search", "--costs-from", run)
    run_command(capsys, "simulate", "gpipe", "-O", "tp=2", "-O", "clip_grad_norm", "-o", run)
    output = run_command(capsys, "search", "--costs-from", run, "--max-evaluations=40", "-o", best)
    assert (
        "the search ignores -O tp=2 -O clip_grad_norm of that run; schedir print FILE --relower"
        in output
    )
    run_command(
        capsys, "print", best, "--relower", "-O", "tp=2", "-O", "clip_grad_norm", "-o", best
    )
    assert from_text(Path(best).read_text()).clip_grad_norm


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"time_limit": float("nan")}, "time_limit"),
        ({"time_limit": True}, "time_limit"),
        ({"time_limit": "10"}, "time_limit"),
        ({"max_evaluations": 1.5}, "max_evaluations"),
        ({"seed": "x"}, "seed"),
        ({"initial_schedules": 3}, "Sequence"),
        ({"initial_schedules": ["zb_h1"]}, "zb_h1"),
        ({"max_in_flight": 2.5}, "max_in_flight"),
        ({"max_in_flight": lambda rank: None}, "max_in_flight"),
        ({"memory_limit": float("nan"), "sizes": Sizes(saved=1)}, "memory_limit"),
        ({"sizes": 3, "memory_limit": 4}, "Sizes"),
        ({"costs": 3}, "Costs"),
        ({"shape": 3}, "PipelineShape"),
        ({"objective": None}, "objective"),
        ({"split_backward": "no"}, "split"),
        ({"bound": 3}, "bound"),
        ({"max_in_flight": True}, "max_in_flight"),
        ({"memory_limit": 10**400, "sizes": Sizes(saved=1)}, "memory_limit"),
        ({"memory_limit": float("-inf"), "sizes": Sizes(saved=1)}, "memory_limit"),
        ({"time_limit": 10**400}, "time_limit"),
        ({"seed": True}, "seed"),
        ({"report": 5}, "report"),
    ],
)
def test_wrong_python_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shape": SHAPE, "max_evaluations": 5} | wrong
    with pytest.raises(SchedirError, match=message):
        schedir.search_schedule(**arguments)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1", None])
def test_wrong_time_limit_of_bound_is_refused(seconds: Any) -> None:
    with pytest.raises(UsageError):
        schedir.lower_bound(SHAPE, time_limit=seconds)


def test_missing_solver_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    # Its import fails as if it were not installed.
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert "schedir[solver]" in run_refused_command(capsys, "search", *OPTIONS, "--bound=solver")


# ---------------------------------------------------------------- progress, and interrupts


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
def test_interrupted_search_writes_best_schedule(tmp_path: Path) -> None:
    """The search is interrupted after its first progress line, and writes the best schedule."""
    costs = "F=1:1.2:0.9:1.4:0.8:1.1:1:1.3,I=1:1.1:0.9:1.2:1.3:0.8:1:0.7,W=0.7,send=0.05"
    argv = [sys.executable, "-m", "schedir", "search", "--ranks=8", "--microbatches=48"]
    argv += [f"--costs={costs}", "--max-in-flight=6", "--time-limit=300", "-o", "best.sched"]
    terminal, process_terminal = os.openpty()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        env=ENV,
        stdout=pipe,
        stderr=process_terminal,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            os.close(process_terminal)
            terminal_output = b""
            while b"lower bound" not in terminal_output:
                assert select.select([terminal], [], [], 100)[0]
                terminal_output += os.read(terminal, 1000)
            assert not (tmp_path / "best.sched").exists()
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    with contextlib.suppress(OSError):  # a closed terminal raises an error
        while chunk := os.read(terminal, 1000):
            terminal_output += chunk
    os.close(terminal)
    output = out.decode()
    assert process.returncode == 130
    assert " s: interrupted, this is the best schedule so far\n" in output
    assert terminal_output.endswith(b"\x1b[2K")  # the line is erased
    text = (tmp_path / "best.sched").read_text()
    assert "interrupted" in text.split("\nschedir 1\n")[0]
    run = simulate(from_text(text), parse_costs(costs))
    assert f"search: span {run.span:.6g}," in output and run.peak_in_flight.max() <= 6
    assert [path.name for path in tmp_path.iterdir()] == ["best.sched"]
