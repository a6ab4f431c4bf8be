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
from schedir.transports.gloo import ProcessTransport


class EvaluationResult(NamedTuple):
    """The mean loss of so many held-out tokens after a step, in nats."""

    step: int
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def csv_line(self) -> str:
        """A line of evaluation.csv."""
        return f"{self.step},{self.loss!r},{self.perplexity!r},{self.tokens}\n"

    def __str__(self) -> str:
        return f"step {self.step}  held-out loss {self.loss:.4f}  perplexity {self.perplexity:,.1f}"


def make_evaluation_programs(config: Config, program: Program) -> list[Program]:
    """What evaluates on the stages of a program, if the configuration asks for it: its forwards."""
    if not config.train.evaluate_every:
        return []
    pipeline, slots = config.pipeline, config.buffer_sharing
    return [
        evaluation_program(
            program, config.train.progress_model, overlap=pipeline.overlap, buffer_sharing=slots
        )
    ]


class Evaluation:
    """The same held-out windows after every so many steps.

    These are the first `evaluate_batches` times as many as a step takes, or all that there are; of
    the last batch what is missing counts nowhere.
    """

    def __init__(
        self, config: Config, held_out: Batches, executor: Executor, transport: ProcessTransport
    ) -> None:
        self.executor, self.transport, shape = executor, transport, executor.program.shape
        self.interval, self.last_step = config.train.evaluate_every, config.train.steps
        self.microbatch_size = config.segmentation.microbatch_size
        own = shape.microbatches * self.microbatch_size  # windows of a replica in a batch
        each = own * executor.program.dp
        count = min(len(held_out), config.train.evaluate_batches * each)
        inputs, targets = held_out.read_batch(0, count)
        self.tokens = get_trained_model(config.model).module.count_tokens(targets)
        room = -(-count // each) * each
        # What is missing is the first sample again, and counts nowhere.
        again = torch.zeros(room, dtype=torch.int64)
        again[:count] = torch.arange(count)
        inputs, targets = inputs[again], targets[again]
        targets[count:] = IGNORE_INDEX
        first = transport.dp_rank * own
        self.batches = [
            (inputs[at : at + own], targets[at : at + own]) for at in range(first, room, each)
        ]
        # Tensor-parallel ranks all know the loss: the first counts.
        self.should_count_loss = shape.stages - 1 in executor.stages and transport.tp_rank == 0

    def is_due(self, step: int) -> bool:
        """Whether the loss is taken after a step."""
        return step % self.interval == 0 or step == self.last_step

    def evaluate(self, step: int) -> EvaluationResult:
        """The loss after a step, known to all; all processes must call this."""
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
