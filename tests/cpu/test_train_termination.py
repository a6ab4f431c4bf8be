"""Tests that training runs end together, and with one clear error."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import schedir
from schedir.__main__ import main
from schedir.errors import ConfigError, SchedirError, UsageError
from schedir.io.black_box import read_process_state
from schedir.models import gpt
from schedir.training.processes.process_exit import interrupt_on_signals
from schedir.training.train import run
from tests.cases import cases
from tests.cpu.train_command import (
    ONE_PROCESS,
    ONE_STAGE_PER_RANK,
    Run,
    find_free_port,
    make_arguments,
    run_launched,
    wait_until,
    write_schedule,
)

# How runs end

SCHEDULE = """\
import os
from pathlib import Path

from schedir import B, F


def mine(rank, ranks, microbatches):
    Path({folder!r}, os.environ.get("RANK", "parent")).write_text(str(os.getpid()))
    return microbatches * (F + B)
"""


@pytest.fixture
def endless_run(config: str, tmp_path: Path) -> Iterator[tuple[Run, list[int]]]:
    """Yield a running run of two ranks and its process ids, and check that nothing remains."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shared = {*os.listdir("/dev/shm")}
    folder = tmp_path / "pids"
    folder.mkdir()
    sets = [*ONE_STAGE_PER_RANK, "train.steps=1000000", "train.log_every=1", "train.timeout=10",
            write_schedule(tmp_path, SCHEDULE.format(folder=str(folder)))]  # fmt: skip
    out = tmp_path / "out"
    launcher = Run(make_arguments(config, out, *sets), out, TMPDIR=str(temporary))
    launcher.wait_for("\nstep ")
    yield launcher, [int((folder / rank).read_text()) for rank in "01"]
    assert not [*temporary.glob("schedir*"), *temporary.glob("tmp*")]
    assert not [name for name in {*os.listdir("/dev/shm")} - shared if "schedir" in name]


def gone(pid: int) -> bool:
    """Return whether a process has ended, even if its parent did not wait for it."""
    return read_process_state(pid, 0) == "gone"


