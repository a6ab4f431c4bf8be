"""Build the modules of a rank's stages, or of the segments of these stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.ir.program import Program
from schedir.models import moe_gpt
from schedir.models.moe_config import MoEConfig
from schedir.runtime.boundaries.boundary import Boundary, BoundaryTensors
from schedir.runtime.parameters.mixed_precision import use_float32_gradients
from schedir.training.config.run_config import Config
from schedir.training.model_factory import get_trained_model

StageBoundaries = Boundary | dict[int, tuple[Boundary, ...]]


class ProgramStages:
    """Builds the stages of a configuration's model for a program.

    Args:
        config: The configuration of the run.
        program: The program that trains.

    Attributes:
        model: The functions that build the model.
        microbatch_size: The number of samples in a microbatch of the program.
        dtype: The type of the weights and of the boundary.
        boundary: The boundary between two stages. If stages are segmented, the boundaries by
            program stage.
        message_bytes: The size of the largest message, in bytes.
    """

    def __init__(self, config: Config, program: Program) -> None:
        self.config = config
        self.program = program
        self.segmentation = config.segmentation
        self.model = get_trained_model(config.model)
        self.microbatch_size = self.segmentation.microbatch_size
        self.dtype: torch.dtype = getattr(torch, config.train.precision)
        shared = program.tp if program.sequence_parallel else 1
        shape = (self.microbatch_size, config.model.context // shared, config.model.hidden)
        self.boundary: StageBoundaries = Boundary(shape, self.dtype)
        # Each tensor-parallel rank sends its share of a boundary.
        self.message_bytes = (
            BoundaryTensors.from_boundary(self.boundary).nbytes * shared // program.tp
        )
        if isinstance(config.model, MoEConfig):
            self.boundary = moe_gpt.build_boundaries(
                config.model, self.segmentation.segments_per_stage, self.boundary, program.ep
            )
        elif self.is_segmented:
            assert self.model.make_boundaries is not None
            frozen = self.segmentation.first_segments.index(program.frozen_stages)
            self.boundary = self.model.make_boundaries(
                self.segmentation.segments_per_stage, self.boundary, frozen, shared
            )

    @property
    def is_segmented(self) -> bool:
        """Return whether any stage has more than one segment."""
        return max(self.segmentation.segments_per_stage) > 1

    def build_stages(
        self, rank: int, tp: ProcessGroup | None, device: torch.device, replica: int
    ) -> dict[int, nn.Module]:
        """Return this rank's shard of each of its stages, by program stage.

        Frozen stages get no gradients. If stages are segmented, a segment is a program stage.

        Args:
            rank: The pipeline rank.
            tp: The tensor-parallel group. None without tensor parallelism.
            device: The device of the parameters.
            replica: The replica of this rank.
        """
        modules: dict[int, nn.Module] = {}
        division = self.segmentation.layers_per_stage
        local_stages = {*self.program.shape.stages_on_rank[rank]}
        options: dict[str, Any] = {"tp": tp}
        if self.program.sequence_parallel:
            options["sequence_parallel"] = True
        if isinstance(self.config.model, MoEConfig):
            options = {"ep": self.program.ep, "ep_rank": replica % self.program.ep}
        for stage, first_segment in enumerate(self.segmentation.first_segments[:-1]):
            if first_segment not in local_stages:
                continue
            complete_stage = self.model.module.build_stage(
                self.config.model, stage, len(division), layers_per_stage=division,
                device=device,
                dtype=self.dtype, **options,
            )  # fmt: skip
            segments = [complete_stage]
            if self.segmentation.segments_per_stage[stage] > 1:
                assert self.model.split_stage is not None
                segments = self.model.split_stage(complete_stage)
            modules.update(enumerate(segments, first_segment))
        for number, module in modules.items():
            use_float32_gradients(module)
            module.requires_grad_(number >= self.program.frozen_stages)
        return modules
