"""Trainer: one rank of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from time import perf_counter
from typing import NamedTuple, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.memory import held
from schedir.errors import ExecutionError, Site, in_bytes, in_words
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes
from schedir.predict.calibrate import calibrate, format_bubbles
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.finite import find_origin, not_finite
from schedir.runtime.measured import measured
from schedir.runtime.precision import LossScale, MainOptimizer, float32_gradients
from schedir.runtime.rank import Boundary
from schedir.runtime.sizes import sizes_of
from schedir.runtime.warmup import warm_up
from schedir.training import gpt
from schedir.training.config import Config, TrainConfig
from schedir.training.data import Batches, load
from schedir.training.launch import crash
from schedir.transports.registry import choose
from schedir.transports.transport import has_left


@dataclass(frozen=True)
class Result:
    """What a run leaves: its last loss and speed, and its last step, measured and predicted.

    The prediction is from the mean times that the step measured.  There are no `runs` where
    nothing was recorded.  `memory` is the most that each rank holds, in bytes, as predicted from
    what the stages keep of one microbatch.
    """

    program: Program
    loss: float
    tokens_per_second: float
    memory: tuple[float, ...]
    runs: tuple[Timeline, Timeline] | None


def batches(config: Config) -> Batches:
    """The batches of all replicas together.  Raises UsageError for data that cannot be used."""
    pipeline, data = config.pipeline, config.data
    size = pipeline.dp * pipeline.microbatches * data.microbatch_size
    model = config.model
    return Batches(load(data.source), model.context, size, data.seed, vocab=model.vocab)


def train(config: Config, program: Program, losses: TextIO | None = None) -> Result | None:
    """Train as one rank of `program`; the Result on global rank 0, None on the others.

    To be called within `processes`.  Rank 0 prints progress, and writes a line per step to
    `losses`: step (from 1), mean loss of its tokens, learning rate, norm of the gradient before
    clipping (empty without), and how many of its updates were skipped.

    Raises UsageError for data that cannot be used, ModelError for processes that do not make
    the program, and ExecutionError for a run that fails; NonFiniteError, in all processes alike,
    for one that stops because its numbers are not finite.
    """
    torch.set_num_threads(config.train.threads)
    try:
        return _Trainer(config, program, losses).run()
    except (torch.OutOfMemoryError, dist.DistError) as error:  # an instruction's has its name
        fact = has_left(error) or in_words(error)
        raise ExecutionError(f"outside of a step, {fact}", program=program.name) from error


class _Step(NamedTuple):
    """A step as one rank knows it: `loss` is its part of the mean over all tokens."""

    loss: float
    learning_rate: float
    norm: float | None
    skipped: int  # updates
    seconds: float


class _Trainer:
    def __init__(self, config: Config, program: Program, losses: TextIO | None) -> None:
        self.config, self.program, self.losses = config, program, losses
        self.batches = batches(config)
        self.device = torch.device(config.train.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        dtype: torch.dtype = getattr(torch, config.train.precision)
        self.size = config.data.microbatch_size
        boundary = Boundary((self.size, config.model.context, config.model.hidden), dtype)
        message = math.prod(boundary.shape) * dtype.itemsize // program.tp  # each sends its slice
        transport = choose(config.train.transport, config.train.device, program)
        self.transport = transport(
            program, config.train.timeout, device=self.device, message=message
        )
        self.transport.agree(_facts(config))
        plan, tp = program.plan, self.transport.tp_group
        division = config.pipeline.division
        make_stage = partial(gpt.build_stage, tp=tp, division=division, device=self.device)
        stages = {
            s: make_stage(config.model, s, plan.stages, dtype=dtype)
            for s in plan.stages_of[self.transport.rank]
        }
        for stage in stages.values():
            float32_gradients(stage)
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        make = partial(_adamw, train=config.train)
        self.optimizer: MainOptimizer | torch.optim.Optimizer = (
            make(parameters) if dtype == torch.float32 else MainOptimizer(parameters, make)
        )
        self.loss_scale = LossScale(device=self.device) if dtype == torch.float16 else None
        self.executor = Executor(
            program,
            self.transport.rank,
            stages,
            self.transport,
            loss=partial(gpt.loss, tp=tp),
            boundary=boundary,
            optimizer=self.optimizer,
            max_norm=config.train.clip if program.clip else None,
            loss_scale=self.loss_scale,
            seed=config.data.seed,
            record=config.output.record,
        )
        self.recent: list[_Step] = []  # steps not yet reported
        self.timed: list[float] = []  # seconds of all steps but the first
        self.step = 0

    def run(self) -> Result | None:
        train, record, result = self.config.train, self.config.output.record, None
        inputs, targets = (x[: self.size].to(self.device) for x in self.batches.batch(0))
        if self.device.type == "cuda":
            warm_up(self.executor, inputs, targets)
        self.sizes = self._sizes(inputs, targets)
        self.memory = self._memory()
        with self._watchdog():
            for step in range(train.steps):
                reported = (step + 1) % train.log_every == 0 or step + 1 == train.steps
                self.executor.record = record and reported
                self.recent.append(self._step(step))
                if reported:
                    result = self._report(step + 1)
        return result

    def _sizes(self, input: Tensor, target: Tensor) -> Sizes:
        """What each stage keeps of a microbatch, and its weights: found by running it once."""
        executor, stages = self.executor, range(self.program.plan.stages)
        own = {s: stage.module for s, stage in executor.stages.items()}
        sizes = sizes_of(
            [own.get(s) for s in stages],
            input,
            target,
            loss=executor.state.loss,
            boundary=executor.state.boundary,
            # AdamW's moments, and the float32 copies of other weights.
            state=12.0 if isinstance(self.optimizer, MainOptimizer) else 8.0,
        )
        measured = ("saved", "tape", "both", "weights", "version")
        each = torch.tensor(
            [sizes.of(name, len(stages)).tolist() for name in measured],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(each, dist.ReduceOp.MAX)
        return replace(sizes, **dict(zip(measured, map(tuple, each.tolist()), strict=True)))

    def _memory(self) -> tuple[float, ...]:
        """The most that each rank will hold, in bytes, known to all; process 0 says it."""
        most = tuple(float(rank.bytes.max()) for rank in held(self.program, self.sizes))
        if not dist.get_rank():
            said = ", ".join(map(in_bytes, most))
            print(f"memory held, predicted for each rank: {said}", flush=True)
        return most

    @contextmanager
    def _watchdog(self) -> Iterator[None]:
        """Crash if one instruction takes longer than the timeout, and say where it stands."""
        most, done = self.config.train.timeout, Event()

        def watch() -> None:
            stood, since = (-1, -1), 0.0
            while not done.wait(min(1.0, most / 4)):
                stands = self.step, self.executor.position
                if stands != stood:
                    stood, since = stands, perf_counter()
                elif perf_counter() - since > most:
                    crash(str(self._stands(f"nothing has moved for {most:g} s")))

        Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _stands(self, fact: str) -> ExecutionError:
        k = self.executor.position
        site = Site(
            self.executor.rank, k, self.executor.state.stream[k], f"in step {self.step + 1}"
        )
        return ExecutionError(fact, program=self.program.name, sites=[site])

    def _step(self, step: int) -> _Step:
        self.step, began = step, perf_counter()
        lr = self.config.train.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Every rank draws the batch of all replicas, so that each can count its tokens.
        inputs, targets = self.batches.batch(step)
        mean = 1 / gpt.count_tokens(targets)
        share = len(inputs) // self.program.dp
        mine = slice(self.transport.dp_rank * share, (self.transport.dp_rank + 1) * share)
        given = (
            inputs[mine].to(self.device).split(self.size),
            targets[mine].to(self.device).split(self.size),
            mean * self.program.plan.updates,  # each has its share of the tokens
        )
        total = self.executor.step(*given)
        skipped = int((~self.executor.finite).sum())
        if self._fails(skipped, total):
            self._stop(step, given)
        # Tensor-parallel ranks all know the loss: the first counts.
        counts = total is not None and self.transport.tp_rank == 0
        loss = float(total) * mean if total is not None and counts else 0.0
        norm = float(self.executor.norm) if self.program.clip else None
        return _Step(loss, lr, norm, skipped, perf_counter() - began)

    def _fails(self, skipped: int, total: Tensor | None) -> bool:
        """Whether a step that was not finite ends the run; all processes come to the same."""
        if self.config.train.nonfinite == "skip":
            return False
        if not self.program.clip:  # each rank knows of its own gradients only
            skipped = _most(skipped)
        if not skipped or self.loss_scale is None:
            return skipped > 0
        # The scale is there to be too large, and is halved; but it makes no loss, and below 1 no
        # gradient larger.
        scaled = float(self.executor.state.scale) < 1.0
        return bool(_most(not scaled or not (total is None or bool(total.isfinite()))))

    def _stop(self, step: int, given: tuple[Sequence[Tensor], Sequence[Tensor], float]) -> NoReturn:
        """Say what is known of the steps before, and where this one went wrong."""
        if self.recent:
            self.executor.record = False
            self._report(step)
        found = find_origin(self.executor, self.transport, *given)
        raise not_finite(found, self.program, step + 1)

    def _report(self, step: int) -> Result | None:
        """Bring losses and times of the recent steps to rank 0, which says them."""
        recent, self.recent = self.recent, []
        parts = torch.tensor([s.loss for s in recent], dtype=torch.float64)
        dist.all_reduce(parts)
        runs = self._runs() if self.executor.record else None
        if dist.get_rank():
            return None
        losses = parts.tolist()
        first = step - len(recent) + 1
        for number, (s, loss) in enumerate(zip(recent, losses, strict=True), first):
            if self.losses is not None:
                norm = "" if s.norm is None else repr(s.norm)
                self.losses.write(f"{number},{loss!r},{s.learning_rate!r},{norm},{s.skipped}\n")
        if self.losses is not None:
            self.losses.flush()

        seconds = [s.seconds for s in recent]
        # The first step connects and warms up: it is no measure.
        timed = seconds[1:] if first == 1 else seconds
        self.timed += timed
        last = recent[-1]
        bubble = "" if runs is None else f"  {format_bubbles(*runs)}"
        clipped = "" if last.norm is None else f"  norm {last.norm:.3f}"
        scaled = "" if self.loss_scale is None else f"  scale {float(self.loss_scale.value):g}"
        skipped = sum(s.skipped for s in recent)
        if skipped or self.config.train.nonfinite == "skip":
            scaled += f"  skipped {skipped}"
        print(
            f"step {step:>{len(str(self.config.train.steps))}}  loss {losses[-1]:.4f}"
            f"  {self._speed(timed or seconds):,.0f} tokens/s  lr {last.learning_rate:.2e}"
            f"{clipped}{scaled}{bubble}",
            flush=True,
        )
        speed = self._speed(self.timed or seconds)
        return Result(self.program, losses[-1], speed, self.memory, runs)

    def _runs(self) -> tuple[Timeline, Timeline] | None:
        """The last step as it was, and as predicted from its mean times; on process 0 alone."""
        timeline = measured(self.executor, self.transport)
        if timeline is None:
            return None
        named = replace(self.program, name=f"{self.program.name} at measured means")
        costs, sizes = calibrate(timeline), self.sizes
        model, blocks = timeline.model, timeline.blocks
        predicted = simulate(self.program, costs, model=model, blocks=blocks, sizes=sizes)
        predicted = replace(predicted, program=named, unit=timeline.unit)
        return replace(timeline, sizes=sizes), predicted

    def _speed(self, seconds: list[float]) -> float:
        """Tokens per second in steps that took so long."""
        return self.batches.size * self.batches.context * len(seconds) / sum(seconds)


def _facts(config: Config) -> dict[str, str]:
    """What must be the same in the configuration that each process has read."""
    own = {"data.source", "train.threads"}  # a machine's own
    tables = {"model": config.model, "data": config.data, "train": config.train}
    facts = {f"{t}.{key}": str(v) for t, table in tables.items() for key, v in vars(table).items()}
    facts["pipeline.division"] = str(config.pipeline.division)
    return {key: value for key, value in facts.items() if key not in own}


def _most(number: int) -> int:
    """The largest of a number of each process, known to all."""
    most = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _adamw(parameters: list[torch.nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=train.lr,
        betas=train.betas,
        # A fused one skips without the host.
        fused=train.device == "cuda" or train.precision == "float16" or None,
    )
