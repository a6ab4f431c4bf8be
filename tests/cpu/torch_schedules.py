"""The schedules of torch.distributed.pipelining, built without a process group."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import create_autospec

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from schedir.ir.pipeline.pipeline_shape import PipelineShape
from tests.cpu.torch_pipelines import LOOP, SINGLE, VEE

__all__ = ["LOOP", "SINGLE", "VEE", "build_torch_schedule", "lower_torch_schedule"]


def build_torch_schedule(name: str, shape: PipelineShape, **options: Any) -> Any:
    """Return torch's schedule of rank 0, with stages that have only the needed attributes."""
    stages = []
    for index in shape.stages_on_rank[0]:
        stage = create_autospec(PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.group = 0, shape.ranks, None
        stage.stage_index, stage.num_stages, stage.submod = index, shape.stages, None
        stage.is_first, stage.is_last = index == 0, index == shape.stages - 1
        stages.append(stage)
    kind = getattr(schedules, name)
    given = stages[0] if name in SINGLE else stages
    return kind(given, n_microbatches=shape.microbatches, loss_fn=lambda *_: None, **options)


def lower_torch_schedule(name: str, shape: PipelineShape, **options: Any) -> str:
    """Return the text of torch's CSV of a schedule with transfers."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.csv"
        build_torch_schedule(name, shape, **options)._dump_csv(str(path), format="compute_comms")
        return path.read_text()
