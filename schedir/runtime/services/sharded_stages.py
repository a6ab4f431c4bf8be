"""ShardedStages: the parameters of a rank's stages, which ZeRO shards between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from schedir.errors import CheckpointError
from schedir.runtime.model_checks.tied_weight_requirements import fingerprint_parameters
from schedir.runtime.parameters.buckets import describe_slice
from schedir.runtime.parameters.sharded_parameters import (
    require_sharded_state,
    shard_optimizer_state,
)
from schedir.runtime.program_state import ProgramService, ProgramState


class ShardedStages(ProgramService):
    """The stages whose parameters ZeRO shards.

    Args:
        state: The state of the program.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.sharded = [stage.sharded_parameters for stage in state.stages.values()]
        state.first_step_checks.weights = self.sharded

    def finish_setup(self) -> None:
        """Shard the parameters and the optimizer state over the replicas."""
        alias_shards: dict[nn.Parameter, Tensor] = {}
        shard_ranges = {}
        for weights in self.sharded:
            weights.shard_weights(alias_shards)
            for bucket, shard in zip(weights.buckets, weights.shards, strict=True):
                alias_shards |= dict.fromkeys(bucket.parameters[:1], shard)
                ranges = bucket.list_shard_ranges()
                for p, shape, (low, high, _) in zip(
                    bucket.parameters, bucket.shapes, ranges, strict=True
                ):
                    shard_ranges[p] = shape, low, high
        shard_optimizer_state(self.state.resources.optimizer, shard_ranges)

    def begin_update(self) -> None:
        """Set `data` of all parameters to views with the full shapes."""
        for weights in self.sharded:
            weights.begin_step(has_backward=self.state.program.has_backward)

    def begin_optimizer_step(self, finite: Tensor, clip_factor: Tensor | None) -> None:
        """Set `data` of all parameters to their shards, and check the optimizer state.

        Args:
            finite: See `Service.begin_optimizer_step`.
            clip_factor: See `Service.begin_optimizer_step`.

        Raises:
            ModelError: A sharded weight was written to, or the optimizer's state is not sharded.
        """
        for weights in self.sharded:
            weights.require_unwritten()
            weights.to_resting_state()
        shapes = {p: view.shape for weights in self.sharded for p, view in weights.full_views}
        require_sharded_state(self.state.resources.optimizer, shapes)

    def finish_step(self) -> None:
        """Check that an evaluation wrote to no weight.

        Raises:
            ModelError: A weight was written to.
        """
        for weights in self.sharded if self.state.is_evaluating else ():
            weights.require_unwritten()

    def restore(self) -> None:
        """Set `data` of all parameters to their shards."""
        for weights in self.sharded:
            weights.to_resting_state()

    def require_savable(self) -> None:
        """Check that weights are sharded before a checkpoint.

        Raises:
            CheckpointError: The weights are unsharded.
        """
        if any(weights.summoned_flat for weights in self.sharded):
            raise CheckpointError(
                "weights are unsharded within full_parameters(), but checkpoints need sharded "
                "weights",
                hint="leave `with executor.full_parameters():` before you save or load",
            )

    @contextmanager
    def gather_full(self) -> Iterator[None]:
        """Gather all parameters of the rank's stages in this context, and then shard them again.

        The caller may write to parameters within this context. All processes must enter and leave
        the context together, and must write the same values.

        Raises:
            ModelError: Replicas wrote different values.
        """
        state = self.state
        for weights in self.sharded:
            weights.summon_full(state.transport.start_collective)
        try:
            yield
            if state.program.zero:
                # Version counters do not show a write to `data`, so compare values.
                state.transport.check_agreement(_checksum_parameters(state))
        finally:
            for weights in self.sharded:
                weights.write_back()


def _checksum_parameters(state: ProgramState) -> dict[str, str]:
    """Return a dict for `check_agreement`: description of a parameter -> checksum."""
    modules = {s: stage.module for s, stage in state.stages.items()}
    tp_rank = state.transport.tp_rank
    return {
        f"the values of {name} in stage {s}, "
        f"{describe_slice(modules[s].get_parameter(name), tp_rank)}": p.values_digest
        for s, parameters in fingerprint_parameters(modules).items()
        for p in parameters
        for name in p.names[:1]
    }
