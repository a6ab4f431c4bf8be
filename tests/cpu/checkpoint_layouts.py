"""Layouts of processes that train a GPT, save it, and load it in another layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import schedir
from schedir import PipelineShape
from schedir.checkpoints import load, save
from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.checkpoints.dcp_storage import read
from schedir.checkpoints.load_plan import plan_reads
from schedir.checkpoints.local_state import TensorPiece
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.transports.gloo import GlooTransport

BATCH, CONTEXT, HIDDEN, VOCAB, LAYERS, SAMPLES = 2, 8, 16, 31, 4, 4
SAVED_STEP, LAST_STEP = 2, 4  # the steps of the checkpoints of a run


class Layout(NamedTuple):
    """A layout: schedule, shape, replicas, tensor-parallel ranks and ZeRO level.

    Each replica has the number of microbatches of the shape.
    """

    schedule: Any
    shape: PipelineShape
    dp: int = 1
    tp: int = 1
    zero: int = 0
    options: Any = ()

    @property
    def processes(self) -> int:
        """The number of processes of the layout."""
        return self.shape.ranks * self.dp * self.tp


class Model(NamedTuple):
    """The options of the training that do not depend on the layout."""

    tied: bool = True
    half: bool = False
    dropout: float = 0.0
    clip: bool = False
    optimizer: Any = partial(torch.optim.AdamW, lr=1e-2)

    def stage(
        self, s: int, shape: PipelineShape, tp: Any, *, sequence: bool = False
    ) -> torch.nn.Module:
        """Build a stage of a shape."""
        cfg = gpt.GPTConfig(
            vocab=VOCAB, layers=LAYERS, hidden=HIDDEN, heads=2, context=CONTEXT, tied=self.tied,
            dropout=self.dropout,
        )  # fmt: skip
        stage = gpt.build_stage(cfg, s, shape.stages, tp=tp, sequence_parallel=sequence)
        if self.half:
            use_float32_gradients(stage.bfloat16())
        return stage

    def boundary(self, cut: int = 1) -> Boundary:
        """Return the boundary of stages, with one of `cut` parts of the tokens."""
        dtype = torch.bfloat16 if self.half else torch.float32
        return Boundary((BATCH, CONTEXT // cut, HIDDEN), dtype)

    def make(self, parameters: Any) -> Any:
        """Return the optimizer of some parameters."""
        if self.half:
            return MainOptimizer(parameters, self.optimizer)
        return self.optimizer(parameters)


def compile_layout(layout: Layout, model: Model) -> Any:
    how: dict[str, Any] = {
        "clip_grad_norm": model.clip,
        "tied_weights": model.tied and layout.shape.stages > 1,
    }
    how |= {"dp": layout.dp, "tp": layout.tp, "zero": layout.zero, **dict(layout.options)}
    return schedir.compile(layout.schedule, layout.shape, **how)


def create_executor(layout: Layout, model: Model) -> Executor:
    """Return the executor of this process."""
    program = compile_layout(layout, model)
    transport = GlooTransport(program)
    tp = transport.tp_group
    stages = {
        s: model.stage(s, layout.shape, tp, sequence=program.sequence_parallel)
        for s in layout.shape.stages_on_rank[transport.rank]
    }
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    return Executor(
        program, transport.rank, stages, transport,
        loss=partial(gpt.loss, tp=tp),
        boundary=model.boundary(layout.tp if program.sequence_parallel else 1),
        optimizer=model.make(parameters),
        gradients=GradientOptions(max_norm=0.05 if model.clip else None),
    )  # fmt: skip


def create_in_process_executor(layout: Layout, model: Model, **how: Any) -> InProcessExecutor:
    """Return the executor of all ranks of a layout without replicas and tensor parallelism."""
    program = compile_layout(layout, model)
    stages = [model.stage(s, layout.shape, None) for s in range(layout.shape.stages)]
    return InProcessExecutor(
        program, stages,
        loss=gpt.loss,
        boundary=model.boundary(),
        optimizer=model.make,
        gradients=GradientOptions(max_norm=0.05 if model.clip else None),
        **how,
    )  # fmt: skip


def run_steps(executor: Executor | InProcessExecutor, first: int, end: int) -> list[float]:
    """Run steps from `first` to `end`, and return their losses where they are known."""
    found = []
    of = executor if isinstance(executor, Executor) else executor.executors[0]
    m, transport = of.program.shape.microbatches, of.state.transport
    for step in range(first, end):
        numbers = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, VOCAB, (2, m * of.program.dp, BATCH, CONTEXT), generator=numbers)
        own = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
        total = executor.step(x[own], y[own], 1 / y.numel())
        found += [] if total is None else [float(total)]
    return found


def keep_name(_: int, name: str) -> str:
    """Return the name unchanged, since the trainer's GPT has names of the whole model."""
    return name


def read_checkpoint_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint."""
    place = CheckpointDirectory(folder)
    manifest = place.load_manifest(step)
    found = {
        name: torch.full(kind.shape, 7, dtype=getattr(torch, kind.dtype))
        for name, kind in manifest.tensors.items()
    }
    wanted = [(n, [TensorPiece((0,) * t.dim(), tuple(t.shape), t)]) for n, t in found.items()]
    read(place.locate_step(step), plan_reads(manifest, wanted))
    return found


def train_and_save(layout: Layout, model: Model, folder: Path) -> None:
    """Run all steps, and save after `SAVED_STEP` and at the end."""
    executor = create_executor(layout, model)
    run_steps(executor, 0, SAVED_STEP)
    save(executor, folder, step=SAVED_STEP, name_map=keep_name)
    run_steps(executor, SAVED_STEP, LAST_STEP)
    save(executor, folder, step=LAST_STEP, name_map=keep_name)


def load_and_resume(executor: Executor | InProcessExecutor, folder: Path, name: str) -> None:
    """Load a checkpoint, and save again before and after the other steps."""
    state = load(executor, folder, step=SAVED_STEP, name_map=keep_name)
    assert state == {"step": SAVED_STEP, "extra": {}}
    save(executor, folder / name, step=SAVED_STEP, name_map=keep_name)
    run_steps(executor, SAVED_STEP, LAST_STEP)
    save(executor, folder / name, step=LAST_STEP, name_map=keep_name)


def run_all_layouts(
    rank: int,
    base: Layout,
    layouts: dict[str, dict[str, Layout]],
    models: dict[str, Model],
    folder: Path,
) -> None:
    """Run the base layout in a process, and its last steps in each of a model's layouts."""
    for name, model in models.items():
        train_and_save(base, model, folder / name)
        for other, layout in layouts[name].items():
            load_and_resume(create_executor(layout, model), folder / name, other)
