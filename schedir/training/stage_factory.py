"""Build the modules of a rank's stages, or of their segments."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import Boundary, BoundaryTensors
from schedir.runtime.parameters.mixed_precision import use_float32_gradients
from schedir.training.config.run_config import Config
from schedir.training.model_factory import get_trained_model

StageBoundaries = Boundary | dict[int, tuple[Boundary, ...]]


class ProgramStages:
    """The stages of a program, of a configuration's model: what passes between them, of
    microbatches of `microbatch_size` samples, and the most bytes of a message."""

    def __init__(self, config: Config, program: Program) -> None:
        self.config, self.program, self.segmentation = config, program, config.segmentation
        self.model, self.microbatch_size = (
            get_trained_model(config.model),
            self.segmentation.microbatch_size,
        )
        self.dtype: torch.dtype = getattr(torch, config.train.precision)
        shared = program.tp if program.sequence_parallel else 1
        shape = (self.microbatch_size, config.model.context // shared, config.model.hidden)
        self.boundary: StageBoundaries = Boundary(shape, self.dtype)
        # Each tensor-parallel rank sends its slice.
        self.message_bytes = (
            BoundaryTensors.from_boundary(self.boundary).nbytes * shared // program.tp
        )
        if self.is_segmented:
            assert self.model.make_boundaries is not None
            frozen = self.segmentation.first_segments.index(program.frozen_stages)
            self.boundary = self.model.make_boundaries(
                self.segmentation.segments_per_stage, self.boundary, frozen, shared
            )

    @property
    def is_segmented(self) -> bool:
        return max(self.segmentation.segments_per_stage) > 1

    def build_stages(
        self, rank: int, tp: ProcessGroup | None, device: torch.device
    ) -> dict[int, nn.Module]:
        """By number in the program, the stages of a rank, its shard of each."""
        found: dict[int, nn.Module] = {}
        division, own = (
            self.segmentation.layers_per_stage,
            {*self.program.shape.stages_on_rank[rank]},
        )
        more = {"sequence_parallel": True} if self.program.sequence_parallel else {}
        for stage, first in enumerate(self.segmentation.first_segments[:-1]):
            if first not in own:
                continue
            whole = self.model.module.build_stage(
                self.config.model, stage, len(division), tp=tp, layers_per_stage=division,
                device=device,
                dtype=self.dtype, **more,
            )  # fmt: skip
            each = [whole]
            if self.segmentation.segments_per_stage[stage] > 1:
                assert self.model.split_stage is not None
                each = self.model.split_stage(whole)
            found.update(enumerate(each, first))
        for number, module in found.items():
            use_float32_gradients(module)
            module.requires_grad_(number >= self.program.frozen_stages)
        return found
