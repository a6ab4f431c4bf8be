"""Tests of the command line: output, errors and exit codes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schedir
from schedir.__main__ import main
from schedir.analysis.progress_models import MODELS
from schedir.commands import check
from schedir.commands.common import progress_bar
from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.text_format import from_text, to_text
from schedir.schedules import get_built_in_schedules, gpipe, one_f_one_b
from schedir.schedules.schedule_expansion import expand_schedule
from tests.commands import ENV, run_command, run_process, run_refused_command

PAIRED_SCHEDULE = """
from schedir import B, F

def in_pairs(rank, ranks, microbatches):
    return microbatches // 2 * (2 * F + 2 * B)
"""
# Both ranks send first. The program finishes if each direction has a queue, and hangs with one.
ONE_QUEUE_DEADLOCK = """schedir 1
program narrow
ranks 2  microbatches 2

rank 0
  F 0.0; send_act 0.0; F 0.1; send_act 0.1
  recv_grad 0.0; B 0.0; recv_grad 0.1; B 0.1
  reduce_grads 0; step
rank 1
  recv_act 1.0; F 1.0; B 1.0; send_grad 1.0
  recv_act 1.1; F 1.1; B 1.1; send_grad 1.1
  reduce_grads 1; step
"""


@pytest.fixture(scope="module")
def program_text() -> str:
    return to_text(compile(one_f_one_b, PipelineShape(4, 8), tp=2, clip_grad_norm=True))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program_text: str) -> Path:
    """Run every test in a new folder that has a schedule file and a program file."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PAIRED_SCHEDULE)
    Path("f.sched").write_text(program_text)
    return tmp_path


# ---------------------------------------------------------------- the command as a user types it


def test_print_in_process() -> None:
    completed = run_process("print", "mine.py:in_pairs", "--ranks", "4", "--microbatches", "8")
    assert (completed.returncode, completed.stderr) == (0, "")
    program = from_text(completed.stdout)
    assert (program.name, program.shape) == ("in_pairs", PipelineShape(4, 8))
    refusal = run_process("print", "gpip")
    assert (refusal.returncode, refusal.stdout) == (2, "")
    assert refusal.stderr == (
        "UsageError: 'gpip' is not a built-in schedule, a file.py:function, a file.sched or a "
        "file.timeline\n"
        "  hint: did you mean 'gpipe'?\n"
    )


def test_traces_as_source_hint_at_import(capsys: pytest.CaptureFixture[str]) -> None:
    Path("traces").mkdir()
    # The folder has no traces yet.
    assert "schedir import" not in run_refused_command(capsys, "explain", "traces")
    files = ["traces/rank0.json", "traces/rank1.json"]
    for file in files:
        Path(file).write_text("{}")
    hint = "hint: schedir import traces -o run.timeline reads torch.profiler traces of all ranks"
    for argv in (["explain", "traces"], ["explain", *files], ["draw", *files],
                 ["calibrate", files[0]], ["compare", "gpipe", "traces"]):  # fmt: skip
        assert hint in run_refused_command(capsys, *argv)


def test_run_folder_as_source_hints_at_its_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/trace").mkdir(parents=True)
    Path("out/trace/measured.timeline").touch()
    Path("out/summary.json").write_text("{}")
    for source in ("out", "out/trace", "out/summary.json"):
        output = run_refused_command(capsys, "explain", source)
        assert "hint: did you mean out/trace/measured.timeline?" in output


def test_train_help_lists_settings(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_command(capsys, "train", "--help")
    lines = {
        line.split()[0]: line
        for line in out.splitlines()
        if line.startswith(("  ", "[")) and not line.startswith(" " * 6)
    }
    assert "      The number of seconds after SIGTERM in which" in out
    assert {"[model]", "[pipeline]", "[data]", "[train]", "[output]"} <= lines.keys()
    assert lines["schedule"].endswith('"one_f_one_b"') and lines["betas"].endswith("[0.9, 0.95]")
    assert lines["layers_per_stage"].endswith("integers")
    assert max(map(len, out.splitlines())) <= 100


def test_closed_pipe_exits_silently() -> None:
    line = f"{sys.executable} -m schedir print gpipe --microbatches 1000 --no-repeat | head -1"
    script = ["bash", "-o", "pipefail", "-c", line]
    completed = subprocess.run(script, capture_output=True, text=True, env=ENV, timeout=120)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "schedir 1\n", "")


