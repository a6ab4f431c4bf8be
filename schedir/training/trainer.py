"""The trainer of one rank: set-up, steps, reports, evaluation and checkpoints."""

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

from schedir.analysis.memory.footprint import compute_footprints, find_used_tiers
from schedir.analysis.memory.unshard_counts import describe_sharding
from schedir.errors import ExecutionError, describe_exception, format_bytes
from schedir.io.black_box import ProcessPhase
from schedir.ir.cost.sizes import STATIC_SIZES, Sizes
from schedir.ir.program import Program
from schedir.predict.calibrate import format_bubbles, simulate_at_mean_times
from schedir.predict.recompute_summary import describe_recompute
from schedir.predict.timeline import Timeline
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.parameters.mixed_precision import LossScale, MainOptimizer
from schedir.runtime.recording.allocator_growth import count_allocations, describe_growth
from schedir.runtime.recording.live_memory import LiveMemory
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.training.batches.prefetch import Prefetch, TrainingBatch
from schedir.training.batches.text_batches import Corpus
from schedir.training.checkpointing import TrainingCheckpoints
from schedir.training.config.run_config import Config
from schedir.training.evaluation import Evaluation, EvaluationResult, make_evaluation_programs
from schedir.training.learning_rate import compute_learning_rate, describe_short_warmup
from schedir.training.optimizer import build_optimizer
from schedir.training.processes.graceful_stop import TerminationNotice
from schedir.training.processes.startup_consistency import collect_config_facts, require_same_data
from schedir.training.processes.watchdog import Watchdog
from schedir.training.run_results import LossLog, RunResult
from schedir.training.stage_factory import ProgramStages, StageBoundaries
from schedir.training.step_queue import IssuedStep, StepQueue
from schedir.transports.json_collectives import gather
from schedir.transports.registry import choose_transport
from schedir.transports.transport import describe_peer_exit, is_caused_by_peer


def train(
    config: Config,
    program: Program,
    corpus: Corpus,
    losses: LossLog | None,
    watchdog: Watchdog,
) -> RunResult | None:
    """Train as one rank of a program.

    Call this within `join_process_group`. Rank 0 prints the progress and writes a line per step to
    `losses`. The columns are the step (from 1), the mean loss of its tokens, the learning rate, the
    gradient norm before clipping (empty without clipping), and the number of skipped updates.

    Args:
        config: The configuration of the run.
        program: The program that all processes train.
        corpus: The data.
        losses: The loss log on global rank 0. None on all other ranks.
        watchdog: The watchdog of this process. The trainer writes its phases to the black box of
            the watchdog.

    Returns:
        The results on global rank 0. None on all other ranks. Also None if the run was complete
        before, and its summary exists.

    Raises:
        UsageError: The data cannot be used.
        ModelError: The processes do not have the same program, settings or data.
        MemoryLimitError: No program fits into `memory.memory_limit`.
        CheckpointError: A checkpoint cannot be read or written.
        NonFiniteError: A loss or a gradient is not finite. All processes raise this error.
        ExecutionError: The run fails for any other reason.
        TerminationNotice: The run ends after SIGTERM, and the last step is saved.
    """
    torch.set_num_threads(config.train.threads)
    try:
        return _Trainer(config, program, corpus, losses).run(watchdog)
    except RuntimeError as error:  # Errors within a step are already ExecutionErrors.
        if is_caused_by_peer(error) and not describe_peer_exit(error):
            reason = f"another process has not answered for {config.train.timeout:g} s"
        elif isinstance(error, torch.OutOfMemoryError | dist.DistError):
            reason = describe_peer_exit(error) or describe_exception(error)
        else:
            raise
        raise ExecutionError(
            f"{reason.rstrip('.')}; this happened outside of a step", program=program.name
        ) from error


def _choose_device(name: str) -> torch.device:
    """Return the device of this process: the current GPU for "cuda"."""
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


