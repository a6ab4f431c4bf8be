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
        stand_ins: Mapping[nn.Parameter, nn.Parameter],
        *,
        max_bucket_bytes: float | None,
        shard_spec: ShardSpec,
        tied_parameters: Collection[nn.Parameter],
        aliases: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self.module = module
        self.input_adapter = StageInputAdapter()
        self.local_ties = (
            LocalTies(module, stand_ins) if stand_ins else None
        )  # where it shares a Parameter
        if self.local_ties is not None:
            self.local_ties.install_substitutes()
        self.gradients = GradientBuffers(module, max_bucket_bytes, shard_spec, tied_parameters)
        self.sharded_parameters = (
            ShardedParameters(self.gradients, shard_spec, aliases) if shard_spec.zero else None
        )
        # What is on its way to an instruction that takes in a value, by kind and microbatch.
        self.arrivals: dict[tuple[Value, int], Work] = {}
        self.has_checked_layers = False  # what is split, in a backward that used all that could be
        self.has_warned_of_layers = False  # that some are not split
        self.has_checked_parameters = (
            max_bucket_bytes is None
        )  # that an output depends on no Parameters of others
        self.has_warned_of_buffers = False  # that they are not what a plain loop leaves
        self.checked_buffer_modes: set[tuple[Opcode, bool]] = (
            set()
        )  # buffers, by value, in which mode
        self.rewritten_buffers: set[tuple[str, str]] = set()  # buffers that have been, as they were
        # Buffers that forwards write to, by whether the stage is training: of what is recomputed.
        self.written_buffers: dict[bool, set[str]] = {}
        # The instructions and training modes that were seen to write to no weight that has copies.
        self.checked_weight_modes: set[tuple[Opcode, bool]] = set()
        self.checked_read_modes: set[bool] = (
            set()
        )  # that it reads weights of its own only, in which mode
        self.checked_recompute_modes: set[bool] = (
            set()
        )  # what it trains was looked at by value, in which mode
        self.restore_parameters()

    def create_weight_versions(
        self, shape: PipelineShape, instrs: Iterable[tuple[int, Instr]]
    ) -> WeightVersions:
        """What keeps its weights after each update of a step; `instrs` are those of the stage, with
        their indices in the Stream."""
        if self.local_ties is not None:
            self.local_ties.install_substitutes()
        versions = WeightVersions(self.module, shape, instrs)
        self.restore_parameters()
        return versions

    def restore_parameters(self, versions: WeightVersions | None = None) -> None:
        """Let the module have its parameters as everybody sees them, and not
        `create_weight_versions` of them."""
        if self.sharded_parameters is not None:
            self.sharded_parameters.to_resting_state()
        if versions is not None:
            versions.restore()
        if self.local_ties is not None:
            self.local_ties.restore()
