"""StageState: the module, gradients and pending inputs of one stage of a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from schedir.ir.isa.instructions import Opcode, Value
from schedir.runtime.autograd.stage_inputs import StageInputAdapter
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.sharded_parameters import ShardedParameters
from schedir.runtime.parameters.tied_parameters import LocalTies
from schedir.transports.transport import Work


class StageState:
    """The state of one local stage that all programs of a rank share.

    Args:
        module: The module of the stage.
        stand_ins: Substitutes for Parameters that other stages of the process share, by Parameter.
        max_bucket_bytes: The largest size of a gradient bucket, in bytes. None keeps autograd's own
            gradients.
        shard_spec: The number of replicas, the number of this replica, and the ZeRO level.
        tied_parameters: The Parameters of the stage that are copies of tied weights.
        aliases: For each parameter that uses the memory of another parameter, the other one.
    """

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
        self.input_adapter: StageInputAdapter = StageInputAdapter()
        self.local_ties: LocalTies = LocalTies(module, stand_ins)
        self.local_ties.install_substitutes()
        self.gradients: GradientBuffers = GradientBuffers(
            module, max_bucket_bytes, shard_spec, tied_parameters
        )
        self.sharded_parameters: ShardedParameters | None = (
            ShardedParameters(self.gradients, shard_spec, aliases) if shard_spec.zero else None
        )
        # The pending transfers of values that an instruction will read, by kind and microbatch.
        self.arrivals: dict[tuple[Value, int], Work] = {}
        # Checks that run only until they have passed once. A mode is the module's `training`.
        # A split backward deferred weight gradients, or no layer of the stage could.
        self.has_checked_layers = False
        # True after the outputs of a first forward were tested for a gradient.
        self.has_checked_gradient = False
        # The warning about layers that are not split was given.
        self.has_warned_of_layers = False
        # The outputs depend on no Parameters other than the stage's.
        self.has_checked_parameters: bool = max_bucket_bytes is None
        # The warning about buffers that differ from those of a plain loop was given.
        self.has_warned_of_buffers = False
        # Opcodes and modes in which buffers were compared by value.
        self.checked_buffer_modes: set[tuple[Opcode, bool]] = set()
        # Module paths and names of buffers that were written with their old values, as a cache is.
        self.rewritten_buffers: set[tuple[str, str]] = set()
        # Names of buffers and frozen Parameters that recomputed forwards write to, by mode.
        self.written_buffers: dict[bool, set[str]] = {}
        # Opcodes and modes that wrote to no weight with copies.
        self.checked_weight_modes: set[tuple[Opcode, bool]] = set()
        # Modes in which a forward read no weights of other stages (ZeRO).
        self.checked_read_modes: set[bool] = set()
        # Modes in which recomputation compared the trained weights by value.
        self.checked_recompute_modes: set[bool] = set()
        self.local_ties.restore()

    @property
    def parameter_shards(self) -> Mapping[nn.Parameter, Tensor]:
        """The replica's shard of each parameter that is stored only as a shard (ZeRO)."""
        return {} if self.sharded_parameters is None else self.sharded_parameters.parameter_shards

    def list_static_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the stage has in all steps."""
        yield from (*self.module.parameters(), *self.module.buffers())
        yield from (*self.gradients.flat, *self.gradients.reduced_flat)
        if self.sharded_parameters is not None:
            yield from (*self.sharded_parameters.flat, *self.sharded_parameters.shards)
