"""Runs that read the loss of a step only after issuing the next step are bitwise equal."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
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
from schedir.runtime.parameters.mixed_precision import LossScale, step_if_finite, unwrap_optimizer
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
from tests.cases import pairs
from tests.cpu import gloo_processes

ONE = ["pipeline.ranks=1", "pipeline.tp=1", "pipeline.stages_per_rank=4", "train.log_every=100",
       "train.steps=7"]  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "float16")
Spoil = Callable[[torch.Tensor], torch.Tensor]


def infinite_loss(y: torch.Tensor) -> torch.Tensor:
    return y * math.nan


def infinite_gradient(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda dy: dy * math.inf)
    return y


def spoilt(patch: pytest.MonkeyPatch, what: Spoil, stage: int, *steps: int, once: bool) -> None:
    """Change the output of a stage in some steps, from 0.

    With `once`, the output is not changed again if the step runs a second time.
    """
    made, begun, runs = gpt.build_stage, ProgramRunner.begin_step, list[int]()

    def begin(self: ProgramRunner, *given: Any) -> None:
        if self.program.has_backward:
            runs.append(self.state.random_streams.step)
        begun(self, *given)

    def build_stage(config: Any, s: int, stages: int, **more: Any) -> Any:
        def spoil(module: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
            now = runs[-1] if runs else -1
            return what(y) if now in steps and not (once and runs.count(now) > 1) else y

        module = made(config, s, stages, **more)
        if s == stage:
            module.register_forward_hook(spoil)
        return module

    patch.setattr(ProgramRunner, "begin_step", begin)
    patch.setattr(gpt, "build_stage", build_stage)


def learned(made: _Trainer) -> list[torch.Tensor]:
    """Return copies of the weights, the main parameters and the optimizer state."""
    inner: Any = getattr(made.optimizer, "inner", made.optimizer)
    own = [p for s in made.executor.stages.values() for p in s.module.parameters()]
    kept = [*own, *getattr(made.optimizer, "main_parameters", [])]
    kept += [t for state in inner.state.values() for t in state.values()]
    return [t.detach().clone() for t in kept]


def outcome(
    config: str, folder: Path, patch: pytest.MonkeyPatch, late: bool, *sets: str
) -> tuple[int, bytes, list[torch.Tensor], int]:
    """Run a training. Return the exit code, loss.csv, the trained tensors, and the delay.

    The delay is the number of steps that were issued before the loss of a step was read. It is 0 if
    `late` is False.
    """
    trainers, begin, lates = [], _Trainer.__init__, list[int]()
    settle = StepQueue.read_oldest_step

    def init(self: _Trainer, *given: Any) -> None:
        begin(self, *given)
        trainers.append(self)
        self.step_queue.can_read_late &= late

    def counted(self: StepQueue) -> Any:
        lates.append(len(self.pending_steps) - 1)
        return settle(self)

    patch.setattr(_Trainer, "__init__", init)
    patch.setattr(StepQueue, "read_oldest_step", counted)
    code = run(config, [*ONE, *sets, f'output.dir="{folder}"'])
    return code, (folder / "loss.csv").read_bytes(), learned(trainers[0]), sum(lates)


def both(
    config: str, tmp_path: Path, prepare: Callable[[pytest.MonkeyPatch], None], *sets: str
) -> Iterator[tuple[Any, ...]]:
    for late in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            prepare(patch)
            yield outcome(config, tmp_path / str(late), patch, late, *sets)


# With a loss scale of 0.5, the gradient of a float16 loss is never too large.
@pytest.mark.parametrize(
    ("what", "scale", "once", "precision"),
    pairs(
        [(infinite_loss, 1024.0), (infinite_gradient, 0.5)],
        [False, True],
        ["float32", "float16"],
    ),
)
def test_a_run_that_stops_late_is_one_that_stops_at_once(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: Spoil,
    scale: float,
    once: bool,
    precision: str,
) -> None:
    def prepare(patch: pytest.MonkeyPatch) -> None:
        spoilt(patch, what, 2, 3, once=once)
        patch.setattr(trainer, "LossScale", partial(LossScale, scale))

    seen, said = [], []
    for found in both(config, tmp_path, prepare, f"train.precision={precision}"):
        seen.append(found)
        out, err = capsys.readouterr()
        steps = [line.split("  ") for line in out.splitlines() if line.startswith("step ")]
        said.append((err, [[part for part in line if "tokens/s" not in part] for line in steps]))
    (code, rows, weights, late), (_, rows_then, weights_then, never) = seen
    assert code == 1 and late > 0 and never == 0
    assert said[0] == said[1] and " of step 4 is infinite" in said[0][0]
    assert "has the first such value" in said[0][0]
    assert rows == rows_then and rows.count(b"\n") == 4
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_then, strict=True))


def test_one_of_several_updates_stops_late_as_at_once(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a bad update, the other updates of its step run, but not those of the next step."""
    calls = count()  # calls of the stage; a step has one per microbatch

    def first_two(y: torch.Tensor) -> torch.Tensor:
        return infinite_gradient(y) if next(calls) % 3 < 2 else y

    sets = ["pipeline.stages_per_rank=4", "pipeline.placement=[0,0,0,0]",
            "pipeline.optimizer_steps=3",
            "pipeline.weight_delay=1"]  # fmt: skip
    seen, said = [], []
    for found in both(config, tmp_path, partial(_spoil, first_two), *sets):
        seen.append(found)
        said.append(capsys.readouterr().err)
    (code, rows, weights, late), (_, rows_then, weights_then, _) = seen
    assert code == 1 and late > 0 and rows == rows_then
    assert said[0] == said[1] and "of step 4 is infinite" in said[0] and " B 1." in said[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_then, strict=True))


