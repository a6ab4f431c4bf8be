"""Evaluate the loss on held-out text between steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from schedir.compiler.evaluation_program import evaluation_program
from schedir.ir.program import Program
from schedir.models.language_model import IGNORE_INDEX
from schedir.runtime.executor import Executor
from schedir.training.batches.samples import Batches
from schedir.training.config.run_config import Config
from schedir.training.model_factory import get_trained_model
from schedir.transports.process_transport import ProcessTransport


class EvaluationResult(NamedTuple):
    """The mean loss on held-out text after a step.

    Args:
        step: The step, from 1.
        loss: The mean loss per token, in nats.
        tokens: The number of tokens in the mean.
    """

    step: int
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return the exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def csv_line(self) -> str:
        """Return a line of `evaluation.csv`."""
        return f"{self.step},{self.loss!r},{self.perplexity!r},{self.tokens}\n"

    def __str__(self) -> str:
        return f"step {self.step}  held-out loss {self.loss:.4f}  perplexity {self.perplexity:,.1f}"


def make_evaluation_programs(config: Config, program: Program) -> list[Program]:
    """Return the program that evaluates the model on the pipeline of a training program.

    Args:
        config: The configuration of the run.
        program: The program that trains.

    Returns:
        One program with forwards only, or an empty list if `train.evaluate_every` is 0.
    """
    if not config.train.evaluate_every:
        return []
    pipeline, slots = config.pipeline, config.buffer_sharing
    return [
        evaluation_program(
            program, config.train.progress_model, overlap=pipeline.overlap, buffer_sharing=slots
        )
    ]


class Evaluation:
    """Evaluates the loss on the same held-out windows after certain steps.

    Each evaluation uses the first held-out windows: `train.evaluate_batches` times the windows that
    a training step reads, or all held-out windows if there are fewer. If the last batch is too
    short, windows whose targets are ignored fill it.

    Args:
        config: The configuration of the run.
        held_out: The held-out windows.
        executor: The executor of this rank. It must have the evaluation program.
        transport: The transport of this rank.
    """

    def __init__(
        self, config: Config, held_out: Batches, executor: Executor, transport: ProcessTransport
    ) -> None:
        self.executor, self.transport, shape = executor, transport, executor.program.shape
        self.interval = config.train.evaluate_every
        self.last_step = config.train.steps
        self.microbatch_size = config.segmentation.microbatch_size
        replica_windows = shape.microbatches * self.microbatch_size
        batch_windows = replica_windows * executor.program.dp
        count = min(len(held_out), config.train.evaluate_batches * batch_windows)
        inputs, targets = held_out.read_batch(0, count)
        self.tokens = get_trained_model(config.model).module.count_tokens(targets)
        padded_count = -(-count // batch_windows) * batch_windows
        # Copies of the first window fill the last batch. The targets of these copies are ignored.
        indices = torch.zeros(padded_count, dtype=torch.int64)
        indices[:count] = torch.arange(count)
        inputs, targets = inputs[indices], targets[indices]
        targets[count:] = IGNORE_INDEX
        first_window = transport.dp_rank * replica_windows
        self.batches = [
            (inputs[window : window + replica_windows], targets[window : window + replica_windows])
            for window in range(first_window, padded_count, batch_windows)
        ]
        # All tensor-parallel ranks compute the same loss, so only the first of them adds its loss.
        self.should_count_loss = shape.stages - 1 in executor.stages and transport.tp_rank == 0

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after a step.

        Args:
            step: The step, from 1.
        """
        return step % self.interval == 0 or step == self.last_step

    def evaluate(self, step: int) -> EvaluationResult:
        """Return the loss after a step. All processes must call this, and get the same result.

        Args:
            step: The step, from 1.
        """
        total = torch.zeros((), dtype=torch.float64)
        device = self.executor.resources.device
        for inputs, targets in self.batches:
            loss = self.executor.evaluate(
                inputs.to(device).split(self.microbatch_size),
                targets.to(device).split(self.microbatch_size),
            )
            if loss is not None and self.should_count_loss:
                total += loss.double().cpu()
        dist.all_reduce(total)
        return EvaluationResult(step, float(total) / max(1, self.tokens), self.tokens)
