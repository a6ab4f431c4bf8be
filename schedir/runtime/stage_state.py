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
    """The state of one local stage. All programs of the rank share it.

    Args:
        module: The module of the stage.
        stand_ins: Parameter that stages of the process share -> its substitute in this stage.
        max_bucket_bytes: The largest size of a gradient bucket, in bytes. With None the stage has
            no buckets, and autograd allocates gradients.
        shard_spec: The number of replicas, the index of this replica, and the ZeRO level.
        tied_parameters: The Parameters of the stage that are copies of tied weights.
        aliases: Parameter -> the other Parameter whose memory it uses.
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
        self.sharded_parameters: ShardedParameters = ShardedParameters(
            self.gradients, shard_spec, aliases
        )
        # (Kind, microbatch) -> the pending transfer of a value that an instruction will read.
        self.arrivals: dict[tuple[Value, int], Work] = {}
        # The following attributes are for checks that run only until they pass once. A mode is the
        # value of `module.training`.

        # True after a split backward deferred weight gradients, or if no layer of the stage can
        # defer them.
        self.has_checked_layers = False
        # True after the check that the outputs of a forward require a gradient.
        self.has_checked_gradient = False
        # True after the warning about layers whose backward is not split.
        self.has_warned_of_layers = False
        # True after the check that the outputs depend only on Parameters of the stage.
        self.has_checked_parameters: bool = max_bucket_bytes is None
        # True after the warning that buffers get other values than in a plain training loop.
        self.has_warned_of_buffers = False
        # (Opcode, mode) for which a call has compared the values of buffers before and after it.
        self.checked_buffer_modes: set[tuple[Opcode, bool]] = set()
        # (Module path, name) of buffers to which a call wrote the values that they already had,
        # such as caches.
        self.rewritten_buffers: set[tuple[str, str]] = set()
        # Mode -> names of buffers and frozen Parameters to which recomputed forwards write.
        self.written_buffers: dict[bool, set[str]] = {}
        # (Opcode, mode) of the calls that were checked for writes to tied weights and to weights of
        # stage replicas.
        self.checked_weight_modes: set[tuple[Opcode, bool]] = set()
        # Modes for which a check has found that forwards read no weights of other stages (ZeRO).
        self.checked_read_modes: set[bool] = set()
        # Modes for which a recomputation has compared the values of trained weights before and
        # after it.
        self.checked_recompute_modes: set[bool] = set()
        self.local_ties.restore()

    @property
    def parameter_shards(self) -> Mapping[nn.Parameter, Tensor]:
        """Parameter -> this replica's shard, if only the shard is stored between steps (ZeRO)."""
        return self.sharded_parameters.parameter_shards

    def list_static_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the stage has in all steps."""
        yield from (*self.module.parameters(), *self.module.buffers())
        yield from (*self.gradients.flat, *self.gradients.reduced_flat)
        yield from (*self.sharded_parameters.flat, *self.sharded_parameters.shards)