def _spoil(what: Spoil, patch: pytest.MonkeyPatch) -> None:
    spoilt(patch, what, 1, 3, once=False)


@pytest.mark.parametrize(
    "sets",
    [
        ["train.precision=float16"],  # the loss scale is too large for some steps
        ["train.precision=float16", "train.on_nonfinite=skip"],
        ["train.on_nonfinite=skip"],
    ],
)
def test_what_is_skipped_late_is_skipped_as_at_once(
    config: str, tmp_path: Path, sets: list[str]
) -> None:
    def prepare(patch: pytest.MonkeyPatch) -> None:
        spoilt(
            patch, infinite_loss, 2, *([3] if "train.on_nonfinite=skip" in sets else []), once=False
        )
        patch.setattr(trainer, "LossScale", partial(LossScale, 2.0**24))

    (code, rows, weights, late), (_, rows_then, weights_then, _) = both(
        config, tmp_path, prepare, *sets
    )
    assert code == 0 and late > 0 and rows == rows_then
    skipped = [line.rpartition(b",")[2] for line in rows.splitlines()[1:]]
    assert b"1" in skipped and skipped[-1] == b"0"
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_then, strict=True))


def _replica(process: int, config: Config) -> list[tuple[str, list[torch.Tensor]]]:
    """Run one of two replicas. Only the second one has an infinite loss."""
    found = []
    for late in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            spoilt(patch, infinite_loss, 0, *([3] if process else []), once=False)
            program = build_program(config)
            made = _Trainer(config, program, Corpus(config), None)
            made.step_queue.can_read_late &= late
            own = RunMember(config.output.dir, ProcessLayout.from_program(program), process)
            dog = Watchdog(own, config.train.timeout)
            with pytest.raises(NonFiniteError) as error, dog:
                made.run(dog)
            found.append((str(error.value), learned(made)))
    return found


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_no_replica_goes_on(config: str, precision: str) -> None:
    sets = ["pipeline.ranks=1", "pipeline.tp=1", "pipeline.dp=2", "pipeline.stages_per_rank=1",
            "train.log_every=100", "train.steps=7", f"train.precision={precision}"]  # fmt: skip
    told = read_config(config, sets)
    for (said, weights), (said_then, weights_then) in gloo_processes.run(
        partial(_replica, config=told), 2, limit=60
    ):
        assert said == said_then and " of step 4 is " in said and "in replica 1" in said
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_then, strict=True))


