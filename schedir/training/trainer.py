"""Trainer: one rank of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial, reduce
from time import perf_counter
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.analysis.memory.footprint import held, tiers_of
from schedir.analysis.memory.unshard_counts import in_parts
from schedir.errors import ExecutionError, format_bytes, in_words
from schedir.io.black_box import ProcessPhase
from schedir.ir.cost.sizes import AT_REST, Sizes
from schedir.ir.program import Program
from schedir.predict.calibrate import calibrate, format_bubbles
from schedir.predict.recompute_summary import recomputed
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.mixed_precision import LossScale, MainOptimizer
from schedir.runtime.recording.allocator_growth import times_asked, warning
from schedir.runtime.recording.live_memory import LiveMemory
from schedir.runtime.recording.measured_timeline import measured
from schedir.training.batches.prefetch import Prefetch, TrainingBatch
from schedir.training.batches.text_batches import Corpus
from schedir.training.checkpointing import TrainingCheckpoints
from schedir.training.config.run_config import Config
from schedir.training.evaluation import Evaluation, EvaluationResult, program_beside
from schedir.training.optimizer import optimizer_of
from schedir.training.processes.process_exit import TerminationNotice
from schedir.training.processes.startup_consistency import agree_on_data, facts_of
from schedir.training.processes.watchdog import Watchdog
from schedir.training.run_results import LossLog, RunResult
from schedir.training.stage_factory import Passing, ProgramStages
from schedir.training.step_loop import IssuedStep, StepLoop
from schedir.transports.json_collectives import gather
from schedir.transports.registry import choose
from schedir.transports.transport import has_left, is_late


def train(
    config: Config,
    program: Program,
    corpus: Corpus,
    losses: LossLog | None,
    watchdog: Watchdog,
) -> RunResult | None:
    """Train as one rank of `program` on a corpus; the Result on global rank 0, None on the others.

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
        return _Trainer(config, program, corpus, losses).run(watchdog)
    except RuntimeError as error:  # an instruction's has its name
        if is_late(error) and not has_left(error):
            fact = f"another process has not answered for {config.train.timeout:g} s"
        elif isinstance(error, torch.OutOfMemoryError | dist.DistError):
            fact = has_left(error) or in_words(error)
        else:
            raise
        raise ExecutionError(f"outside of a step, {fact}", program=program.name) from error


