"""Tests of delayed loss reads: the loss of a step is read after the next step is issued.

Runs with and without the delay are bitwise equal.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.errors import NonFiniteError, UsageError
from schedir.hang_diagnosis.stall_cause import ProcessLayout
from schedir.models import gpt
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.parameters.optimizer_inspection import unwrap_optimizer
from schedir.runtime.parameters.step_skipping import step_if_finite
from schedir.runtime.program_runner import ProgramRunner
from schedir.training import step_queue, trainer
from schedir.training.batches.text_batches import Corpus
from schedir.training.config.config_file import read_config
from schedir.training.config.run_config import Config
from schedir.training.optimizer import build_optimizer
from schedir.training.processes.process_exit import RunMember
from schedir.training.processes.watchdog import Watchdog
from schedir.training.step_queue import StepQueue
from schedir.training.train import build_program, run
from schedir.training.trainer import _Trainer
from tests.cases import cases, each_value
from tests.cpu import gloo_processes

ONE_PROCESS = ["pipeline.ranks=1", "pipeline.tp=1", "pipeline.stages_per_rank=4",
               "train.log_every=100", "train.steps=7", "output.record=false"]  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "float16")
Spoil = Callable[[torch.Tensor], torch.Tensor]


def infinite_loss(y: torch.Tensor) -> torch.Tensor:
    return y * math.nan


def infinite_gradient(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda dy: dy * math.inf)
    return y


def call_before(
    patch: pytest.MonkeyPatch, owner: type, name: str, function: Callable[..., object]
) -> None:
    """Call a function with the arguments of a method before each call of the method."""
    method = getattr(owner, name)

    def call_both(self: Any, *arguments: Any) -> Any:
        function(self, *arguments)
        return method(self, *arguments)

    patch.setattr(owner, name, call_both)


def change_stage_output(
    patch: pytest.MonkeyPatch, change: Spoil, stage: int, *steps: int, once: bool
) -> None:
    """Change the output of a stage in some steps, from 0.

    With `once`, the output is not changed again if the step runs a second time.
    """
    build, begun_steps = gpt.build_stage, list[int]()

    def record_step(runner: ProgramRunner, *_: Any) -> None:
        if runner.program.has_backward:
            begun_steps.append(runner.state.random_streams.step)

    def build_stage(config: Any, s: int, stages: int, **options: Any) -> Any:
        def change_output(module: Any, arguments: Any, y: torch.Tensor) -> torch.Tensor:
            step = begun_steps[-1] if begun_steps else -1
            return change(y) if step in steps and not (once and begun_steps.count(step) > 1) else y

        module = build(config, s, stages, **options)
        if s == stage:
            module.register_forward_hook(change_output)
        return module

    call_before(patch, ProgramRunner, "begin_step", record_step)
    patch.setattr(gpt, "build_stage", build_stage)


def copy_trained_state(run_trainer: _Trainer) -> list[torch.Tensor]:
    """Return copies of the weights, the main parameters and the optimizer state."""
    inner: Any = getattr(run_trainer.optimizer, "inner", run_trainer.optimizer)
    weights = [p for s in run_trainer.executor.stages.values() for p in s.module.parameters()]
    tensors = [*weights, *getattr(run_trainer.optimizer, "main_parameters", [])]
    tensors += [t for state in inner.state.values() for t in state.values()]
    return [t.detach().clone() for t in tensors]


def run_training(
    config: str, folder: Path, patch: pytest.MonkeyPatch, is_late: bool, *sets: str
) -> tuple[int, bytes, list[torch.Tensor], int]:
    """Run a training. Return the exit code, loss.csv, the trained tensors, and the delay.

    The delay is the number of steps that were issued before the loss of a step was read. It is 0 if
    `is_late` is False.
    """
    trainers, original_init, delays = [], _Trainer.__init__, list[int]()

    def init(self: _Trainer, *arguments: Any) -> None:
        original_init(self, *arguments)
        trainers.append(self)
        self.step_queue.can_read_late &= is_late

    def record_delay(queue: StepQueue) -> None:
        delays.append(len(queue.pending_steps) - 1)

    patch.setattr(_Trainer, "__init__", init)
    call_before(patch, StepQueue, "read_oldest_step", record_delay)
    code = run(config, [*ONE_PROCESS, *sets, f'output.dir="{folder}"'])
    return code, (folder / "loss.csv").read_bytes(), copy_trained_state(trainers[0]), sum(delays)


def run_late_and_immediate(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[pytest.MonkeyPatch], None],
    *sets: str,
) -> tuple[int, bytes, str]:
    """Assert that runs with and without delayed reads are equal.

    Return their exit code, loss.csv and errors.
    """
    outcomes = []
    for is_late in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            prepare(patch)
            run_folder = tmp_path / str(is_late)
            code, rows, tensors, delay = run_training(config, run_folder, patch, is_late, *sets)
        assert bool(delay) == is_late
        out, err = capsys.readouterr()
        steps = [line.split("  ") for line in out.splitlines() if line.startswith("step ")]
        fields = [[field for field in line if "tokens/s" not in field] for line in steps]
        outcomes.append((tensors, (code, rows, err), fields))
    (tensors, results, fields), (immediate_tensors, *others) = outcomes
    assert [results, fields] == others
    assert all(map(torch.equal, tensors, immediate_tensors))
    return results


# With a loss scale of 0.5, the gradient of a float16 loss is never too large.
@pytest.mark.parametrize(
    ("what", "scale", "once", "precision"),
    each_value(
        [(infinite_loss, 1024.0), (infinite_gradient, 0.5)], [False, True], ["float32", "float16"]
    ),
)
def test_delayed_stop_equals_immediate_stop(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: Spoil,
    scale: float,
    once: bool,
    precision: str,
) -> None:
    def prepare(patch: pytest.MonkeyPatch) -> None:
        change_stage_output(patch, what, 2, 3, once=once)
        patch.setattr(trainer, "LossScale", partial(LossScale, scale))

    code, rows, err = run_late_and_immediate(
        config, tmp_path, capsys, prepare, f"train.precision={precision}"
    )
    assert code == 1 and rows.count(b"\n") == 4
    assert " of step 4 is infinite" in err and "has the first such value" in err


def test_delayed_stop_after_bad_update_equals_immediate_stop(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a bad update, the other updates of its step run, but not those of the next step."""
    calls = count()  # calls of the stage; a step has one per microbatch

    def spoil_first_two(y: torch.Tensor) -> torch.Tensor:
        return infinite_gradient(y) if next(calls) % 3 < 2 else y

    sets = ["pipeline.stages_per_rank=4", "pipeline.placement=[0,0,0,0]",
            "pipeline.optimizer_steps=3",
            "pipeline.weight_delay=1"]  # fmt: skip

    def prepare(patch: pytest.MonkeyPatch) -> None:
        change_stage_output(patch, spoil_first_two, 1, 3, once=False)

    code, _, err = run_late_and_immediate(config, tmp_path, capsys, prepare, *sets)
    assert code == 1 and "of step 4 is infinite" in err and " B 1." in err


