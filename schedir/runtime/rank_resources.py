"""RankResources: stages, gradients, optimizer and memory of a rank, for all its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from torch import Tensor, nn

from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.model_checks.stage_requirements import find_device
from schedir.runtime.parameters import buckets
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike
from schedir.runtime.parameters.tied_parameters import RankTies, TiedWeight
from schedir.runtime.services.service import Service, find_or_create
from schedir.runtime.stage_state import StageState
from schedir.transports.transport import Transport

Loss = Callable[[Any, Any], Tensor]  # (output of the last stage, target) -> loss


_Kind = TypeVar("_Kind", bound="RankService")


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The loss and the options of a rank. All programs of the rank share them.

    Args:
        loss: The loss function or module.
        gradients: The options of gradients.
        execution: The options of the execution.
        seed: The seed of the random streams, or None to leave torch's generators unchanged.
        other_rank_stages: The stages of other ranks, if they are in this process.
        parameter_copies: Parameter that several ranks of an `InProcessExecutor` share -> the copy
            that this rank uses.
    """

    loss: Loss
    gradients: GradientOptions = GradientOptions()
    execution: ExecutionOptions = ExecutionOptions()
    seed: int | None = 0
    other_rank_stages: Sequence[nn.Module] = ()
    parameter_copies: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    @property
    def loss_modules(self) -> list[nn.Module]:
        """The loss as a list of one module, or an empty list if it is a function."""
        return [self.loss] if isinstance(self.loss, nn.Module) else []


class RankResources:
    """The stages of a rank with their gradients, its optimizer, random streams and transport.

    All programs of the rank share these objects. The values of a step are in the `ProgramState` of
    the program that runs. State that only one feature needs is in the service of this feature.

    Args:
        program: The first program. Its attributes determine sharding, frozen stages and offload.
        rank: The pipeline rank.
        stages: Number of a local stage -> its module.
        transport: The transport of the rank.
        optimizer: The optimizer of the local parameters, or None.
        options: The loss and the options.
        tied_weights: The tied weights with copies on this rank.

    Attributes:
        is_in_step: True during a step, and after a step that failed.

    Raises:
        ModelError: The parameters are on several devices.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        optimizer: OptimizerLike | None,
        options: RankOptions,
        tied_weights: Sequence[TiedWeight] = (),
    ) -> None:
        self.program = program
        self.rank = rank
        self.transport = transport
        self.optimizer = optimizer
        self.options = options
        self.device: Any = find_device(stages)
        self.random_streams: RandomStreams = RandomStreams(options.seed, self.device)
        self.shard_spec: ShardSpec = ShardSpec(program.dp, transport.dp_rank, program.zero)
        self.ties: RankTies = RankTies(
            tied_weights,
            options.parameter_copies,
            program,
            keeps_gradients=options.gradients.accumulate_grads,
        )
        self.stages: dict[int, StageState] = {
            s: self._make_stage(s, stages[s]) for s in program.shape.stages_on_rank[rank]
        }
        self.services: dict[type[Service], Service] = {}
        self.is_in_step = False

    def _make_stage(self, stage: int, module: nn.Module) -> StageState:
        has_replicas = self.shard_spec != ShardSpec()
        bucket_bytes = buckets.BUCKET_BYTES if has_replicas else inf
        is_frozen = stage < self.program.frozen_stages
        unsharded_spec = ShardSpec(self.shard_spec.replicas, self.shard_spec.replica)
        return StageState(
            module,
            self.ties.substitutes.get(stage, {}),
            max_bucket_bytes=None if self.options.gradients.accumulate_grads else bucket_bytes,
            shard_spec=unsharded_spec if is_frozen else self.shard_spec,
            tied_parameters=self.ties.list_local_copies(stage),
            aliases=self.ties.aliases,
        )

    def service(self, kind: type[_Kind]) -> _Kind:
        """Return the rank's service of a class. The first call creates it.

        Args:
            kind: The class of the service.
        """
        return find_or_create(self.services, kind, self)


class RankService(Service):
    """The state of a feature that all programs of a rank share.

    Args:
        resources: The resources of the rank.
    """

    def __init__(self, resources: RankResources) -> None:
        self.resources = resources