@pytest.mark.parametrize(
    ("receiver", "signal_number", "code", "message"),
    cases(
        [
            ("rank 1", signal.SIGKILL, 1, "process 1 (pipeline rank 1) was killed by signal 9"),
            ("rank 1", signal.SIGSTOP, 1, "process 1 (pipeline rank 1) is stopped, "),
            ("launcher", signal.SIGINT, 130, ""),
            ("launcher", signal.SIGKILL, -signal.SIGKILL, ""),
        ],
        [
            ("launcher", signal.SIGTERM, -signal.SIGTERM, ""),
            ("launcher", signal.SIGQUIT, -signal.SIGQUIT, ""),
            ("launcher", signal.SIGHUP, -signal.SIGHUP, ""),
        ],
    ),
)
def test_all_processes_end_after_signal(
    endless_run: tuple[Run, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    receiver: str,
    signal_number: signal.Signals,
    code: int,
    message: str,
) -> None:
    launcher, pids = endless_run
    out = tmp_path / "out"
    os.kill(pids[1] if receiver == "rank 1" else launcher.pid, signal_number)
    if signal_number is signal.SIGSTOP:  # until the timeout
        while (diagnosis := run_diagnose(capsys, out)).startswith("the run makes progress"):
            time.sleep(0.05)
        assert "no process has made progress for " in diagnosis
        assert "process 1 (pipeline rank 1) is stopped, " in diagnosis
        assert "\n  process 0 (pipeline rank 0)  " in diagnosis  # its location is arbitrary
    exit_code, _, err = launcher.finish()
    assert exit_code == code and message in err
    assert err.count("\n") <= 3 and "Traceback" not in err
    wait_until(lambda: all(map(gone, pids)))
    if receiver == "rank 1":
        assert run_diagnose(capsys, out).startswith(err)
    elif signal_number is signal.SIGKILL:  # no process was left to clean up
        assert run_diagnose(capsys, out).startswith(
            "no process is the cause: all 2 processes ended at once, "
        )
    elif signal_number is not signal.SIGTERM:
        assert not (out / "boxes").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_signal_interrupts_run_and_then_ends_process(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    sent: list[tuple[int, int]] = []
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
            monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
            handler = signal.getsignal(number)
            assert callable(handler)
            handler(number, None)
        assert sent == [(os.getpid(), number)] and signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def run_diagnose(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """Return the output of `schedir diagnose` for a run."""
    assert main(["diagnose", str(folder)]) == 0
    return capsys.readouterr().out


# Refusals


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("pipeline.tp=3", ConfigError),
        ("pipeline.ranks=3", ConfigError),
        ("pipeline.schedule=gpip", UsageError),
        ("pipeline.schedule=gpipe", SchedirError),  # it leaves out the second stages
        ("pipeline.dp=1000", UsageError),
        ("data.source=no-such-file.txt", UsageError),
        (f"data.source={'x' * 5000}", UsageError),
        ("model.vocab=100", UsageError),  # the text has larger bytes
        ("model.context=100000", UsageError),
        ("data.microbatch_size=1000000000000", UsageError),  # more than fits into memory
        ("model.vocab=1000000000000", UsageError),
        ("model.hidden=1000000000", UsageError),
    ],
)
def test_impossible_settings_are_refused_before_start(
    config: str, tmp_path: Path, setting: str, kind: type[SchedirError]
) -> None:
    with pytest.raises(kind):
        run(config, [setting, f'output.dir="{tmp_path / "out"}"'])
    assert not (tmp_path / "out" / "loss.csv").exists()


def test_unwritable_output_folder_is_refused(config: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, out, err = run_launched(make_arguments(config, file / "out"), tmp_path / "out")
    assert (code, out) == (2, "") and str(file / "out") in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["loss.csv", "summary.json", "timeline.png"])
def test_result_paths_that_are_folders_are_refused(config: str, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError) as error:
        run(config, [*ONE_PROCESS, f'output.dir="{tmp_path}"'])
    assert str(tmp_path / name) in error.value.fact


def test_program_file_must_fit_configuration(config: str, tmp_path: Path) -> None:
    shape = schedir.PipelineShape(1, 3)
    program = schedir.compile(schedir.schedules.gpipe, shape, progress_model="per_edge")
    path = tmp_path / "program.sched"
    path.write_text(schedir.to_text(program))
    plain = tmp_path / "plain.toml"
    plain.write_text(f"[pipeline]\nschedule = '{path}'\n")
    with pytest.raises(UsageError) as error:
        run(str(plain))
    assert "clip" in error.value.fact and error.value.hint.startswith(
        "train.clip_grad_norm = 0.0, or"
    )
    forward = schedir.compile(lambda r, P, m: m * schedir.F, shape)
    path.write_text(schedir.to_text(forward).replace("<lambda>", "forward"))
    with pytest.raises(SchedirError):
        run(str(plain), ["train.clip_grad_norm=0"])


WORLD_VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


INVALID_VALUES = [
    ("RANK", "x"), ("RANK", "-1"), ("RANK", "2"), ("MASTER_PORT", "abc"), ("MASTER_PORT", "65536"),
    ("WORLD_SIZE", "0"), ("WORLD_SIZE", "9" * 30),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "fact", "hint"),
    [
        ({"RANK": "0"}, "MASTER_ADDR", ""),
        *(({name: "2"}, f"{name} is 2, but RANK is not set",
           f"start several processes with torchrun, or unset {name}")
          for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")),
        *((WORLD_VARIABLES | {name: value},
           f"^the environment variable {name} must be .*, not {value!r}$", "torchrun")
          for name, value in INVALID_VALUES),
    ],
)  # fmt: skip
def test_invalid_environment_variables_are_refused(
    config: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fact: str, hint: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as error:
        run(config)
    assert re.search(fact, error.value.fact) and hint in error.value.hint


def test_missing_peer_is_one_error(config: str, tmp_path: Path) -> None:
    command = make_arguments(config, tmp_path / "out", "train.timeout=1", "pipeline.tp=1")
    port = str(find_free_port())
    rank = Run(command, tmp_path / "out", **WORLD_VARIABLES | {"MASTER_PORT": port})
    code, _, err = rank.finish()
    assert code == 1 and err.count("the processes did not connect in 1 s") == 1
    assert "Traceback" not in err


# A schedule's file is the user's own code, and here it makes rank 1 fail.
FAILING_SCHEDULE = """\
import os
import signal

import schedir.training.batches.samples
from schedir import schedules
from schedir.training import train, trainer
from schedir.errors import UsageError

mine = schedules.one_f_one_b


def refuse(self, first, count):
    raise UsageError("no such luck")


if os.environ.get("RANK") == "1":
    {what}
"""


@pytest.mark.parametrize(
    ("failure", "sets", "code", "message"),
    [
        ("schedir.training.batches.samples.Batches.read_batch = refuse", [], 2,
         "process 1 (pipeline rank 1): UsageError: no such luck\n"),
        ("mine = schedules.gpipe", [], 2, "processes 0 and 1 do not agree on the program"),
        ("train.exit_cleanly = lambda: os._exit(9)", [], 1,
         "process 1 (pipeline rank 1) exited with code 9, at"),
        # The rank stops before it reports its numbers, and no message of Gloo is shown.
        ("trainer._Trainer._report = lambda self, step: os.kill(os.getpid(), signal.SIGSTOP)",
         ["train.timeout=6", "train.log_every=1"], 1,
         "process 1 (pipeline rank 1) is stopped, gathering the results of step 1"),
    ],
)  # fmt: skip
def test_failed_rank_is_reported_with_cause(
    config: str, tmp_path: Path, failure: str, sets: list[str], code: int, message: str
) -> None:
    schedule = write_schedule(tmp_path, FAILING_SCHEDULE.format(what=failure))
    words = make_arguments(config, tmp_path / "out", *ONE_STAGE_PER_RANK, schedule, *sets)
    exit_code, _, err = run_launched(words, tmp_path / "out")
    assert exit_code == code and message in err
    assert err.count("\n") == (2 if "SIGSTOP" in failure else 1), err
    # A rank that fails at the very end does not keep the first rank from writing its results.
    for name in ("summary.json", "timeline.png"):
        assert (tmp_path / "out" / name).exists() == ("exit_cleanly" in failure)


def test_out_of_memory_before_first_step_is_one_error(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is that of a GPU. An error within an instruction would name the instruction."""

    def raise_out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(gpt, "build_stage", raise_out_of_memory)
    code = run(config, [*ONE_PROCESS, f'output.dir="{tmp_path}"'])
    (error,) = capsys.readouterr().err.splitlines()
    assert code == 1 and error.endswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; this happened outside "
        "of a step"
    )