@pytest.mark.parametrize("command", ["print", "simulate"])  # one prints text, one a table
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_is_reported(command: str) -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "schedir", command, "gpipe"]
        completed = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=ENV)
    assert completed.returncode == 2
    assert completed.stderr.startswith("UsageError: cannot write to standard")


# One command writes to standard output, one to a file.
@pytest.mark.parametrize("argv", ["print gpipe", "print gpipe -o x.sched"])
def test_closed_output_and_error_do_not_fail_command(argv: str) -> None:
    """Commands succeed and write their files if standard output and error are closed."""
    line = f"{sys.executable} -m schedir {argv} >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], env=ENV).returncode == 0
    if argv.endswith(".sched"):
        assert from_text(Path("x.sched").read_text()).name == "gpipe"


def test_refused_command_with_closed_output_exits_with_2() -> None:
    line = f"{sys.executable} -m schedir print nothing >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], env=ENV).returncode == 2


def test_version_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "--version") == f"schedir {schedir.__version__}\n"


def test_interrupt_exits_with_130() -> None:
    Path("slow.py").write_text(
        "import sys, time\ndef f(r, P, m):\n    print('here', flush=True)\n    time.sleep(60)\n"
    )
    argv = [sys.executable, "-m", "schedir", "print", "slow.py:f"]
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored under nohup
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == b"here\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert child.stderr.read() == b""


def test_internal_error_is_reported_as_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "make_request", None)
    assert main(["check", "gpipe"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("this is a bug of schedir\nTraceback")


def _run_on_terminal(stream: str, *argv: str, **env: str) -> tuple[str, str]:
    """Return what a command prints to a stream that is a terminal, and to the other stream."""
    terminal, child_terminal = pty.openpty()
    streams: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        stream: child_terminal,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "schedir", *argv], **streams, env=ENV | {"TERM": "xterm"} | env
    ) as child:
        os.close(child_terminal)
        raw = b""
        try:
            while chunk := os.read(terminal, 4096):
                raw += chunk
        except OSError:  # a terminal raises this when the process has closed it
            os.close(terminal)
        other = b"".join(pipe.read() for pipe in (child.stdout, child.stderr) if pipe is not None)
        assert child.wait(60) == 0
    return raw.decode().replace("\r\n", "\n"), other.decode()


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_is_printed_only_on_terminals(no_color: str) -> None:
    out, errors = _run_on_terminal("stdout", "print", "gpipe", NO_COLOR=no_color)
    assert not errors and ("\x1b[" in out) == (not no_color)
    assert from_text(re.sub(r"\x1b\[[\d;]*m", "", out)) == compile(gpipe, PipelineShape(4, 8))


def test_search_progress_is_shown_on_terminal_and_erased() -> None:
    command = ["search", "--costs", "F=1,I=1,W=1"]  # the search ends in a few milliseconds
    errors, out = _run_on_terminal("stderr", *command, COLUMNS="100")
    assert "lower bound 27: nothing to gain" in errors
    assert errors.endswith("\x1b[2K")  # the line is erased
    assert out.startswith("search: span 27") and "\x1b" not in out
    # Without a terminal there is no progress.
    assert not run_process(*command).stderr


def test_long_command_shows_progress_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "DELAY", 0)
    for is_terminal in True, False:
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        main(["check", "zb_h1", "--ranks", "32", "--microbatches", "500"])
        assert ("schedir check" in capsys.readouterr().err) == is_terminal
        # The invalid port ends the command. With a valid port it would run until an interrupt.
        main(["studio", "--port", "99999", "--no-browser", "--no-code"])
        assert "\x1b" not in capsys.readouterr().err


# ---------------------------------------------------------------- show


def test_print_options_select_form(capsys: pytest.CaptureFixture[str]) -> None:
    program, compute = (
        compile(gpipe, PipelineShape(2, 4)),
        expand_schedule(gpipe, PipelineShape(2, 4)),
    )
    shape = ["--ranks", "2", "--microbatches", "4"]
    assert run_command(capsys, "print", "gpipe", *shape) == to_text(program)
    assert run_command(capsys, "print", "gpipe", *shape, "--no-repeat") == to_text(
        program, folded=False
    )
    assert run_command(capsys, "print", "gpipe", *shape, "--compute-only") == to_text(compute)


