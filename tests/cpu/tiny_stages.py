"""Tiny stages, batches and references that tests of the executor share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import gpt, moe_gpt
from schedir.passes.pass_types import BufferSharing
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.schedules.schedule_algebra import B, F, I, RankSchedule, W, overlapped_pair
from schedir.transports.process_transport import ProcessTransport

CONTEXT, HIDDEN, BATCH = 8, 16, 2
BOUNDARY = Boundary((BATCH, CONTEXT, HIDDEN))


def split_1f1b(r: int, P: int, m: int) -> RankSchedule:
    """Return 1F1B with every backward split."""
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + I) + lead * I + m * W


def paired_1f1b(r: int, P: int, m: int) -> RankSchedule:
    """Return 1F1B whose steady state consists of joined pairs of backward and forward."""
    lead = min(P - r, m)
    return lead * F + overlapped_pair((m - lead) * B, (m - lead) * F) + lead * B


def gpt_config(layers: int, tied: bool = True) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        vocab=32, layers=layers, hidden=HIDDEN, heads=2, context=CONTEXT, tied=tied
    )


def make_batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor, float]:
    """Return inputs, targets (some of them not counted), and the scale from sum to mean."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (microbatches, BATCH, CONTEXT)
    inputs, targets = (torch.randint(0, 32, shape, generator=numbers) for _ in range(2))
    targets[:, 0, :2] = gpt.IGNORE_INDEX
    return inputs, targets, 1 / gpt.count_tokens(targets)


def gpt_stages(stages: int, tied: bool = True) -> list[nn.Module]:
    return [gpt.build_stage(gpt_config(stages, tied), s, stages) for s in range(stages)]


