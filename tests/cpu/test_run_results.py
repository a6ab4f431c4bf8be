"""Tests that results of a run are complete, not lost, and not mixed with those of another run."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from schedir.errors import ExecutionError, ModelError, UsageError
from schedir.training import run_results, trainer
from schedir.training.config.run_config import Config, OutputConfig
from schedir.training.processes.process_world import wait_for_results
from schedir.training.run_results import (
    LOCK_FILE,
    LOSSES_HEADER,
    RESULT_FILES,
    TRACE_FILE,
    claim_directories,
)
from schedir.training.train import run
from tests.cpu.train_command import (
    ONE_PROCESS,
    ONE_STAGE_PER_RANK,
    ROOT,
    Run,
    make_arguments,
    run_forked,
    run_launched,
    wait_until,
    write_patched_schedule,
    write_schedule,
)

TWO_RANKS = [*ONE_STAGE_PER_RANK, "train.log_every=1"]
OVERWRITE = "output.overwrite=true"


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def write_old_results(folder: Path) -> dict[str, bytes]:
    """Write the results of an earlier run, and return them."""
    for name in RESULT_FILES:
        (folder / name).write_text("of an earlier run")
    return read_files(folder)


def get_refusal(config: str, *sets: str) -> UsageError:
    with pytest.raises(UsageError) as error:
        run(config, [*ONE_PROCESS, *sets])
    return error.value


# A second run


def test_existing_results_need_overwrite_option(config: str, tmp_path: Path) -> None:
    sets = [f'output.dir="{tmp_path / "out"}"', f'output.trace="{tmp_path / "traces"}"']
    assert run(config, [*ONE_PROCESS, *sets]) == 0
    contents = read_files(tmp_path / "out") | read_files(tmp_path / "traces")
    assert {*contents} == {*RESULT_FILES, TRACE_FILE}  # and no file of a lock

    error = get_refusal(config, *sets, "data.seed=3")
    assert error.fields == ("dir", "overwrite") and all(name in error.fact for name in RESULT_FILES)
    assert "--set output.dir=" in error.hint and f"--set {OVERWRITE}" in error.hint
    elsewhere = get_refusal(config, f'output.dir="{tmp_path / "new"}"', sets[1])
    assert str(tmp_path / "traces") in elsewhere.fact and TRACE_FILE in elsewhere.fact
    assert elsewhere.fields == ("trace", "overwrite")
    golden = (ROOT / "tests" / "golden" / "results.txt").read_text()
    assert f"{error}\n{elsewhere}\n".replace(str(tmp_path), "...") == golden
    assert read_files(tmp_path / "out") | read_files(tmp_path / "traces") == contents

    # A run that records nothing removes the picture and the trace of an earlier run.
    second_run = [*sets[:1], OVERWRITE, "output.record=false", "data.seed=3", "train.steps=2"]
    # A run that was killed while it wrote leaves the last two.
    for name in (TRACE_FILE, ".summary.json.123", ".run.json.123"):
        (tmp_path / "out" / name).touch()
    assert run(config, [*ONE_PROCESS, *second_run]) == 0
    assert {*read_files(tmp_path / "out")} == {"loss.csv", "summary.json"}
    assert read_files(tmp_path / "out")["loss.csv"].count(b"\n") == 3


def test_results_without_step_are_replaced(config: str, tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text(LOSSES_HEADER)
    assert run(config, [*ONE_PROCESS, f'output.dir="{tmp_path}"', "train.steps=1"]) == 0
    assert read_files(tmp_path)["loss.csv"].count(b"\n") == 2


@pytest.mark.parametrize("name", [*RESULT_FILES[1:], TRACE_FILE])
def test_each_result_file_prevents_run(config: str, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert name in get_refusal(config, f'output.dir="{tmp_path}"').fact
    assert (tmp_path / name).exists()


def test_missing_data_file_is_reported_before_old_results(config: str, tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text("of an earlier run")
    output = f'output.dir="{tmp_path}"'
    assert "loss.csv" in get_refusal(config, output).fact
    for name in ("source", "validation"):
        error = get_refusal(config, output, f'data.{name}="{tmp_path / "none.txt"}"')
        assert "none.txt" in error.fact and "loss.csv" not in error.fact


def test_results_are_not_replaced_before_agreement(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last check is after the creation of the model."""
    contents = write_old_results(tmp_path)

    def raise_difference(*args: object, **kwargs: object) -> object:
        raise ModelError("another model")

    # This is the last point where the processes agree.
    monkeypatch.setattr(trainer._Trainer, "_predict_memory", raise_difference)
    with pytest.raises(ModelError):
        run(config, [*ONE_PROCESS, f'output.dir="{tmp_path}"', OVERWRITE])
    assert read_files(tmp_path) == contents