def test_where_each_rank_judges_by_itself_numbers_are_read_at_once(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a norm, other ranks could run another step, so losses are read immediately."""
    spoilt(monkeypatch, infinite_gradient, 2, 3, once=False)
    code, rows, _, lates = outcome(config, tmp_path, monkeypatch, True, "train.clip_grad_norm=0")
    assert code == 1 and lates == 0 and rows.count(b"\n") == 4


# Operations that wait for a device.


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


@pytest.mark.parametrize("schedule", ["interleaved", "zb_h1"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_that_is_not_reported_waits_for_nothing(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    schedule: str,
) -> None:
    adamw, watched, takes = torch.optim.AdamW, list[str](), _Trainer._take_batch

    def guarded(home: type, name: str) -> None:
        method = getattr(home, name)

        def inside(self: Any, *given: Any) -> Any:
            steps = self if isinstance(self, StepQueue) else self.step_queue
            if (
                not 1 <= steps.last_issued_step - (name == "issue") < 5
            ):  # the host may wait in the first step and in a reported step
                return method(self, *given)
            watched.append(name)
            with NoWait():  # type: ignore[no-untyped-call]
                return method(self, *given)

        monkeypatch.setattr(home, name, inside)

    methods = ((StepQueue, "issue"), (StepQueue, "read_oldest_step"), (_Trainer, "_take_batch"))
    for home, name in methods:
        guarded(home, name)
    # On a GPU, only the fused AdamW is used.
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: adamw(*a, **k | {"fused": True}))
    monkeypatch.setattr(trainer, "LossScale", partial(LossScale, 8.0))
    one = ["pipeline.stages_per_rank=1"]
    sets = [*ONE, *(one if schedule == "zb_h1" else []), f"pipeline.schedule={schedule}",
            f"train.precision={precision}", f'output.dir="{tmp_path}"']  # fmt: skip
    assert run(config, sets) == 0
    assert {*watched} == {
        "issue",
        "read_oldest_step",
        "_take_batch",
    } and takes is not _Trainer._take_batch


@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_gpu_adamw_is_fused_in_any_precision(config: str, precision: str) -> None:
    """AdamW is fused for all dtypes, uses float32 gradients, and never waits for the device."""
    told = read_config(config, ["train.device=cuda", f"train.precision={precision}"])
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=getattr(torch, precision)))
    p.grad_dtype = torch.float32
    optimizer: Any = build_optimizer([p], told.train)
    p.grad = torch.ones(2, 2)
    for _ in range(2):
        with NoWait():  # type: ignore[no-untyped-call]  # nor when it makes what it keeps
            step_if_finite(torch.tensor(True), optimizer)
    inner = unwrap_optimizer(optimizer)
    assert all(group["fused"] for group in optimizer.param_groups)
    ((stepped, state),) = inner.state.items()
    assert (stepped is p) == (precision == "float32") and stepped.dtype == torch.float32
    assert stepped.grad is p.grad or stepped.grad.data_ptr() == p.grad.data_ptr()
    assert {t.device for t in state.values()} == {p.device} and float(state["step"]) == 2


# Errors and ends of the data.


def prefetching() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_a_token_that_is_none_is_an_error_of_its_step(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from schedir.training.batches.samples import Batches

    tokens = tmp_path / "tokens.bin"
    np.zeros(400, "<u2").tofile(tokens)
    drawn, begun, steps = Batches.read_batch, ProgramRunner.begin_step, list[int]()

    def batch(self: Batches, first: int, count: int) -> Any:
        if first == 3 * self.batch_size:
            raise UsageError("token 300 at position 7 is not below the vocabulary size 256")
        return drawn(self, first, count)

    def begin(self: ProgramRunner, *given: Any) -> None:
        steps.append(self.state.random_streams.step)
        begun(self, *given)

    monkeypatch.setattr(Batches, "read_batch", batch)
    monkeypatch.setattr(ProgramRunner, "begin_step", begin)
    sets = [*ONE, f'data.source="{tokens}"', f'output.dir="{tmp_path}"']
    with pytest.raises(UsageError, match="token 300"):
        run(config, sets)
    assert steps == [0, 1, 2] and not prefetching()
    # If the previous step was not finite, that error ends the run.
    spoilt(monkeypatch, infinite_loss, 1, 2, once=False)
    assert run(config, sets) == 1 and " of step 3 is infinite" in capsys.readouterr().err
    assert not prefetching()


def test_ctrl_c_in_a_step_leaves_no_thread(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = ProgramRunner.begin_step

    def begin(self: ProgramRunner, *given: Any) -> None:
        assert prefetching()
        if self.state.random_streams.step == 3:
            raise KeyboardInterrupt
        begun(self, *given)

    monkeypatch.setattr(ProgramRunner, "begin_step", begin)
    assert run(config, [*ONE, f'output.dir="{tmp_path}"']) == 130
    assert not prefetching()


@pytest.mark.parametrize("every", [1, 3, 100])
def test_the_time_of_a_step_has_its_wait_for_data(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The time of a step includes its wait for data, and excludes the time of reports."""
    now = [0.0]

    def lasts(home: type, name: str, seconds: float) -> None:
        method = getattr(home, name)

        def longer(self: Any, *given: Any) -> Any:
            now[0] += seconds
            return method(self, *given)

        monkeypatch.setattr(home, name, longer)

    lasts(_Trainer, "_take_batch", 5.0)
    lasts(Executor, "step", 1.0)
    lasts(_Trainer, "_report", 100.0)
    for module in (trainer, step_queue):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    sets = [*ONE, "output.record=false", f"train.log_every={every}", f'output.dir="{tmp_path}"']
    assert run(config, sets) == 0
    speed = json.loads((tmp_path / "summary.json").read_text())["tokens_per_second"]
    assert speed == pytest.approx(3 * 2 * 16 / 6.0)