class _Trainer:
    def __init__(
        self, config: Config, program: Program, corpus: Corpus, losses: LossLog | None
    ) -> None:
        self.config, self.program, self.losses = config, program, losses
        self.batches = corpus.batches
        self.device = torch.device(config.train.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        made = ProgramStages(config, program)
        self.module, self.size, boundary = made.model.module, made.size, made.boundary
        beside = partial(program_beside, config)  # what evaluates on its stages
        connect = partial(
            choose(config.train.transport, config.train.device, program, *beside(program)),
            timeout=config.train.timeout,
            device=self.device,
            message=made.message,
        )
        self.transport = connect(program, more=beside(program))
        self.transport.agree(facts_of(config))
        tp = self.transport.tp_group
        stages = made.made(self.transport.rank, tp, self.device)
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        self.optimizer = optimizer_of(parameters, config.train)
        self.loss_scale = LossScale(device=self.device) if made.dtype == torch.float16 else None
        loss = partial(self.module.loss, tp=tp)
        self.sizes = self._sizes(stages, loss, boundary)
        fitting = self._fitting()
        if fitting != program:
            self.transport.leave()
            program = self.program = fitting
            self.transport = connect(program, more=beside(program))
        self.executor = Executor(
            program,
            self.transport.rank,
            stages,
            self.transport,
            loss=loss,
            boundary=boundary,
            optimizer=self.optimizer,
            max_norm=config.train.clip_grad_norm if program.clip_grad_norm else None,
            loss_scale=self.loss_scale,
            seed=config.data.seed,
            more=beside(program),
            record=config.output.record,
            folder=config.memory.spill_dir,
        )
        self.evaluation: Evaluation | None = None
        if config.train.evaluate_every and corpus.held_out is not None:
            self.evaluation = Evaluation(config, corpus.held_out, self.executor, self.transport)
        self.steps = StepLoop(
            self.executor,
            self.transport,
            microbatch_size=self.size,
            stops=config.train.on_nonfinite == "stop",
            loss_scale=self.loss_scale,
        )
        self.saving = TrainingCheckpoints(self.executor, config.train, self.batches, losses)
        self.recent: list[IssuedStep] = []  # steps not yet reported
        self.timed: list[float] = []  # seconds of all steps but the first
        self.read = 0  # a crc32 of what was drawn
        self.warned = False  # of memory that was asked for after the first step
        self.lived: tuple[int, ...] = ()

    def run(self, watchdog: Watchdog) -> RunResult | None:
        train, record, result = self.config.train, self.config.output.record, None
        enter = watchdog.own.box.enter
        self.memory = self._memory()
        made = self.saving.go_on()
        if made >= train.steps:
            return self._nothing_to_do(made)
        self.steps.number = made
        if self.losses is not None:  # all have agreed, and are about to step
            self.losses.begin(made)
        prefetch = Prefetch(
            self.batches,
            train.steps,
            self.device,
            replica=self.transport.dp_rank,
            replicas=self.program.dp,
            count=self.module.count_tokens,
            begin=made,
            taken=self.saving.taken,
        )
        stop = watchdog.stop
        with prefetch, closing(self.saving), watchdog.watching(self.executor):
            for step in range(made, train.steps):
                if stop is not None and not stop.begins(step + 1):
                    self._end_as_told(step, enter)
                if self.saving.beside(step):
                    enter(ProcessPhase.SAVE, step)
                    self.saving.copy(step)
                enter(ProcessPhase.DATA, step + 1)
                saves = self.saving.at_once(step + 1)
                logs = (step + 1) % train.log_every == 0 or step + 1 == train.steps
                self.executor.record = record and logs
                began, rate = perf_counter(), train.learning_rate(step)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                batch = self._take(prefetch, step)
                enter(ProcessPhase.STEP, step + 1)
                if self.config.output.memory and step == min(made + 1, train.steps - 1):
                    with LiveMemory(self.executor) as living:
                        self.steps.issue(batch, rate, began)
                    self.lived = self._lived(living.most)
                else:
                    self.steps.issue(batch, rate, began)
                enter(ProcessPhase.REPORT, step + 1)
                if step == made:
                    self.asked = times_asked(self.device)
                # The first step connects and warms up: its time is not that of the second.  What is
                # saved has been judged.
                late = self.steps.may_be_late and step > made and not (logs or saves)
                self._settle(int(late))
                if self.recent and (logs or saves or self.saving.due):
                    result = self._report(self.steps.number - len(self.steps.issued))
                self.saving.write()
                if self.evaluation is not None and self.evaluation.is_due(step + 1):
                    self._settle(0)
                    enter(ProcessPhase.EVALUATE, step + 1)
                    self._evaluate(self.evaluation.after(step + 1))
                if saves:
                    enter(ProcessPhase.SAVE, step + 1)
                    self.saving.save(step + 1)
        return result

    def _end_as_told(self, step: int, enter: Callable[[ProcessPhase, int], None]) -> NoReturn:
        """Save what is after the last step, unless it is saved, and end the run: raises Told."""
        enter(ProcessPhase.REPORT, step)
        self._settle(0)
        self.executor.record = False
        if self.recent:
            self._report(step)
        enter(ProcessPhase.SAVE, step)
        self.saving.ended()
        if step > self.saving.saved:
            self.saving.save(step)
        raise TerminationNotice(self.saving.where)

    def _nothing_to_do(self, made: int) -> RunResult | None:
        """What a run leaves that has made all its steps before: as it was, if there is any."""
        if self.losses is None:
            return None
        steps = self.config.train.steps
        said = f"all of its {steps} steps have been made"
        if made > steps:
            said = f"{made} steps have been made, and train.steps is {steps}: nothing is to be done"
        print(said, flush=True)
        if self.losses.finished:
            return None
        lost = self.losses.last()
        return RunResult(self.program, lost, math.nan, self.memory, (), None)

    def _evaluate(self, found: EvaluationResult) -> None:
        """Say what was found; process 0 does."""
        if not dist.get_rank():
            print(found, flush=True)
        if self.losses is not None:
            self.losses.evaluated(found.row)

    def _sizes(
        self, own: Mapping[int, nn.Module], loss: Callable[..., Tensor], boundary: Passing
    ) -> Sizes:
        """What each stage keeps of a microbatch, and its weights: found by running it once."""
        stages = range(self.program.shape.stages)
        inputs, targets = (one.to(self.device) for one in self.batches.batch(0, self.size))
        sizes = measure_sizes(
            [own.get(s) for s in stages],
            inputs,
            targets,
            loss=loss,
            boundary=boundary,
            # AdamW's moments, and the float32 copies of other weights.
            state=12.0 if isinstance(self.optimizer, MainOptimizer) else 8.0,
            frozen_stages=self.program.frozen_stages,
            dp=self.program.dp,
            zero=self.program.zero,
        )
        measured = (
            "saved",
            "deferred_wgrad",
            "saved_and_deferred",
            "checkpoint",
            *AT_REST,
            "version",
        )
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
            print(
                f"to hold at most {self.config.memory.memory_limit}, recomputed: {what}", flush=True
            )
        return program

    def _memory(self) -> tuple[float, ...]:
        """The most that each rank will hold, in bytes, known to all; process 0 says it, and what of
        it replicas have in parts."""
        most = tuple(float(rank.bytes.max()) for rank in held(self.program, self.sizes))
        if not dist.get_rank():
            if parts := in_parts(self.program):
                print(parts, flush=True)
            said = ", ".join(map(format_bytes, most))
            for tier in tiers_of(self.program)[1:]:
                there = (rank.bytes.max() for rank in held(self.program, self.sizes, tier))
                said += f"; on the {tier}: {', '.join(map(format_bytes, there))}"
            print(f"memory held, predicted for each rank: {said}", flush=True)
        return most

    def _lived(self, most: int) -> tuple[int, ...]:
        """The most that lived of each rank, of its replicas and slices, known to all; process 0
        says it."""
        lived = tuple(np.array(gather(most))[self.transport.mesh].max((0, 2)).tolist())
        if not dist.get_rank():
            print(f"memory held, counted for each rank: {', '.join(map(format_bytes, lived))}")
        return lived

    def _take(self, prefetch: Prefetch, step: int) -> TrainingBatch:
        """The batch of a step; where there is none, what was wrong before it comes first."""
        try:
            batch = prefetch.take(step)
            self.read = batch.read
            return batch
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
            self.saving.stop(self.steps.number)
            raise self.steps.error()

    def _report(self, step: int) -> RunResult | None:
        """Bring losses and times of the recent steps to rank 0, which says them.

        Raises ModelError, in all processes, where they have not read the same data.
        """
        recent, self.recent = self.recent, []
        grew = times_asked(self.device) > self.asked
        own = torch.tensor([*(s.loss for s in recent), grew, self.read], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        agree_on_data([int(one[-1]) for one in every], step)
        runs = self._runs() if self.executor.record else None
        if dist.get_rank():
            return None
        # In one order, whatever steps are reported together: losses have the same bits then.
        *losses, processes, _ = reduce(torch.add, every).tolist()
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
        timed = seconds[1:] if first == self.saving.made + 1 else seconds
        self.timed += timed
        last = recent[-1]
        bubble = "" if runs is None else f"  {format_bubbles(*runs)}"
        clipped = "" if last.norm is None else f"  norm {last.norm:.3f}"
        scaled = "" if self.loss_scale is None else f"  scale {float(self.loss_scale.value):g}"
        skipped = sum(s.skipped for s in recent)
        if skipped or self.config.train.on_nonfinite == "skip":
            scaled += f"  skipped {skipped}"
        print(
            f"step {step:>{len(str(self.config.train.steps))}}  loss {losses[-1]:.4f}"
            f"  {self._speed(timed or seconds):,.0f} tokens/s  lr {last.learning_rate:.2e}"
            f"{clipped}{scaled}{bubble}",
            flush=True,
        )
        speed = self._speed(self.timed or seconds)
        return RunResult(self.program, losses[-1], speed, self.memory, self.lived, runs)

    def _runs(self) -> tuple[Timeline, Timeline] | None:
        """The last step as it was, and as predicted from its mean times; on process 0 alone."""
        timeline = measured(self.executor, self.transport)
        if timeline is None:
            return None
        named = replace(self.program, name=f"{self.program.name} at measured means")
        costs, sizes = calibrate(timeline), self.sizes
        model, blocks = timeline.progress_model, timeline.blocking_hosts
        predicted = simulate(
            self.program, costs, progress_model=model, blocking_hosts=blocks, sizes=sizes
        )
        predicted = replace(predicted, program=named, unit=timeline.unit)
        return replace(timeline, sizes=sizes), predicted

    def _speed(self, seconds: list[float]) -> float:
        """Tokens per second in steps that took so long."""
        return self.batches.size * self.batches.context * len(seconds) / sum(seconds)