def copy_gradients(stages: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    return [
        {n: p.grad.clone() for n, p in s.named_parameters() if p.grad is not None} for s in stages
    ]


def have_same_bits(one: Any, other: Any) -> bool:
    """Return whether the tensors in two lists or dictionaries are equal, and so is all else."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(have_same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(have_same_bits, one, other))
    return one is other or bool(one == other)


def gpt_executor(
    program: Program,
    transport: ProcessTransport,
    device: str | torch.device = "cpu",
    *,
    lr: float | None = None,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Executor:
    """Return the executor of a process, with its part of the GPT.

    With `lr` it uses AdamW. `options` are those of Executor.
    """
    shape, tp = program.shape, transport.tp_group
    cfg = gpt_config(shape.stages, bool(program.tied_weights))
    own = shape.stages_on_rank[transport.rank]
    stages = {s: gpt.build_stage(cfg, s, shape.stages, tp=tp).to(device) for s in own}
    if lr is not None:
        make_optimizer = partial(torch.optim.AdamW, lr=lr)
    if make_optimizer is not None:
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        options["optimizer"] = make_optimizer(parameters)
    loss = partial(gpt.loss, tp=tp)
    return Executor(
        program, transport.rank, stages, transport, loss=loss, boundary=BOUNDARY, **options
    )


def moe_executor(
    program: Program,
    transport: ProcessTransport,
    cfg: moe_gpt.MoEConfig,
    samples: int = BATCH,
    *,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[moe_gpt.MoEStage], object] = lambda stage: None,
    lr: float | None = None,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    experts: tuple[int, int] | None = None,
    **options: Any,
) -> Executor:
    """Return the executor of a process, with its part of the experts and stages in segments.

    `prepare` changes each stage. `experts` is its expert-parallel rank and their number, by default
    those of the program. `options` are those of Executor.
    """
    segments = program.segment_boundaries.split("-")
    first = [0, *accumulate(len(letters) + 1 for letters in segments)]
    ep, own = program.ep, {*program.shape.stages_on_rank[transport.rank]}
    ep_rank, size = experts or (transport.dp_rank % ep, ep)
    how: Any = {"ep": size, "ep_rank": ep_rank, "dtype": dtype}
    modules: dict[int, nn.Module] = {}
    for s in range(len(segments)):
        if first[s] in own:
            stage = moe_gpt.build_stage(cfg, s, len(segments), **how)
            prepare(stage)
            modules.update(enumerate(moe_gpt.split_stage(stage), first[s]))
    if lr is not None:
        make_optimizer = partial(torch.optim.AdamW, lr=lr)
    if make_optimizer is not None:
        parameters = [p for module in modules.values() for p in module.parameters()]
        options["optimizer"] = make_optimizer(parameters)
    stream = Boundary((samples, cfg.context, cfg.hidden), dtype)
    numbers = [len(letters) + 1 for letters in segments]
    boundary = moe_gpt.build_boundaries(cfg, numbers, stream, ep)
    options = {**{"loss": moe_gpt.loss, "boundary": boundary}, **options}
    return Executor(program, transport.rank, modules, transport, **options)


class Case(NamedTuple):
    """A program for several processes, and the options of its run."""

    schedule: Any
    shape: PipelineShape
    tp: int = 1
    dp: int = 1
    ep: int = 1
    buffer_sharing: BufferSharing | None = None
    clip: bool = True
    overlap: bool = True
    tied: bool = True
    record: bool = False

    @property
    def processes(self) -> int:
        return self.shape.ranks * self.tp * self.dp

    def compile(self) -> Program:
        return compile(
            self.schedule, self.shape, tp=self.tp, dp=self.dp, ep=self.ep,
            progress_model="per_edge", overlap=self.overlap, clip_grad_norm=self.clip,
            tied_weights=self.tied and self.ep == 1, buffer_sharing=self.buffer_sharing,
            stage_segments="dc" if self.ep > 1 else None,
        )  # fmt: skip

    def get_options(self, max_norm: float = 1.0) -> dict[str, Any]:
        """Return the options of its executor."""
        return {
            "gradients": GradientOptions(max_norm=max_norm if self.clip else None),
            "execution": ExecutionOptions(record_timestamps=self.record),
        }


def make_replica_batch(
    program: Program, transport: ProcessTransport, seed: int = 0
) -> tuple[Tensor, Tensor, float]:
    """Return a process's part of the `batch` of all replicas."""
    m = program.shape.microbatches
    inputs, targets, scale = make_batch(m * program.dp, seed)
    own = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
    return inputs[own], targets[own], scale


def list_parameters(executor: Executor) -> list[nn.Parameter]:
    """Return the parameters of a process's stages."""
    return [p for stage in executor.stages.values() for p in stage.module.parameters()]


def copy_parameters(*executors: Executor) -> list[Tensor]:
    return [p.detach().clone() for executor in executors for p in list_parameters(executor)]


def gradients_by_stage(executor: Executor) -> dict[int, dict[str, Tensor]]:
    """Return the gradients of a process's stages."""
    return {s: copy_gradients([stage.module])[0] for s, stage in executor.stages.items()}


def run_reference(
    shape: PipelineShape, tied: bool = True, program: Program | None = None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return loss and gradients of the reference, in the order of the program if there is one."""
    stages = gpt_stages(shape.stages, tied)
    inputs, targets, scale = make_batch(shape.microbatches)
    loss = run_sequential(stages, inputs, targets, loss=gpt.loss, grad_scale=scale, program=program)
    return loss, copy_gradients(stages)


PLANS = [
    (gpipe, PipelineShape(2, 4)),
    (gpipe, PipelineShape(4, 4)),
    (one_f_one_b, PipelineShape(2, 4)),
    (one_f_one_b, PipelineShape(4, 6)),
    (split_1f1b, PipelineShape(2, 4)),
    (split_1f1b, PipelineShape(4, 4)),
    (interleaved, PipelineShape(2, 4, 2)),  # both neighbours are the same peer
    (interleaved, PipelineShape(2, 5, 3)),
    (interleaved, PipelineShape(4, 4, 2)),
    (interleaved, PipelineShape(1, 3, 2)),  # first and last stage share a rank
    (one_f_one_b, PipelineShape(1, 3)),
    (paired_1f1b, PipelineShape(2, 4)),
    (paired_1f1b, PipelineShape(4, 6)),
]
