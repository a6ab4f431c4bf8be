"""Build the modules of a rank's stages, or of their segments."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import Boundary, BoundaryTensors
from schedir.runtime.parameters.mixed_precision import float32_gradients
from schedir.training.config.run_config import Config
from schedir.training.model_factory import model_of

Passing = Boundary | dict[int, tuple[Boundary, ...]]


class ProgramStages:
    """The stages of a program, of a configuration's model: what passes between them, of
    microbatches of `size` samples, and the most bytes of a message."""

    def __init__(self, config: Config, program: Program) -> None:
        self.config, self.program, self.finer = config, program, config.finer
        self.model, self.size = model_of(config.model), self.finer.size
        self.dtype: torch.dtype = getattr(torch, config.train.precision)
        shared = program.tp if program.sequence_parallel else 1
        shape = (self.size, config.model.context // shared, config.model.hidden)
        self.boundary: Passing = Boundary(shape, self.dtype)
        # Each tensor-parallel rank sends its slice.
        self.message = BoundaryTensors.of(self.boundary).nbytes * shared // program.tp
        if self.in_pieces:
            assert self.model.between is not None
            frozen = self.finer.first.index(program.frozen_stages)
            self.boundary = self.model.between(self.finer.pieces, self.boundary, frozen, shared)

    @property
    def in_pieces(self) -> bool:
        return max(self.finer.pieces) > 1

    def made(
        self, rank: int, tp: ProcessGroup | None, device: torch.device
    ) -> dict[int, nn.Module]:
        """By number in the program, the stages of a rank, its shard of each."""
        found: dict[int, nn.Module] = {}
        division, own = self.finer.division, {*self.program.shape.stages_of[rank]}
        more = {"sequence": True} if self.program.sequence_parallel else {}
        for stage, first in enumerate(self.finer.first[:-1]):
            if first not in own:
                continue
            whole = self.model.module.build_stage(
                self.config.model, stage, len(division), tp=tp, division=division, device=device,
                dtype=self.dtype, **more,
            )  # fmt: skip
            each = [whole]
            if self.finer.pieces[stage] > 1:
                assert self.model.pieces is not None
                each = self.model.pieces(whole)
            found.update(enumerate(each, first))
        for number, module in found.items():
            float32_gradients(module)
            module.requires_grad_(number >= self.program.frozen_stages)
        return found