class _Trainer:
    def __init__(
        self, config: Config, program: Program, corpus: Corpus, losses: LossLog | None
    ) -> None:
        self.config = config
        self.program = program
        self.losses = losses
        self.batches = corpus.batches
        self.device = _choose_device(config.train.device)
        program_stages = ProgramStages(config, program)
        self.module = program_stages.model.module
        self.microbatch_size = program_stages.microbatch_size
        boundary = program_stages.boundary
        make_extra_programs = partial(make_evaluation_programs, config)
        connect = partial(
            choose_transport(
                config.train.transport, config.train.device, program, *make_extra_programs(program)
            ),
            timeout=config.train.timeout,
            device=self.device,
            max_message_bytes=program_stages.message_bytes,
        )
        self.transport = connect(program, extra_programs=make_extra_programs(program))
        self.transport.check_agreement(collect_config_facts(config))
        tp = self.transport.tp_group
        stages = program_stages.build_stages(
            self.transport.rank, tp, self.device, self.transport.dp_rank
        )
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        self.optimizer = build_optimizer(parameters, config.train)
        self.loss_scale = (
            LossScale(device=self.device) if program_stages.dtype == torch.float16 else None
        )
        loss = partial(self.module.loss, tp=tp)
        self.sizes = self._measure_sizes(stages, loss, boundary)
        fitting = self._fit_program()
        if fitting != program:
            self.transport.disconnect()
            program = self.program = fitting
            self.transport = connect(program, extra_programs=make_extra_programs(program))
        self.executor = self._create_executor(stages, loss, boundary)
        self.evaluation: Evaluation | None = None
        if config.train.evaluate_every and corpus.held_out_batches is not None:
            self.evaluation = Evaluation(
                config, corpus.held_out_batches, self.executor, self.transport
            )
        self.step_queue = StepQueue(
            self.executor,
            self.transport,
            microbatch_size=self.microbatch_size,
            stops_on_nonfinite=config.train.on_nonfinite == "stop",
            loss_scale=self.loss_scale,
        )
        self.checkpoints = TrainingCheckpoints(self.executor, config.train, self.batches, losses)
        self.unreported_steps: list[IssuedStep] = []
        # The seconds of each step except the first, which also connects and warms up.
        self.step_seconds: list[float] = []
        self.data_crc = 0  # The CRC-32 of all samples that were read.
        self.has_warned = False  # True after a warning about allocations after the first step.
        self.counted_memory: tuple[int, ...] = ()

    def _create_executor(
        self,
        local_stages: dict[int, nn.Module],
        loss: Callable[..., Tensor],
        boundary: StageBoundaries,
    ) -> Executor:
        config = self.config
        return Executor(
            self.program,
            self.transport.rank,
            local_stages,
            self.transport,
            loss=loss,
            boundary=boundary,
            optimizer=self.optimizer,
            gradients=GradientOptions(
                max_norm=config.train.clip_grad_norm if self.program.clip_grad_norm else None,
                loss_scale=self.loss_scale,
            ),
            seed=config.data.seed,
            extra_programs=make_evaluation_programs(config, self.program),
            execution=ExecutionOptions(
                record_timestamps=config.output.record, spill_dir=config.memory.spill_dir
            ),
        )

    def run(self, watchdog: Watchdog) -> RunResult | None:
        """Run the remaining steps, with reports, evaluation and checkpoints."""
        train, record, result = self.config.train, self.config.output.record, None
        enter = watchdog.member.black_box.enter_phase
        self.predicted_memory = self._predict_memory()
        start_step = self.checkpoints.resume()
        if start_step >= train.steps:
            return self._finish_completed_run(start_step)
        self.step_queue.last_issued_step = start_step
        if self.losses is not None:  # `begin` may remove old results, so a step must follow.
            self.losses.begin(start_step)
        stop = watchdog.graceful_stop
        with (
            self._open_prefetch() as prefetch,
            closing(self.checkpoints),
            watchdog.watch(self.executor),
        ):
            for step in range(start_step, train.steps):
                if stop is not None and not stop.try_begin_step(step + 1):
                    self._end_on_termination(step, enter)
                if self.checkpoints.should_copy(step):
                    enter(ProcessPhase.SAVE, step)
                    self.checkpoints.schedule_copy(step)
                enter(ProcessPhase.DATA_WAIT, step + 1)
                saves = self.checkpoints.should_save_now(step + 1)
                logs = (step + 1) % train.log_every == 0 or step + 1 == train.steps
                self.executor.record_timestamps = record and logs
                self._issue_step(prefetch, step, enter)
                enter(ProcessPhase.REPORT, step + 1)
                if step == start_step:
                    self.allocation_count = count_allocations(self.device)
                # The losses of a step may be read after the next step is issued. There are two
                # exceptions. The first step connects and warms up, and its time must not be a part
                # of the time of the second step. If a step is reported or saved, its losses are
                # needed now.
                may_read_late = (
                    self.step_queue.can_read_late and step > start_step and not (logs or saves)
                )
                self._read_steps(int(may_read_late))
                if self.unreported_steps and (logs or saves or self.checkpoints.pending_step):
                    result = self._report(
                        self.step_queue.last_issued_step - len(self.step_queue.pending_steps)
                    )
                self.checkpoints.write()
                if self.evaluation is not None and self.evaluation.is_due(step + 1):
                    self._read_steps(0)
                    enter(ProcessPhase.EVALUATE, step + 1)
                    self._report_evaluation(self.evaluation.evaluate(step + 1))
                if saves:
                    enter(ProcessPhase.SAVE, step + 1)
                    self.checkpoints.save(step + 1)
        return result

    def _open_prefetch(self) -> Prefetch:
        """Return the reader of the batches of this process, from the first remaining step on."""
        return Prefetch(
            self.batches,
            self.config.train.steps,
            self.device,
            replica=self.transport.dp_rank,
            replicas=self.program.dp,
            count_tokens=self.module.count_tokens,
            first_step=self.checkpoints.start_step,
            first_sample=self.checkpoints.start_samples,
        )

    def _issue_step(
        self, prefetch: Prefetch, step: int, enter: Callable[[ProcessPhase, int], None]
    ) -> None:
        """Take the batch of a step, and issue the step with its learning rate.

        With `output.memory`, also count the memory during the second step, or the only step.
        """
        train, start_time = self.config.train, perf_counter()
        rate = compute_learning_rate(train, step)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("balance_rate", rate)
        batch = self._take_batch(prefetch, step)
        enter(ProcessPhase.STEP, step + 1)
        counted_step = min(self.checkpoints.start_step + 1, train.steps - 1)
        if self.config.output.memory and step == counted_step:
            with LiveMemory(self.executor) as live_memory:
                self.step_queue.issue(batch, rate, start_time)
            self.counted_memory = self._gather_counted_memory(live_memory.peak_bytes)
        else:
            self.step_queue.issue(batch, rate, start_time)

    def _end_on_termination(
        self, step: int, enter: Callable[[ProcessPhase, int], None]
    ) -> NoReturn:
        """Save the state after the last step, unless it is saved, and raise TerminationNotice."""
        enter(ProcessPhase.REPORT, step)
        self._read_steps(0)
        self.executor.record_timestamps = False
        if self.unreported_steps:
            self._report(step)
        enter(ProcessPhase.SAVE, step)
        self.checkpoints.wait()
        if step > self.checkpoints.saved_step:
            self.checkpoints.save(step)
        raise TerminationNotice(self.checkpoints.description)

    def _finish_completed_run(self, start_step: int) -> RunResult | None:
        """Return the results of a run without remaining steps.

        Return None on processes other than 0, or if the summary of the run exists.
        """
        if self.losses is None:
            return None
        steps = self.config.train.steps
        text = f"all {steps} steps of the run are complete"
        if start_step > steps:
            text = (
                f"{start_step} steps of the run are complete, and train.steps is {steps}: there is "
                "nothing to do"
            )
        print(text, flush=True)
        if self.losses.is_finished:
            return None
        last_loss = self.losses.read_last_loss()
        return RunResult(self.program, last_loss, math.nan, self.predicted_memory, (), None)

    def _report_evaluation(self, result: EvaluationResult) -> None:
        """Print the result of an evaluation on process 0, and write it to `evaluation.csv`."""
        if not dist.get_rank():
            print(result, flush=True)
        if self.losses is not None:
            self.losses.write_evaluation(result.csv_line)

    def _measure_sizes(
        self,
        local_stages: Mapping[int, nn.Module],
        loss: Callable[..., Tensor],
        boundary: StageBoundaries,
    ) -> Sizes:
        """Run one microbatch through the local stages, and return the sizes of all stages."""
        stages = range(self.program.shape.stages)
        inputs, targets = (
            tensor.to(self.device) for tensor in self.batches.read_batch(0, self.microbatch_size)
        )
        sizes = measure_sizes(
            [local_stages.get(s) for s in stages],
            inputs,
            targets,
            loss=loss,
            boundary=boundary,
            # Bytes per parameter: AdamW's two moments, and the main parameters of 16-bit weights.
            optimizer_state=12.0 if isinstance(self.optimizer, MainOptimizer) else 8.0,
            frozen_stages=self.program.frozen_stages,
            dp=self.program.dp,
            zero=self.program.zero,
        )
        measured = (
            "saved",
            "deferred_wgrad",
            "saved_and_deferred",
            "recompute_inputs",
            *STATIC_SIZES,
            "version",
        )
        max_sizes = torch.tensor(
            [sizes.for_stages(name, len(stages)).tolist() for name in measured],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(max_sizes, dist.ReduceOp.MAX)
        return replace(sizes, **dict(zip(measured, map(tuple, max_sizes.tolist()), strict=True)))

    def _fit_program(self) -> Program:
        """Return the program. If there is a memory limit, compile it again so that it fits.

        Process 0 prints which forwards are recomputed. Raises MemoryLimitError if no program fits.
        """
        if self.config.memory.limit_bytes is None:
            return self.program
        program = self.config.request_with_sizes(self.sizes).program
        if self.config.memory.is_fitted and not dist.get_rank():
            recomputed = describe_recompute(program) or "nothing"
            print(
                f"recomputed, to use at most {self.config.memory.memory_limit}: {recomputed}",
                flush=True,
            )
        return program

    def _predict_memory(self) -> tuple[float, ...]:
        """Return the predicted peak of each rank, in bytes.

        Process 0 prints these peaks, the peaks on other tiers, which values the replicas shard, and
        notes on settings that are probably mistakes.
        """
        peaks = tuple(
            float(rank.total_bytes.max()) for rank in compute_footprints(self.program, self.sizes)
        )
        if not dist.get_rank():
            notes = (
                describe_short_warmup(self.config.train),
                self.batches.describe_repeats(),
                describe_sharding(self.program),
            )
            for note in filter(None, notes):
                print(note, flush=True)
            peaks_text = ", ".join(map(format_bytes, peaks))
            for tier in find_used_tiers(self.program)[1:]:
                tier_peaks = (
                    rank.total_bytes.max()
                    for rank in compute_footprints(self.program, self.sizes, tier)
                )
                peaks_text += f"; on the {tier}: {', '.join(map(format_bytes, tier_peaks))}"
            print(f"predicted memory of each rank: {peaks_text}", flush=True)
        return peaks

    def _gather_counted_memory(self, max_bytes: int) -> tuple[int, ...]:
        """Return the peak bytes that `LiveMemory` counted on each rank. Process 0 prints them."""
        peaks = tuple(np.array(gather(max_bytes))[self.transport.mesh].max((0, 2)).tolist())
        if not dist.get_rank():
            print(f"counted memory of each rank: {', '.join(map(format_bytes, peaks))}")
        return peaks

    def _take_batch(self, prefetch: Prefetch, step: int) -> TrainingBatch:
        """Return the batch of a step. If reading fails, first report failures of earlier steps."""
        try:
            batch = prefetch.take(step)
            self.data_crc = batch.data_crc
            return batch
        except Exception:
            self._read_steps(0)
            raise

    def _read_steps(self, remaining: int) -> None:
        """Read the losses of all pending steps except the last `remaining` ones.

        If a step has a loss or gradient that ends the run, this method reports the earlier steps
        and raises NonFiniteError.
        """
        while len(self.step_queue.pending_steps) > remaining:
            step = self.step_queue.read_oldest_step()
            if step is not None:
                self.unreported_steps.append(step)
                continue
            if self.unreported_steps:
                self.executor.record_timestamps = False
                self._report(self.step_queue.last_issued_step - 1)
            self.checkpoints.handle_failed_step(self.step_queue.last_issued_step)
            raise self.step_queue.diagnose_failure()

    def _report(self, step: int) -> RunResult | None:
        """Gather the losses of the unreported steps on rank 0, which reports these steps.

        Raises ModelError, in all processes, if the processes have not read the same data.
        """
        recent, self.unreported_steps = self.unreported_steps, []
        grew = count_allocations(self.device) > self.allocation_count
        local_numbers = torch.tensor(
            [*(s.loss for s in recent), grew, self.data_crc], dtype=torch.float64
        )
        all_numbers = [torch.empty_like(local_numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(all_numbers, local_numbers)
        require_same_data([int(numbers[-1]) for numbers in all_numbers], step)
        runs = self._make_timelines() if self.executor.record_timestamps else None
        if dist.get_rank():
            return None
        # The order of the additions does not depend on the number of reported steps. So the losses
        # have the same bits with any `log_every`.
        *losses, processes, _ = reduce(torch.add, all_numbers).tolist()
        if processes and not self.has_warned:
            self.has_warned = True
            print(describe_growth(int(processes), dist.get_world_size()), flush=True)
        first_step = step - len(recent) + 1
        for number, (s, loss) in enumerate(zip(recent, losses, strict=True), first_step):
            if self.losses is not None:
                norm = "" if s.gradient_norm is None else repr(s.gradient_norm)
                self.losses.write(
                    f"{number},{loss!r},{s.learning_rate!r},{norm},{s.skipped_updates}\n"
                )

        seconds = [s.seconds for s in recent]
        # The first step connects and warms up, so its time is left out.
        timed = seconds[1:] if first_step == self.checkpoints.start_step + 1 else seconds
        self.step_seconds += timed
        last_step = recent[-1]
        bubble = "" if runs is None else f"  {format_bubbles(*runs)}"
        clipped = "" if last_step.gradient_norm is None else f"  norm {last_step.gradient_norm:.3f}"
        scaled = "" if self.loss_scale is None else f"  scale {float(self.loss_scale.value):g}"
        skipped = sum(s.skipped_updates for s in recent)
        if skipped or self.config.train.on_nonfinite == "skip":
            scaled += f"  skipped {skipped}"
        print(
            f"step {step:>{len(str(self.config.train.steps))}}  loss {losses[-1]:.4f}"
            f"  {self._compute_speed(timed or seconds):,.0f} tokens/s"
            f"  lr {last_step.learning_rate:.2e}{clipped}{scaled}{bubble}",
            flush=True,
        )
        speed = self._compute_speed(self.step_seconds or seconds)
        return RunResult(
            self.program, losses[-1], speed, self.predicted_memory, self.counted_memory, runs
        )

    def _make_timelines(self) -> tuple[Timeline, Timeline] | None:
        """Return the timeline of the last step, and a timeline that is predicted from mean times.

        All processes must call this. It returns None except on process 0.
        """
        timeline = gather_timeline(self.executor, self.transport)
        if timeline is None:
            return None
        timeline = replace(timeline, sizes=self.sizes)
        named = replace(timeline.program, name=f"{timeline.program.name} at measured means")
        return timeline, replace(simulate_at_mean_times(timeline), program=named)

    def _compute_speed(self, seconds: list[float]) -> float:
        """Return the tokens per second of steps with these times."""
        return self.batches.batch_size * self.batches.context * len(seconds) / sum(seconds)