@pytest.mark.parametrize(
    "sets",
    cases(
        # The loss scale is too large for some steps.
        [["train.precision=float16", "train.on_nonfinite=skip"]],
        [["train.precision=float16"], ["train.on_nonfinite=skip"]],
    ),
)
def test_delayed_skip_equals_immediate_skip(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: list[str]
) -> None:
    def prepare(patch: pytest.MonkeyPatch) -> None:
        change_stage_output(
            patch, infinite_loss, 2, *([3] if "train.on_nonfinite=skip" in sets else []), once=False
        )
        patch.setattr(trainer, "LossScale", partial(LossScale, 2.0**24))

    code, rows, _ = run_late_and_immediate(config, tmp_path, capsys, prepare, *sets)
    assert code == 0
    skipped = [line.rpartition(b",")[2] for line in rows.splitlines()[1:]]
    assert b"1" in skipped and skipped[-1] == b"0"


def _run_replica(process: int, config: Config) -> list[tuple[str, list[torch.Tensor]]]:
    """Run one of two replicas. Only the second one has an infinite loss."""
    results = []
    for is_late in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            change_stage_output(patch, infinite_loss, 0, *([3] if process else []), once=False)
            program = build_program(config)
            run_trainer = _Trainer(config, program, Corpus(config), None)
            run_trainer.step_queue.can_read_late &= is_late
            member = RunMember(config.output.dir, ProcessLayout.from_program(program), process)
            dog = Watchdog(member, config.train.timeout)
            with pytest.raises(NonFiniteError) as error, dog:
                run_trainer.run(dog)
            results.append((str(error.value), copy_trained_state(run_trainer)))
    return results


