"""Tests that a dead process of a run causes one error, which names the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import one_f_one_b
from schedir.training import train as training
from tests.cases import cases
from tests.cpu.train_command import (
    ONE_STAGE_PER_RANK,
    make_arguments,
    make_torchrun_command,
    run_launched,
    write_patched_schedule,
)

READ_BATCH = "schedir.training.batches.samples:Batches.read_batch"
IN_SECOND_STEP = 'if arguments[1] == 2 * arguments[0].batch_size and rank == "1":\n'
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


class EndedWithError(Exception):
    """Stands for the end of a process."""


def make_death_arguments(
    config: str, tmp_path: Path, how: str, transport: str, ranks: int = 3
) -> list[str]:
    """Return the arguments of `schedir train` for a run whose second rank dies."""
    sets = [*ONE_STAGE_PER_RANK, f"pipeline.ranks={ranks}", f"model.layers={ranks}",
            f"train.transport={transport}",
            write_patched_schedule(tmp_path, READ_BATCH, f"{IN_SECOND_STEP}    {how}")]  # fmt: skip
    return make_arguments(config, tmp_path / "out", *sets)


@pytest.mark.parametrize(
    ("how", "transport", "expected"),
    cases(
        [
            (KILL, "shared_memory", " was killed by signal 9 (Killed), "),
            ("os._exit(0)", "shared_memory", " exited with code 0, "),
        ],
        [
            ("raise KeyboardInterrupt", "shared_memory", ": interrupted, "),
            ("sys.exit(3)", "gloo", ": sys.exit(3) was called, "),
            (KILL, "gloo", " was killed by signal 9 (Killed), "),
        ],
    ),
)
def test_launcher_reports_dead_process_and_cause(
    config: str, tmp_path: Path, how: str, transport: str, expected: str
) -> None:
    words = make_death_arguments(config, tmp_path, how, transport, ranks=3 if how == KILL else 2)
    code, _, err = run_launched(words, tmp_path / "out")
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"process 1 (pipeline rank 1){expected}")
    # Another thread reads the batch of a step, during the step or before it.
    assert "in step " in err or "of step " in err


@pytest.mark.parametrize(
    ("exception", "expected"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(3), "sys.exit(3) was called")],
)
def test_exception_that_ends_rank_is_its_error(
    monkeypatch: pytest.MonkeyPatch, exception: BaseException, expected: str
) -> None:
    def raise_exception(*settings: object) -> None:
        raise exception

    def stop(reason: str, **options: object) -> None:
        raise EndedWithError(reason)

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training, "read_config", raise_exception)
    monkeypatch.setattr(training, "exit_with_error", stop)
    with pytest.raises(EndedWithError) as error:
        training.run("run.toml")
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("code", cases([1], [0]))
def test_warnings_do_not_hide_cause_of_death(config: str, tmp_path: Path, code: int) -> None:
    words = make_death_arguments(config, tmp_path, f"os._exit({code})", "gloo", ranks=2)
    schedule = tmp_path / "mine.py"
    schedule.write_text(f"import warnings\n{schedule.read_text()}\nwarnings.warn('odd')\n")
    exit_code, _, err = run_launched(words, tmp_path / "out")
    assert exit_code == 1 and "\n[1] " in err and "UserWarning: odd" in err
    expected = f"process 1 (pipeline rank 1) exited with code {code}, "
    assert err.splitlines()[-1].startswith(expected)
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise ConnectionResetError('connection reset by the store')",
         "ConnectionResetError: connection reset by the store"),
        ("raise RuntimeError(100_000 * 'x')", f"RuntimeError: {1000 * 'x'}..."),
        ("raise Unsaid", "Unsaid"),
        ("raise NotImplementedError", "NotImplementedError"),
    ],
)  # fmt: skip
def test_error_of_module_is_shown_unchanged(how: str, expected: str) -> None:
    class Unsaid(Exception):
        def __str__(self) -> str:
            raise ValueError

    class RaisingStage(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            exec(how, {"Unsaid": Unsaid})
            return x

    program = compile(one_f_one_b, PipelineShape(1, 2))
    world = InProcessExecutor(program, [RaisingStage(2, 2)], loss=torch.dist, boundary=(2, 2))
    with pytest.raises(ExecutionError) as error:
        world.step(torch.ones(2, 2, 2), torch.ones(2, 2, 2))
    assert error.value.fact == expected


@pytest.mark.parametrize("transport", cases(["gloo"], ["shared_memory"]))
def test_neighbour_reports_dead_process_under_torchrun(
    config: str, tmp_path: Path, transport: str
) -> None:
    words = make_torchrun_command(3, *make_death_arguments(config, tmp_path, KILL, transport))
    code, _, err = run_launched(words, tmp_path / "out")
    error_lines = [line for line in err.splitlines() if line.startswith("process ")]
    assert code == 1 and "pair.cc" not in err
    # torchrun ends the other processes immediately, and one of them reports the dead process.
    (error_line,) = error_lines
    assert error_line.startswith("process 1 (pipeline rank 1) has died without a message, ")
    assert "Root Cause" in err and "rank      : 1 " in err


FORK_CHILDREN = """\
if rank == "1" and arguments[1] == 2:
    from schedir.training.processes.process_exit import get_current_member

    if os.fork() == 0:
        raise ValueError("a child")
    child = os.fork()
    if child == 0:
        time.sleep(100)
    os.kill(child, signal.SIGTERM)
    statuses = {os.wait()[1] for _ in range(2)}
    has_failed = get_current_member().collect_black_boxes()[1].has_failed
    print(statuses == {signal.SIGTERM, 256}, has_failed, file=sys.stderr)
"""


def test_forked_child_of_user_code_is_not_part_of_run(config: str, tmp_path: Path) -> None:
    words = make_death_arguments(config, tmp_path, KILL, "gloo", ranks=2)
    write_patched_schedule(
        tmp_path, "schedir.training.batches.prefetch:Prefetch.take", FORK_CHILDREN
    )
    code, _, err = run_launched(words, tmp_path / "out")
    assert code == 0, err
    assert "a child of process 1 (pipeline rank 1): Traceback" in err
    assert "ValueError: a child" in err
    assert err.endswith("[1] True False\n")