def test_printed_file_is_read_back(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = (
        "--stages-per-rank 2 -O tp=2 -O dp=3 -O tied_weights -O clip_grad_norm "
        "--progress-model blocking_serial "
        "--costs F=1,B=3"
    )
    assert run_command(capsys, "print", "interleaved", *options.split(), "-o", "x.sched") == (
        "wrote x.sched\n"
    )
    program = from_text((folder / "x.sched").read_text())
    assert (program.tp, program.dp, program.tied_weights, program.clip_grad_norm) == (
        2,
        3,
        ((0, 7),),
        True,
    )
    assert program.shape == PipelineShape(4, 8, 2)
    assert run_command(capsys, "print", "x.sched") == to_text(program)
    same_options = "--stages-per-rank 2 -O tp=2 -O tied_weights --ranks 4 --placement loop"
    assert run_command(capsys, "print", "x.sched", *same_options.split()) == to_text(program)


def test_built_in_schedules_have_no_helper_functions(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"gpipe", "one_f_one_b", "interleaved"} <= get_built_in_schedules().keys()
    assert "weave" not in get_built_in_schedules()


@pytest.mark.parametrize("placement", ["vee", "0,1,1,0"])
def test_placement_option(capsys: pytest.CaptureFixture[str], placement: str) -> None:
    Path("vee.py").write_text(
        "from schedir import B, F\ndef f(r, P, m):\n    return m * (F[0] + F[1] + B[1] + B[0])\n"
    )
    argv = ["vee.py:f", "--ranks", "2", "--microbatches", "2", "--placement", placement]
    assert f"placement {placement}" in run_command(capsys, "print", *argv, "--compute-only")


def test_timeline_file_is_program_source(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(capsys, "simulate", "f.sched", "-o", "x.timeline")
    assert run_command(capsys, "print", "x.timeline") == Path("f.sched").read_text()
    assert run_command(capsys, "check", "x.timeline") == run_command(capsys, "check", "f.sched")


def test_schedule_file_imports_from_its_folder(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "helper.py").write_text("from schedir import B, F\nPAIR = F + B\n")
    (folder / "sub" / "random.py").write_text(
        "from helper import PAIR\ndef f(r, P, m):\n    return m * PAIR\n"
    )
    path_before = list(sys.path)
    assert from_text(run_command(capsys, "print", "sub/random.py:f", "--ranks", "1")).name == "f"
    assert sys.path == path_before


# ---------------------------------------------------------------- check, simulate, draw, compare


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_narrow_terminal_keeps_all_numbers(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = run_command(capsys, "compare", "gpipe", "zb_v", "--costs", "send=0.1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = run_command(capsys, "compare", "gpipe", "zb_v", "--costs", "send=0.1").splitlines()
    assert [line.split() for line in lines[-2:]] == [s.split() for s in wide.splitlines()[-2:]]
    assert max(map(len, lines)) <= max(80, int(columns))
    assert (lines == wide.splitlines()) == (columns == "200")


def test_check_prints_progress_models(capsys: pytest.CaptureFixture[str]) -> None:
    n = len(compile(one_f_one_b, PipelineShape(4, 8)))
    assert run_command(capsys, "check", "one_f_one_b") == (
        f"one_f_one_b: {n} instructions on 4 ranks are complete and in order, and finish under "
        "per_edge, per_pair, per_direction, per_device, torch_lazy and blocking_serial\n"
    )
    out = run_command(capsys, "check", "f.sched", "--progress-model", "per_pair")
    assert out.endswith("finish under per_pair\n")


def test_check_reports_forward_only_program(capsys: pytest.CaptureFixture[str]) -> None:
    """A program without backwards is legal, but the backwards may have been forgotten."""
    assert "which run forward only," in run_command(capsys, "check", "forward_only")
    for command in (["simulate"], ["explain"], ["draw"], ["compare", "gpipe"]):
        out = run_command(capsys, *command, "forward_only")
        assert re.search(r"^ ?forward_only, (predicted, )?forward only", out, re.MULTILINE)
        assert out.count("forward only") == 1


def test_check_hints_at_progress_models_that_finish(capsys: pytest.CaptureFixture[str]) -> None:
    Path("narrow.sched").write_text(ONE_QUEUE_DEADLOCK)
    err = run_refused_command(capsys, "check", "narrow.sched")
    assert (
        "DeadlockError" in err and "hint: it finishes under per_edge and per_direction; it" in err
    )
    assert run_command(capsys, "check", "narrow.sched", "--progress-model", "per_edge").endswith(
        "under per_edge\n"
    )
    for argv in (["simulate"], ["draw", "-o", "x.png"], ["compare"]):
        assert "DeadlockError" in run_refused_command(capsys, argv[0], "narrow.sched", *argv[1:])


# `send_act 0.1` follows a compute that needs a reply to it. Only blocking hosts deadlock.
LATE_SEND = """schedir 1
program late
ranks 2  microbatches 2

rank 0
  F 0.0; send_act 0.0; F 0.1; recv_grad 0.0; B 0.0; send_act 0.1; recv_grad 0.1; B 0.1
  reduce_grads 0; step
rank 1
  recv_act 1.0; F 1.0; recv_act 1.1; F 1.1; B 1.0; send_grad 1.0; B 1.1; send_grad 1.1
  reduce_grads 1; step
"""


def test_check_with_blocking_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("late.sched").write_text(LATE_SEND)
    Path("narrow.sched").write_text(ONE_QUEUE_DEADLOCK)
    argv = ["check", "late.sched", "--progress-model", "per_edge"]
    assert "under per_edge; if hosts block, as CPU hosts do, under none" in run_command(
        capsys, *argv
    )
    assert (
        json.loads(run_command(capsys, *argv, "--json"))["progress_models_with_blocking_hosts"]
        == []
    )
    assert "it issues no instructions" in run_refused_command(capsys, *argv, "--blocking-hosts")
    out = run_command(
        capsys, "check", "narrow.sched", "--progress-model", "per_edge", "--blocking-hosts"
    )
    assert out.endswith("under per_edge, if hosts block, as CPU hosts do\n")


def test_check_with_host_device_sync(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["check", "gpipe", "--ranks", "3", "--progress-model", "per_edge", "--host-device-sync"]
    assert run_command(capsys, *argv).endswith("under per_edge, if hosts wait for their devices\n")
    assert "a host that waits for its device" in run_refused_command(capsys, *argv, "-O", "overlap")
    facts = json.loads(run_command(capsys, *argv, "--json"))
    assert facts["progress_models_with_host_device_sync"] == ["per_edge"]


def test_check_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    program = from_text(Path("f.sched").read_text())
    assert json.loads(run_command(capsys, "check", "f.sched", "--json")) == {
        "program": "one_f_one_b", "digest": program.digest, "ranks": 4,
        "stages_per_rank": 1, "instructions": len(program), "progress_models": [*MODELS],
        "progress_models_with_blocking_hosts": [*MODELS],
    }  # fmt: skip


def test_simulate_output_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_command(capsys, "simulate", "one_f_one_b", "--costs", "F=1,B=2")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [
        ["0", "24", "9", "9", "4"], ["1", "24", "9", "6", "3"],
        ["2", "24", "9", "3", "2"], ["3", "24", "9", "0", "1"],
    ]  # fmt: skip
    assert "span 33, bubble 27.3% of ranks x span, 37.5% of the busy time" in out
    facts = json.loads(run_command(capsys, "simulate", "one_f_one_b", "--json"))
    assert (facts["span"], facts["peak_in_flight"]) == (33, [4, 3, 2, 1])
    assert facts["bubble_over_ideal"] == 0.375


def test_draft_file_can_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(capsys, "print", "gpipe", "--compute-only", "-o", "d.sched")
    assert json.loads(run_command(capsys, "simulate", "d.sched", "--json"))["span"] == 33
    assert "LoweringLevelError" in run_refused_command(capsys, "check", "d.sched")


def test_compare_uses_equal_models(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["gpipe", "one_f_one_b", "interleaved", "f.sched", "mine.py:in_pairs"]
    argv = ["compare", *names, "--stages-per-rank", "2"]
    facts = {fact["program"]: fact for fact in json.loads(run_command(capsys, *argv, "--json"))}
    assert [facts[name]["stages"] for name in ("gpipe", "interleaved")] == [4, 8]
    # Both schedules are for one model: interleaved has the same work and half the bubble.
    assert facts["gpipe"]["span"] == 33 and facts["interleaved"]["span"] == 28.5
    assert facts["one_f_one_b"]["peak_activations"] == 4
    assert facts["interleaved"]["peak_activations"] == facts["interleaved"]["peak_in_flight"] / 2


def test_schedule_options_and_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--ranks", "2", "--stages-per-rank", "2", "--microbatches", "8")
    plain = run_command(capsys, "print", "interleaved", *shape)
    assert run_command(capsys, "print", "interleaved(group = None)", *shape) == plain
    assert run_command(capsys, "print", "interleaved(group=4)", *shape) != plain
    assert run_command(capsys, "print", "interleaved", *shape, "-O", "overlap") != plain
