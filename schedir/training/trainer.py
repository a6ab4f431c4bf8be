"""Trainer: one rank of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.analysis.gathers import in_parts
from schedir.analysis.memory import held
from schedir.dumps.box import Phase
from schedir.errors import ExecutionError, in_bytes, in_words
from schedir.ir.program import Program
from schedir.ir.sizes import AT_REST, Sizes
from schedir.predict.calibrate import calibrate, format_bubbles
from schedir.predict.recomputation import recomputed
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.runtime.boundary import Boundary
from schedir.runtime.device_memory import times_asked, warning
from schedir.runtime.executor import Executor
from schedir.runtime.living import Living
from schedir.runtime.measured import measured
from schedir.runtime.precision import LossScale, MainOptimizer, float32_gradients
from schedir.runtime.sizes import sizes_of
from schedir.training import gpt
from schedir.training.config import Config
from schedir.training.data import Batches, load
from schedir.training.meeting import facts_of
from schedir.training.prefetch import Batch, Prefetch
from schedir.training.results import Losses, Result
from schedir.training.steps import Step, Steps
from schedir.training.train_config import TrainConfig
from schedir.training.watchdog import Watchdog
from schedir.transports.plain import gather
from schedir.transports.registry import choose
from schedir.transports.transport import has_left, is_late


def batches(config: Config) -> Batches:
    """The batches of all replicas together.  Raises UsageError for data that cannot be used."""
    pipeline, data = config.pipeline, config.data
    size = pipeline.dp * pipeline.microbatches * data.microbatch_size
    model = config.model
    return Batches(load(data.source), model.context, size, data.seed, vocab=model.vocab)


def train(
    config: Config, program: Program, losses: Losses | None, watchdog: Watchdog
) -> Result | None:
    """Train as one rank of `program`; the Result on global rank 0, None on the others.

    To be called within `processes`; `watchdog` is told what the process is at.  Rank 0 prints
    progress, and writes a line per step to `losses`: step (from 1), mean loss of its tokens,
    learning rate, norm of the gradient before clipping (empty without), and how many of its updates
    were skipped.

    Raises UsageError for data that cannot be used, ModelError for processes that do not make
    the program, and ExecutionError for a run that fails; NonFiniteError, in all processes alike,
    for one that stops because its numbers are not finite.
    """
    torch.set_num_threads(config.train.threads)
    try:
        return _Trainer(config, program, losses).run(watchdog)
    except RuntimeError as error:  # an instruction's has its name
        if is_late(error) and not has_left(error):
            fact = f"another process has not answered for {config.train.timeout:g} s"
        elif isinstance(error, torch.OutOfMemoryError | dist.DistError):
            fact = has_left(error) or in_words(error)
        else:
            raise
        raise ExecutionError(f"outside of a step, {fact}", program=program.name) from error


class _Trainer:
    def __init__(self, config: Config, program: Program, losses: Losses | None) -> None:
        self.config, self.program, self.losses = config, program, losses
        self.batches = batches(config)
        self.device = torch.device(config.train.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        dtype: torch.dtype = getattr(torch, config.train.precision)
        self.size = config.data.microbatch_size
        boundary = Boundary((self.size, config.model.context, config.model.hidden), dtype)
        message = math.prod(boundary.shape) * dtype.itemsize // program.tp  # each sends its slice
        connect = partial(
            choose(config.train.transport, config.train.device, program),
            timeout=config.train.timeout,
            device=self.device,
            message=message,
        )
        self.transport = connect(program)
        self.transport.agree(facts_of(config))
        plan, tp = program.plan, self.transport.tp_group
        division = config.pipeline.division
        make_stage = partial(gpt.build_stage, tp=tp, division=division, device=self.device)
        stages = {
            s: make_stage(config.model, s, plan.stages, dtype=dtype)
            for s in plan.stages_of[self.transport.rank]
        }
        for s, stage in stages.items():
            float32_gradients(stage)
            stage.requires_grad_(s >= program.frozen)
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        self.optimizer = _optimizer(parameters, config.train)
        self.loss_scale = LossScale(device=self.device) if dtype == torch.float16 else None
        loss = partial(gpt.loss, tp=tp)
        self.sizes = self._sizes(stages, loss, boundary)
        fitting = self._fitting()
        if fitting != program:
            self.transport.leave()
            self.transport, self.program = connect(fitting), fitting
            program = fitting
        self.executor = Executor(
            program,
            self.transport.rank,
            stages,
            self.transport,
            loss=loss,
            boundary=boundary,
            optimizer=self.optimizer,
            max_norm=config.train.clip if program.clip else None,
            loss_scale=self.loss_scale,
            seed=config.data.seed,
            record=config.output.record,
        )
        self.steps = Steps(
            self.executor,
            self.transport,
            microbatch_size=self.size,
            stops=config.train.nonfinite == "stop",
            loss_scale=self.loss_scale,
        )
        self.recent: list[Step] = []  # steps not yet reported
        self.timed: list[float] = []  # seconds of all steps but the first
        self.warned = False  # of memory that was asked for after the first step
        self.lived: tuple[int, ...] = ()

    def run(self, watchdog: Watchdog) -> Result | None:
        train, record, result = self.config.train, self.config.output.record, None
        enter = watchdog.own.box.enter
        self.memory = self._memory()
        if self.losses is not None:  # all have agreed, and are about to step
            self.losses.begin()
        prefetch = Prefetch(
            self.batches,
            train.steps,
            self.device,
            replica=self.transport.dp_rank,
            replicas=self.program.dp,
            count=gpt.count_tokens,
        )
        with prefetch, watchdog.watching(self.executor):
            for step in range(train.steps):
                enter(Phase.DATA, step + 1)
                reported = (step + 1) % train.log_every == 0 or step + 1 == train.steps
                self.executor.record = record and reported
                began, rate = perf_counter(), train.learning_rate(step)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                batch = self._take(prefetch, step)
                enter(Phase.STEP, step + 1)
                if self.config.output.memory and step == min(1, train.steps - 1):
                    with Living(self.executor) as living:
                        self.steps.issue(batch, rate, began)
                    self.lived = self._lived(living.most)
                else:
                    self.steps.issue(batch, rate, began)
                enter(Phase.REPORT, step + 1)
                if step == 0:
                    self.asked = times_asked(self.device)
                # The first step connects and warms up: its time is not that of the second.
                self._settle(int(self.steps.may_be_late and step > 0 and not reported))
                if reported:
                    result = self._report(step + 1)
        return result

    def _sizes(
        self, own: Mapping[int, nn.Module], loss: Callable[..., Tensor], boundary: Boundary
    ) -> Sizes:
        """What each stage keeps of a microbatch, and its weights: found by running it once."""
        stages = range(self.program.plan.stages)
        inputs, targets = (x[: self.size].to(self.device) for x in self.batches.batch(0))
        sizes = sizes_of(
            [own.get(s) for s in stages],
            inputs,
            targets,
            loss=loss,
            boundary=boundary,
            # AdamW's moments, and the float32 copies of other weights.
            state=12.0 if isinstance(self.optimizer, MainOptimizer) else 8.0,
            frozen=self.program.frozen,
            dp=self.program.dp,
            zero=self.program.zero,
        )
        measured = ("saved", "tape", "both", "checkpoint", *AT_REST, "version")
        each = torch.tensor(
            [sizes.of(name, len(stages)).tolist() for name in measured],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(each, dist.ReduceOp.MAX)
        return replace(sizes, **dict(zip(measured, map(tuple, each.tolist()), strict=True)))

    def _fitting(self) -> Program:
        """The program, or the one in its place that is within the limit of memory, if there is one:
        then process 0 says what it recomputes.  Raises MemoryLimitError where none is."""
        if self.config.memory.bytes is None:
            return self.program
        program = self.config.request_within(self.sizes).program
        if self.config.memory.fits and not dist.get_rank():
            what = recomputed(program) or "nothing"
            print(f"to hold at most {self.config.memory.limit}, recomputed: {what}", flush=True)
        return program

    def _memory(self) -> tuple[float, ...]:
        """The most that each rank will hold, in bytes, known to all; process 0 says it, and what of
        it replicas have in parts."""
        most = tuple(float(rank.bytes.max()) for rank in held(self.program, self.sizes))
        if not dist.get_rank():
            if parts := in_parts(self.program):
                print(parts, flush=True)
            said = ", ".join(map(in_bytes, most))
            print(f"memory held, predicted for each rank: {said}", flush=True)
        return most

    def _lived(self, most: int) -> tuple[int, ...]:
        """The most that lived of each rank, of its replicas and slices, known to all; process 0
        says it."""
        lived = tuple(np.array(gather(most))[self.transport.mesh].max((0, 2)).tolist())
        if not dist.get_rank():
            print(f"memory held, counted for each rank: {', '.join(map(in_bytes, lived))}")
        return lived

    def _take(self, prefetch: Prefetch, step: int) -> Batch:
        """The batch of a step; where there is none, what was wrong before it comes first."""
        try:
            return prefetch.take(step)
        except Exception:
            self._settle(0)
            raise

    def _settle(self, leaving: int) -> None:
        """Look at the numbers of all steps but so many.  Raises NonFiniteError for one that ends
        the run, after what is known of the steps before it has been said."""
        while len(self.steps.issued) > leaving:
            step = self.steps.settle()
            if step is not None:
                self.recent.append(step)
                continue
            if self.recent:
                self.executor.record = False
                self._report(self.steps.number - 1)
            raise self.steps.error()

    def _report(self, step: int) -> Result | None:
        """Bring losses and times of the recent steps to rank 0, which says them."""
        recent, self.recent = self.recent, []
        grew = times_asked(self.device) > self.asked
        parts = torch.tensor([*(s.loss for s in recent), grew], dtype=torch.float64)
        dist.all_reduce(parts)
        runs = self._runs() if self.executor.record else None
        if dist.get_rank():
            return None
        *losses, processes = parts.tolist()
        if processes and not self.warned:
            self.warned = True
            print(warning(int(processes), dist.get_world_size()), flush=True)
        first = step - len(recent) + 1
        for number, (s, loss) in enumerate(zip(recent, losses, strict=True), first):
            if self.losses is not None:
                norm = "" if s.norm is None else repr(s.norm)
                self.losses.write(f"{number},{loss!r},{s.learning_rate!r},{norm},{s.skipped}\n")

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
        return Result(self.program, losses[-1], speed, self.memory, self.lived, runs)

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


def _optimizer(
    parameters: list[torch.nn.Parameter], train: TrainConfig
) -> MainOptimizer | torch.optim.Optimizer:
    """AdamW, and of parameters in 16 bits that of float32 copies."""
    make = partial(_adamw, train=train)
    whole = train.precision == "float32" or not any(p.requires_grad for p in parameters)
    return make(parameters) if whole else MainOptimizer(parameters, make)


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
