"""Tests that resumed training runs have the losses of an unbroken run bit for bit, or refuse."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from schedir.errors import CheckpointError, ConfigError, ExecutionError, SchedirError, UsageError
from schedir.training.config.run_config import Config, OutputConfig
from schedir.training.config.train_config import TrainConfig
from schedir.training.resume_checks import RUN_FILE
from schedir.training.run_results import claim_directories
from schedir.training.step_queue import StepQueue
from schedir.training.train import run
from tests.cases import cases
from tests.cpu import train_command
from tests.cpu.train_command import (
    ROOT,
    TORCHRUN,
    Run,
    run_forked,
    run_launched,
    wait_until,
    write_patched_schedule,
)

# A picture would take as long as the steps.
ALONE = [*train_command.ONE_PROCESS, "output.record=false"]
TWO_RANKS = [*train_command.ONE_STAGE_PER_RANK, "output.record=false"]
STEPS = 7
TRAINING = [
    f"train.steps={STEPS}", "train.log_every=3", "model.dropout=0.1", "model.layers=2",
    "pipeline.microbatches=2",
]  # fmt: skip


def make_options(folder: Path, *settings: str, every: int = 2) -> list[str]:
    """Return the options of a run that saves checkpoints and reports each third step."""
    return [
        *TRAINING, f'output.dir="{folder / "out"}"', f'train.checkpoint_dir="{folder / "saved"}"',
        f"train.checkpoint_every={every}", *settings,
    ]  # fmt: skip


def read_losses(folder: Path) -> bytes:
    return (folder / "out" / "loss.csv").read_bytes()


def list_saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "saved").glob("step-*"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_command.write_config(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def unbroken_losses(config: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(config, [*ALONE, *TRAINING, f'output.dir="{folder / "out"}"']) == 0
    return read_losses(folder)


def run_again(config: str, folder: Path, *settings: str) -> int:
    return run(config, [*ALONE, *make_options(folder, *settings)])


def run_until(step: int, config: str, folder: Path, *settings: str) -> None:
    """Start a run that is interrupted within a step."""
    issue = StepQueue.issue

    def issues(self: StepQueue, *args: object) -> None:
        if self.last_issued_step + 1 == step:
            raise KeyboardInterrupt
        issue(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepQueue, "issue", issues)
        assert run_again(config, folder, *settings) == 130


@pytest.fixture(scope="module")
def interrupted_runs(config: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the folders of two runs, by the step in which each was interrupted."""
    folders = {step: tmp_path_factory.mktemp(f"until-{step}") for step in (4, 6)}
    for step, folder in folders.items():
        run_until(step, config, folder)
    return folders