@pytest.mark.parametrize("precision", cases(["float16"], ["float32"]))
def test_all_replicas_stop_at_nonfinite_step(config: str, precision: str) -> None:
    sets = ["pipeline.ranks=1", "pipeline.tp=1", "pipeline.dp=2", "pipeline.stages_per_rank=1",
            "train.log_every=100", "train.steps=7", f"train.precision={precision}"]  # fmt: skip
    run_config = read_config(config, sets)
    for (error, weights), (immediate_error, immediate_weights) in gloo_processes.run(
        partial(_run_replica, config=run_config), 2, limit=60
    ):
        assert error == immediate_error and " of step 4 is " in error and "in replica 1" in error
        assert all(torch.equal(a, b) for a, b in zip(weights, immediate_weights, strict=True))


def test_losses_are_read_immediately_without_norm(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a norm, each rank decides alone, and other ranks could run another step."""
    change_stage_output(monkeypatch, infinite_gradient, 2, 3, once=False)
    code, rows, _, delay = run_training(
        config, tmp_path, monkeypatch, True, "train.clip_grad_norm=0"
    )
    assert code == 1 and delay == 0 and rows.count(b"\n") == 4


class NoWait(TorchDispatchMode):
    """Raises an error for operations in which the host would wait for a GPU."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique",
             "_unique2", "item")  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # The states of generators are on the host, also those of a GPU.
        of_host = name == "equal" and args[0].dtype == torch.uint8
        assert of_host or name not in self.WAITS, f"the host waits in {func}"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("precision", "schedule"),
    cases(
        [("float16", "zb_h1")],
        [("float16", "interleaved"), ("float32", "zb_h1"), ("float32", "interleaved"),
         ("bfloat16", "interleaved"), ("bfloat16", "zb_h1")],
    ),
)  # fmt: skip
def test_step_without_report_has_no_host_wait(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, schedule: str
) -> None:
    adamw, watched = torch.optim.AdamW, list[str]()

    def forbid_waits(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call_without_waits(self: Any, *arguments: Any) -> Any:
            steps = self if isinstance(self, StepQueue) else self.step_queue
            # The host may wait in the first step and in a reported step.
            if not 1 <= steps.last_issued_step - (name == "issue") < 5:
                return method(self, *arguments)
            watched.append(name)
            with NoWait():  # type: ignore[no-untyped-call]
                return method(self, *arguments)

        monkeypatch.setattr(owner, name, call_without_waits)

    methods = [(StepQueue, "issue"), (StepQueue, "read_oldest_step"), (_Trainer, "_take_batch")]
    for owner, name in methods:
        forbid_waits(owner, name)
    # On a GPU, only the fused AdamW is used.
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: adamw(*a, **k | {"fused": True}))
    monkeypatch.setattr(trainer, "LossScale", partial(LossScale, 8.0))
    one_stage = ["pipeline.stages_per_rank=1"]
    sets = [*ONE_PROCESS, *(one_stage if schedule == "zb_h1" else []),
            f"pipeline.schedule={schedule}", f"train.precision={precision}", "output.record=true",
            f'output.dir="{tmp_path}"']  # fmt: skip
    assert run(config, sets) == 0
    assert {*watched} == {name for _, name in methods}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_adamw_on_gpu_is_fused_in_any_precision(config: str, precision: str) -> None:
    """AdamW is fused for all dtypes, uses float32 gradients, and never waits for the device."""
    run_config = read_config(config, ["train.device=cuda", f"train.precision={precision}"])
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=getattr(torch, precision)))
    p.grad_dtype = torch.float32
    optimizer: Any = build_optimizer([p], run_config.train)
    p.grad = torch.ones(2, 2)
    for _ in range(2):
        with NoWait():  # type: ignore[no-untyped-call]
            step_if_finite(torch.tensor(True), optimizer)
    inner = unwrap_optimizer(optimizer)
    assert all(group["fused"] for group in optimizer.param_groups)
    ((stepped, state),) = inner.state.items()
    assert (stepped is p) == (precision == "float32") and stepped.dtype == torch.float32
    assert stepped.grad is p.grad or stepped.grad.data_ptr() == p.grad.data_ptr()
    assert {t.device for t in state.values()} == {p.device} and float(state["step"]) == 2