def test_interrupted_run_keeps_losses_without_summary(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_old_results(tmp_path)
    report, count = trainer._Trainer._report, [0]

    def report_or_interrupt(self: trainer._Trainer, step: int) -> object:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return report(self, step)

    monkeypatch.setattr(trainer._Trainer, "_report", report_or_interrupt)
    sets = [*ONE_PROCESS, f'output.dir="{tmp_path}"', "train.log_every=1"]
    assert run(config, [*sets, OVERWRITE]) == 130
    remaining = read_files(tmp_path)
    assert remaining["loss.csv"].count(b"\n") == 3 and not {*RESULT_FILES[1:]} & {*remaining}
    assert "loss.csv" in get_refusal(config, *sets).fact  # two steps are results too


# Two runs at once


ENDLESS_RUN = ["train.steps=1000000", "train.timeout=20", "output.record=false"]


def test_folder_in_use_is_refused_until_run_ends(config: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first = Run(make_arguments(config, folder, *TWO_RANKS, *ENDLESS_RUN), folder)
    first.wait_for("\nstep ")
    inode = (folder / "loss.csv").stat().st_ino
    second_run = make_arguments(config, folder, *ONE_PROCESS, OVERWRITE)
    code, _, err = run_launched(second_run, tmp_path / "again")
    assert code == 2 and err.count("\n") == 2 and "in use by another run, process " in err
    assert (folder / "loss.csv").stat().st_ino == inode and (folder / "boxes").is_dir()
    os.kill(first.pid, signal.SIGKILL)
    first.finish()
    wait_until(lambda: not is_locked(folder))
    assert "loss.csv" in get_refusal(config, f'output.dir="{folder}"').fact
    last_run = [*ONE_PROCESS, OVERWRITE, "train.steps=1", f'output.dir="{folder}"']
    assert run(config, last_run) == 0
    assert not (folder / LOCK_FILE).exists()


def is_locked(folder: Path) -> bool:
    with (folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def claim_twice(output: Config) -> str:
    """Return the error of a claim of folders that are claimed already."""
    with claim_directories(output), pytest.raises(UsageError) as error, claim_directories(output):
        pass
    return error.value.fact


def test_deleted_lock_file_gives_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner deletes the file of its lock while another process is about to lock it."""
    lock, deleted = fcntl.flock, list[Path]()

    def lock_after_delete(file: int, how: int) -> None:
        if not deleted:
            deleted.append(tmp_path / LOCK_FILE)
            deleted[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_after_delete)
    assert "in use" in claim_twice(Config(output=OutputConfig(str(tmp_path)))) and deleted


def test_symlink_to_same_folder_is_claimed_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    output = Config(output=OutputConfig(str(tmp_path), trace=str(tmp_path / "link")))
    assert f"process {os.getpid()} on " in claim_twice(output)
    with claim_directories(output):
        pass


def test_missing_file_locks_cause_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_to_lock(file: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail_to_lock)
    with claim_directories(Config(output=OutputConfig(str(tmp_path)))):
        pass
    assert "another run could use it, too" in capsys.readouterr().err


# Long writing

SLOW_RESULTS = """\
import time

from schedir import schedules
from schedir.training import train
from schedir.training.processes import process_world

mine = schedules.one_f_one_b
write = train.save_results
met = process_world.run_rendezvous
process_world.run_rendezvous = lambda facts, timeout: met(facts, 60.0)  # on a busy machine
process_world.RESULTS_TIMEOUT = 4.0


def slowly(*given):
    time.sleep(6)
    write(*given)


train.save_results = slowly
"""


def test_writing_results_may_exceed_timeout(config: str, tmp_path: Path) -> None:
    schedule = write_schedule(tmp_path, SLOW_RESULTS)
    sets = [*TWO_RANKS, "train.timeout=5", "train.steps=2", schedule]
    code, out, err = run_forked(config, tmp_path / "out", *sets)
    assert code == 0, err
    assert out.endswith(f"timeline.png to {tmp_path / 'out'}\n")
    assert {*read_files(tmp_path / "out")} == {*RESULT_FILES}
    assert not (tmp_path / "out" / "boxes").exists()


def test_missing_heartbeat_of_process_0_is_error() -> None:
    with pytest.raises(ExecutionError, match="process 0 sent no heartbeat"):
        wait_for_results(HashStore(), 0.3)


# JSON


def parse_strict_json(text: str) -> object:
    def refuse_constant(name: str) -> object:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse_constant)


def test_summary_is_strict_json_with_nan_and_infinity(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_results.save_results

    def save_nonfinite_results(result: run_results.RunResult, output: OutputConfig) -> None:
        write(replace(result, loss=math.nan, tokens_per_second=math.inf), output)

    monkeypatch.setattr("schedir.training.train.save_results", save_nonfinite_results)
    assert run(config, [*ONE_PROCESS, f'output.dir="{tmp_path}"', "train.steps=1"]) == 0
    facts = parse_strict_json((tmp_path / "summary.json").read_text())
    assert isinstance(facts, dict) and facts["loss"] is facts["tokens_per_second"] is None


def test_summary_is_written_if_picture_fails(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_results.LossLog.write

    def write_after_blocking(losses: run_results.LossLog, lines: str) -> None:
        for path in (tmp_path / "out" / RESULT_FILES[2], tmp_path / "traces" / TRACE_FILE):
            path.mkdir(exist_ok=True)
        write(losses, lines)

    monkeypatch.setattr(run_results.LossLog, "write", write_after_blocking)
    sets = [f'output.dir="{tmp_path / "out"}"', f'output.trace="{tmp_path / "traces"}"']
    assert RESULT_FILES[2] in get_refusal(config, *sets).fact
    assert math.isfinite(json.loads((tmp_path / "out" / "summary.json").read_text())["loss"])


def test_removed_output_folder_is_named_in_error(config: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    remove = f'if rank == "0" and arguments[1] == 2:\n    shutil.rmtree({str(folder)!r})'
    take = "schedir.training.batches.prefetch:Prefetch.take"
    schedule = write_patched_schedule(tmp_path, take, remove)
    code, _, err = run_launched(make_arguments(config, folder, *TWO_RANKS, schedule), folder)
    assert code and "Traceback" not in err and "before it joined the run" not in err, err
    first, last = err.splitlines()
    assert first.startswith("[0] process 0 (pipeline rank 0): ") and str(folder) in first
    assert last.startswith("process 0 (pipeline rank 0) exited with code ")