@pytest.fixture
def copy_run(interrupted_runs: dict[int, Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the folder of a run that was interrupted within a step."""

    def copy(step: int, folder: Path = tmp_path) -> Path:
        return shutil.copytree(interrupted_runs[step], folder, dirs_exist_ok=True)

    return copy


# Runs that continue


def test_resumed_run_has_losses_of_unbroken_run(
    config: str,
    unbroken_losses: bytes,
    copy_run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_run(6)
    assert read_losses(folder).count(b"\n") == 5 and list_saved_steps(folder) == [2, 4]
    with (folder / "out" / "loss.csv").open("a") as file:  # rows of steps after the saved one
        file.write("5,1.0,0.1,0.1,0\n6,1")
    assert run(config, [*train_command.ONE_PROCESS, *make_options(folder)]) == 0
    assert read_losses(folder) == unbroken_losses and list_saved_steps(folder) == [6, 7]
    output = capsys.readouterr().out
    assert f"resumed at step 4 from {folder / 'saved' / 'step-00000004'}\n" in output
    assert f"saved step 7 to {folder / 'saved' / 'step-00000007'} in " in output


@pytest.mark.parametrize("precision", cases(["float16"], ["bfloat16"]))
def test_checkpoint_has_main_parameters_and_loss_scale(
    config: str, tmp_path: Path, precision: str
) -> None:
    """Checkpoints also contain the float32 copies of weights and the loss scale."""
    options = [f"train.precision={precision}", "train.steps=4"]
    unbroken_folder = tmp_path / "whole"
    assert run_again(config, unbroken_folder, *options) == 0
    run_until(4, config, tmp_path, *options)
    assert run_again(config, tmp_path, *options) == 0
    assert read_losses(tmp_path) == read_losses(unbroken_folder)


def test_run_without_checkpoint_starts_again(
    config: str, unbroken_losses: bytes, copy_run: Callable[..., Path]
) -> None:
    """Old results of the same run are replaced without the option `overwrite`."""
    folder = copy_run(4)
    shutil.rmtree(folder / "saved" / "step-00000002")
    assert read_losses(folder).count(b"\n") > 1 and list_saved_steps(folder) == []
    assert run_again(config, folder) == 0
    assert read_losses(folder) == unbroken_losses


def test_complete_run_is_reported_and_unchanged(
    config: str, tmp_path: Path, unbroken_losses: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_again(config, tmp_path) == 0
    contents = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert run_again(config, tmp_path) == 0
    assert f"all {STEPS} steps of the run are complete\n" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == contents
    (tmp_path / "out" / "summary.json").unlink()  # as if the run ended before it wrote this file
    assert run_again(config, tmp_path) == 0
    assert (tmp_path / "out" / "summary.json").exists() and read_losses(tmp_path) == unbroken_losses


def test_changed_settings_are_reported(
    config: str, copy_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(4)
    changed = ["train.lr=0.002", "pipeline.microbatches=1"]
    assert run_again(config, folder, *changed) == 0
    output = capsys.readouterr().out
    assert "; changed since: pipeline.microbatches 2 to 1, train.lr 0.001 to 0.002\n" in output


def test_new_output_folder_has_only_resumed_losses(
    config: str, copy_run: Callable[..., Path], unbroken_losses: bytes
) -> None:
    folder = copy_run(4)
    other = f'output.dir="{folder / "new" / "out"}"'
    assert run_again(config, folder, other) == 0
    lines = unbroken_losses.splitlines(keepends=True)
    assert read_losses(folder / "new") == b"".join([lines[0], *lines[3:]])


def test_step_with_nonfinite_gradients_is_not_saved(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run waits for the result of a step before it saves the step."""
    settle = StepQueue._should_stop
    monkeypatch.setattr(
        StepQueue, "_should_stop", lambda self, n: settle(self, n) or self.last_issued_step >= 4
    )
    monkeypatch.setattr(StepQueue, "diagnose_failure", lambda self: ExecutionError("not finite"))
    assert run_again(config, tmp_path) == 1
    assert list_saved_steps(tmp_path) == [2]


# Runs that are refused


def test_incompatible_resume_is_refused_and_keeps_files(
    config: str, tmp_path: Path, copy_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_run(4, folder=Path("run"))
    contents = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    Path("other.txt").write_text("another text " * 200)
    Path("file").touch()
    errors = []
    for settings in (
        ["model.hidden=64"],
        ["model.vocab=300"],
        ["model.layers=8"],
        ["data.seed=3"],
        ['data.source="other.txt"'],
        ["train.precision=bfloat16"],
        ["train.resume=no"],
        ["train.resume=must", 'train.checkpoint_dir="elsewhere"'],
        ['train.checkpoint_dir="file"'],
        ['train.checkpoint_dir="file/folder"'],
        ["train.checkpoint_every=0"],
        ["train.resume=maybe"],
        ['train.checkpoint_dir=""'],
    ):
        with pytest.raises(SchedirError) as error:
            run(config, [*ALONE, *make_options(folder), *settings])
        errors.append(f"{' '.join(settings)}\n{error.value}\n")
    with pytest.raises(ConfigError) as error:
        run(config, [*ALONE, "train.resume=must"])
    errors.append(f"train.resume=must\n{error.value}\n")
    (folder / "out" / "loss.csv").write_text(read_losses(folder).decode().rpartition("2,")[0])
    with pytest.raises(UsageError) as error:
        run_again(config, folder)
    errors.append(f"lines that are missing\n{error.value}\n")
    golden = ROOT / "tests" / "golden" / "resume.txt"
    if "UPDATE_GOLDEN" in os.environ:
        golden.write_text("\n".join(errors))
    assert "\n".join(errors).replace(config, "run.toml") == golden.read_text()
    remaining = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert {**remaining, "run/out/loss.csv": b""} == {**contents, "run/out/loss.csv": b""}


def test_output_folder_of_another_run_is_refused(
    config: str, tmp_path: Path, copy_run: Callable[..., Path]
) -> None:
    folder = copy_run(4)
    other = tmp_path / "other"
    assert run(config, [*ALONE, "train.steps=1", f'output.dir="{other / "out"}"']) == 0
    with pytest.raises(UsageError) as error:
        run(config, [*ALONE, *make_options(folder), f'output.dir="{other / "out"}"'])
    assert error.value.fields == ("dir", "overwrite")
    (folder / "saved" / RUN_FILE).unlink()  # a checkpoint still records its run
    assert run_again(config, folder) == 0


def test_overwrite_removes_old_checkpoints(
    config: str,
    unbroken_losses: bytes,
    copy_run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_run(6)
    options = ["train.resume=no", "output.overwrite=true"]
    assert run_again(config, folder, *options) == 0
    assert read_losses(folder) == unbroken_losses and "resumed" not in capsys.readouterr().out


def test_checkpoint_folder_in_use_is_refused(tmp_path: Path) -> None:
    def of(name: str) -> Config:
        train = TrainConfig(checkpoint_dir=str(tmp_path / "saved"))
        return Config(output=OutputConfig(str(tmp_path / name)), train=train)

    with claim_directories(of("a")), pytest.raises(UsageError) as error, claim_directories(of("b")):
        pass
    assert error.value.fields == ("checkpoint_dir",)
    assert error.value.fact.startswith(f"the checkpoint folder {tmp_path / 'saved'} is in use")


def test_full_disk_keeps_last_complete_checkpoint(
    config: str, tmp_path: Path, copy_run: Callable[..., Path]
) -> None:
    """A limit of the file size stands for a full disk. Only checkpoints exceed this limit."""
    folder = copy_run(4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot save step \d to .*: File too large"):
            run_again(config, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_saved_steps(folder) == [2]
    assert run_again(config, folder) == 0


@pytest.mark.parametrize("damage", cases(["tampered"], ["manifest"]))
def test_damaged_checkpoint_is_skipped(
    config: str,
    unbroken_losses: bytes,
    copy_run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    folder = copy_run(6)
    newest = folder / "saved" / "step-00000004"
    file = next(newest.glob("*.distcp")) if damage == "tampered" else newest / "manifest.jsonl"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if damage == "tampered" else b"{}\n")
    assert run_again(config, folder) == 0
    output = capsys.readouterr().out
    problem = file.name if damage == "tampered" else "its manifest"
    assert f"\nskipped: step-00000004 is not complete: {problem}" in output
    assert f"\nresumed at step 2 from {folder / 'saved' / 'step-00000002'}\n" in output
    assert read_losses(folder) == unbroken_losses


# Runs that receive a signal


def start_endless_run(config: str, folder: Path, *settings: str) -> Run:
    """Start a run of two processes that would take forever, and wait for its first step."""
    sets = [*TWO_RANKS, *make_options(folder, every=10**6), "train.steps=1000000",
            "train.log_every=1", *settings]  # fmt: skip
    launcher = Run(["train", config, *(f"--set={s}" for s in sets)], folder / "begun")
    launcher.wait_for("\nstep ")
    return launcher


def test_sigterm_saves_same_step_on_all_processes(config: str, tmp_path: Path) -> None:
    launcher = start_endless_run(config, tmp_path)
    os.kill(launcher.pid, signal.SIGTERM)
    code, _, err = launcher.finish()
    (last,) = list_saved_steps(tmp_path)
    assert code == 143
    saved = tmp_path / "saved" / f"step-{last:08}"
    assert err == f"received SIGTERM: step {last} of 1000000 is saved in {saved}\n"
    assert read_losses(tmp_path).splitlines()[-1].startswith(f"{last},".encode())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"loss.csv", RUN_FILE}
    sets = [*TWO_RANKS, *make_options(tmp_path), f"train.steps={last + 2}"]
    code, out, err = run_forked(config, tmp_path / "out", *sets)
    assert code == 0, err
    assert f"resumed at step {last} from " in out
    assert read_losses(tmp_path).count(b"\n") == last + 3


def start_slow_checkpoint(config: str, folder: Path, grace: int) -> Run:
    """Start a run that has received SIGTERM, and does not finish its checkpoint in time."""
    write = "schedir.training.checkpointing:write_checkpoint"
    sleep = f"open({str(folder / 'saving')!r}, 'w').close()\ntime.sleep(60)"
    schedule = write_patched_schedule(folder, write, sleep)
    launcher = start_endless_run(config, folder, schedule, f"train.shutdown_grace={grace}")
    os.kill(launcher.pid, signal.SIGTERM)
    return launcher


def test_shutdown_grace_ends_run_without_checkpoint(config: str, tmp_path: Path) -> None:
    code, _, err = start_slow_checkpoint(config, tmp_path, grace=1).finish()
    assert code == 143 and err.count("\n") == 1
    assert "received SIGTERM, and has not saved a checkpoint in 1 s, saving step" in err
    assert list_saved_steps(tmp_path) == []


def test_second_sigterm_ends_run_at_once(config: str, tmp_path: Path) -> None:
    launcher = start_slow_checkpoint(config, tmp_path, grace=200)
    wait_until((tmp_path / "saving").exists)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.finish(60)[0] == -signal.SIGTERM


# Restarts of torchrun


@pytest.mark.parametrize("deaths", cases([[(1, 6)]], [[(0, 2), (1, 6)]]))
def test_torchrun_restart_resumes_from_checkpoint(
    config: str, tmp_path: Path, deaths: list[tuple[int, int]]
) -> None:
    """Each attempt ends with the death of a rank after a step. The first checkpoint has step 3."""
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3", "-m", "schedir"]
    die = f"""\
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
if (int(rank), arguments[0].last_issued_step) in {deaths}[attempt : attempt + 1]:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    issue = "schedir.training.step_queue:StepQueue.issue"
    schedule = write_patched_schedule(tmp_path, issue, die)
    sets = [*TWO_RANKS, schedule, *make_options(tmp_path, every=3)]
    command = [*agent, "train", config, *(f"--set={s}" for s in sets)]
    code, out, err = run_launched(command, tmp_path / "died")
    assert code == 0, err
    assert out.count("resumed at step 3 from ") == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"loss.csv", RUN_FILE, "summary.json"}
    plain_settings = [*TWO_RANKS, "pipeline.schedule=one_f_one_b", *TRAINING]
    code, _, err = run_forked(config, tmp_path / "plain" / "out", *plain_settings)
    assert code == 0, err
    assert read_losses(tmp_path) == read_losses(tmp_path / "plain")