def list_prefetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_invalid_token_is_error_of_its_step(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from schedir.training.batches.samples import Batches

    tokens = tmp_path / "tokens.bin"
    np.zeros(400, "<u2").tofile(tokens)
    steps: list[int] = []

    def fail_at_step_3(batches: Batches, first: int, count: int) -> None:
        if first == 3 * batches.batch_size:
            raise UsageError("token 300 at position 7 is not below the vocabulary size 256")

    def record_step(runner: ProgramRunner, *_: Any) -> None:
        steps.append(runner.state.random_streams.step)

    call_before(monkeypatch, Batches, "read_batch", fail_at_step_3)
    call_before(monkeypatch, ProgramRunner, "begin_step", record_step)
    sets = [*ONE_PROCESS, f'data.source="{tokens}"', f'output.dir="{tmp_path}"']
    with pytest.raises(UsageError, match="token 300"):
        run(config, sets)
    assert steps == [0, 1, 2] and not list_prefetch_threads()
    # If the previous step was not finite, that error ends the run.
    change_stage_output(monkeypatch, infinite_loss, 1, 2, once=False)
    assert run(config, sets) == 1 and " of step 3 is infinite" in capsys.readouterr().err
    assert not list_prefetch_threads()


def test_ctrl_c_in_step_ends_prefetch_threads(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_step_3(runner: ProgramRunner, *_: Any) -> None:
        assert list_prefetch_threads()
        if runner.state.random_streams.step == 3:
            raise KeyboardInterrupt

    call_before(monkeypatch, ProgramRunner, "begin_step", interrupt_step_3)
    assert run(config, [*ONE_PROCESS, f'output.dir="{tmp_path}"']) == 130
    assert not list_prefetch_threads()


@pytest.mark.parametrize("every", cases([3], [1, 100]))
def test_step_time_includes_data_wait_and_excludes_reports(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    clock = [0.0]

    def advance_clock(seconds: float, *_: Any) -> None:
        clock[0] += seconds

    durations = (
        (_Trainer, "_take_batch", 5.0),
        (Executor, "step", 1.0),
        (_Trainer, "_report", 1e2),
    )
    for owner, name, seconds in durations:
        call_before(monkeypatch, owner, name, partial(advance_clock, seconds))
    for module in (trainer, step_queue):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    sets = [f"train.log_every={every}", f'output.dir="{tmp_path}"']
    assert run(config, [*ONE_PROCESS, *sets]) == 0
    speed = json.loads((tmp_path / "summary.json").read_text())["tokens_per_second"]
    assert speed == pytest.approx(3 * 2 * 16 / 6.0)
