"""One stage of a rank: its module, gradients and pending values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.autograd.stage_inputs import StageInputAdapter
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.sharded_parameters import ShardedParameters
from schedir.runtime.parameters.tied_parameters import LocalTies
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.transports.transport import Work


class StageState:
    """One own stage: its module, and what is on its way to it."""

    def __init__(
        self,
        module: nn.Module,
        instead: Mapping[nn.Parameter, nn.Parameter],
        *,
        most: float | None,
        share: ShardSpec,
        tied: Collection[nn.Parameter],
        aliases: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self.module = module
        self.lender = StageInputAdapter()
        self.own = LocalTies(module, instead) if instead else None  # where it shares a Parameter
        if self.own is not None:
            self.own.use()
        self.gradients = GradientBuffers(module, most, share, tied)
        self.weights = ShardedParameters(self.gradients, share, aliases) if share.zero else None
        # What is on its way to an instruction that takes in a value, by kind and microbatch.
        self.arrivals: dict[tuple[Value, int], Work] = {}
        self.layers_seen = False  # what is split, in a backward that used all that could be
        self.warned_of_layers = False  # that some are not split
        self.parameters_checked = most is None  # that an output depends on no Parameters of others
        self.warned_of_buffers = False  # that they are not what a plain loop leaves
        self.looked_at: set[tuple[Opcode, bool]] = set()  # buffers, by value, in which mode
        self.rewritten: set[tuple[str, str]] = set()  # buffers that have been, as they were
        # Buffers that forwards write to, by whether the stage is training: of what is recomputed.
        self.written: dict[bool, set[str]] = {}
        # The instructions and training modes that were seen to write to no weight that has copies.
        self.weights_checked: set[tuple[Opcode, bool]] = set()
        self.watched: set[bool] = set()  # that it reads weights of its own only, in which mode
        self.run_again: set[bool] = set()  # what it trains was looked at by value, in which mode
        self.restore()

    def versions(self, shape: PipelineShape, instrs: Iterable[tuple[int, Instr]]) -> WeightVersions:
        """What keeps its weights after each update of a step; `instrs` are those of the stage, with
        their indices in the Stream."""
        if self.own is not None:
            self.own.use()
        versions = WeightVersions(self.module, shape, instrs)
        self.restore()
        return versions

    def restore(self, versions: WeightVersions | None = None) -> None:
        """Let the module have its parameters as everybody sees them, and not `versions` of them."""
        if self.weights is not None:
            self.weights.rest()
        if versions is not None:
            versions.restore()
        if self.own is not None:
            self.own.restore()
