"""The state of a run that a checkpoint saves: tensors by stage and by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn

from schedir.errors import CheckpointError, UsageError
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.parameters.tied_parameters import TiedWeight
from schedir.runtime.rank_state import State
from schedir.transports.gloo import ProcessTransport
from schedir.transports.transport import TransportWrapper

RUN_OPTIMIZER: Final = object()  # in the place of an optimizer: whoever trains has it


class ShardRange(NamedTuple):
    """The shape of what a tensor-parallel rank has, and which of its numbers are own, from and
    to."""

    shape: tuple[int, ...]
    low: int
    high: int


@dataclass(frozen=True)
class StageCheckpointState:
    """A stage of a rank: its module; the names of what is trained, by what the stage computes with;
    of these the ranges that the replica keeps or writes, where they are no equal shares; and those
    of which it has nothing but its range, 1-dim."""

    module: nn.Module
    parameter_names: Mapping[nn.Parameter, str]
    shard_ranges: Mapping[nn.Parameter, ShardRange] = field(default_factory=dict)
    shards: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RankCheckpointState:
    """What a rank has, between two steps.

    `tied_weights` are the tied weights of which it has copies, in the order in which all ranks have
    them, and `aliases` what is in another parameter's memory.  `shard_spec` is which replica it is,
    and
    `tp` and `tp_rank` which slice.  `world_shape` decides which process draws for what.
    `set_loading` is told True before a load writes to any of it, and False when all has been:
    between, nobody goes on. Where replicas are `has_external_reduction`, whether they are equal is
    looked at.
    """

    program: Program
    rank: int
    stages: Mapping[int, StageCheckpointState]
    shard_spec: ShardSpec
    optimizer: Any
    loss: Any
    random_streams: RandomStreams
    world_shape: Sequence[int]
    set_loading: Callable[[bool], None]
    loss_scale: LossScale | None = None
    tied_weights: Sequence[TiedWeight] = ()
    aliases: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    tp: int = 1
    tp_rank: int = 0
    has_external_reduction: bool = False


@dataclass(frozen=True)
class CheckpointState:
    """What a process has: `ranks(optimizer)`, which raises CheckpointError where it is not between
    steps; `validate_last_update`, which all processes call before they look at weights; and the
    `group` of torch.distributed that saves and loads together, unless the process is
    `is_single_process`."""

    collect_rank_states: Callable[[Any], Sequence[RankCheckpointState]]
    validate_last_update: Callable[[], None]
    group: Any = None
    is_single_process: bool = False


class Checkpointable(Protocol):
    """What is saved and loaded: an Executor, an InProcessExecutor, or a
    `schedir.torch_pipelining.Schedule`."""

    def checkpoint_state(self) -> CheckpointState:
        """What this process has; all processes call this."""
        ...


def build_checkpoint_state(
    states: Sequence[State], validate_last_update: Callable[[], None]
) -> CheckpointState:
    """What the executors of a process have, and how they are settled."""
    transport: Any = states[0].transport
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    group, alone = (
        (transport.parent_group, False) if isinstance(transport, ProcessTransport) else (None, True)
    )

    def ranks(optimizer: object) -> list[RankCheckpointState]:
        if optimizer is not RUN_OPTIMIZER and any(
            state.optimizer is not optimizer for state in states
        ):
            raise UsageError(
                "an executor has an optimizer of its own, and is given another one to save or load",
                hint="save(executor, folder, step=...)",
                fields=["optimizer"],
            )
        return [*map(_collect_rank_state, states)]

    return CheckpointState(ranks, validate_last_update, group, alone)


def _collect_rank_state(state: State) -> RankCheckpointState:
    _require_between_steps(state)
    program, held = state.program, state.resources

    def is_read(begins: bool) -> None:
        held.snapshots.cancel_request()
        held.is_in_step = begins

    return RankCheckpointState(
        program,
        state.rank,
        {s: _collect_stage_state(state, s) for s in state.stages},
        state.shard_spec,
        state.optimizer,
        state.loss,
        state.random_streams,
        [program.shape.ranks, program.tp, program.dp, program.shape.stages],
        is_read,
        state.loss_scale,
        state.tied_weights,
        held.aliases,
        state.transport.tp,
        state.transport.tp_rank,
    )


def _require_between_steps(state: State) -> None:
    held = state.resources
    if held.is_in_step:
        raise CheckpointError(
            "a step or a load has failed, and left weights as they were within it"
        )
    if any(
        stage.sharded_parameters is not None and stage.sharded_parameters.summoned_flat
        for stage in held.stages.values()
    ):
        raise CheckpointError(
            "weights are shown whole, and are kept in parts",
            hint="leave `with executor.full_parameters():` before",
        )


def _collect_stage_state(state: State, s: int) -> StageCheckpointState:
    stage = state.stages[s]
    found: dict[nn.Parameter, ShardRange] = {}
    for bucket in stage.gradients.buckets:
        ranges = bucket.list_shard_ranges(state.shard_spec.replica)
        each = zip(bucket.parameters, bucket.shapes, ranges, strict=True)
        found |= {p: ShardRange(tuple(shape), low, high) for p, shape, (low, high, _) in each}
    pieces = {} if stage.sharded_parameters is None else stage.sharded_parameters.parameter_shards
    return StageCheckpointState(stage.module, stage.gradients.names, found, pieces)
