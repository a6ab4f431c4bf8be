"""The state of a run that a checkpoint saves and loads."""

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
from schedir.runtime.program_state import ProgramState
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.transport import TransportWrapper

# The default of `optimizer` in the functions that save and load checkpoints. With this default they
# use the optimizer of the executor.
RUN_OPTIMIZER: Final = object()


class ShardRange(NamedTuple):
    """The elements of a parameter that a replica owns.

    Args:
        shape: The shape of the parameter on this tensor-parallel rank.
        low: The index of the first owned element in the flattened parameter.
        high: The index after the last owned element in the flattened parameter.
    """

    shape: tuple[int, ...]
    low: int
    high: int


@dataclass(frozen=True)
class StageCheckpointState:
    """The state of one stage of a rank.

    Args:
        module: The module of the stage.
        parameter_names: Trained Parameter of the stage, or its substitute -> its name.
        shard_ranges: Parameter -> the elements that the replica owns and writes to a checkpoint. A
            parameter without an entry is split equally over the replicas.
        shards: Parameter -> its 1-dimensional shard, for parameters that the replica stores only as
            a shard.
    """

    module: nn.Module
    parameter_names: Mapping[nn.Parameter, str]
    shard_ranges: Mapping[nn.Parameter, ShardRange] = field(default_factory=dict)
    shards: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RankCheckpointState:
    """The state of a rank between two steps.

    Args:
        program: The program that trains.
        rank: The pipeline rank.
        stages: The local stages by number.
        shard_spec: The number of replicas, the index of this replica, and the ZeRO level.
        optimizer: The optimizer of the rank, or None.
        loss: The loss function or module.
        random_streams: The random streams of the rank.
        world_shape: Numbers that identify the arrangement of the processes. The first four are
            pipeline ranks, tensor-parallel ranks, replicas and stages. Without a seed, a load
            restores the states of the random generators only if the checkpoint has the same
            numbers.
        set_loading: A function. Call it with True before a load writes to the state, and with False
            after the load is complete. The executor runs no step in between.
        loss_scale: The loss scale, if the rank has one.
        tied_weights: The tied weights with copies on the rank. All ranks list them in the same
            order.
        aliases: Parameter -> the other Parameter whose memory it uses.
        tp: The tensor-parallel size.
        tp_rank: The tensor-parallel rank of this process.
        has_external_reduction: True if another library, such as DDP, reduces the gradients. Then a
            save checks that all replicas have equal weights.
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
    """The functions with which a checkpoint saver reads the state of a process.

    Args:
        collect_rank_states: A function that takes the optimizer to save or load, and returns the
            states of the ranks of this process. It raises `CheckpointError` during a step, and
            after a step or a load that failed.
        validate_last_update: A function that all processes must call before any of them reads
            weights.
        group: The process group of torch.distributed whose processes save and load together. None
            means the default group.
        is_single_process: True if the process saves and loads alone, without torch.distributed.
    """

    collect_rank_states: Callable[[Any], Sequence[RankCheckpointState]]
    validate_last_update: Callable[[], None]
    group: Any = None
    is_single_process: bool = False


class Checkpointable(Protocol):
    """An object with a state to save and load.

    Examples are an `Executor`, an `InProcessExecutor` and a `schedir.torch_pipelining.Schedule`.
    """

    def checkpoint_state(self) -> CheckpointState:
        """Return the state of this process. All processes must call this method."""
        ...


def build_checkpoint_state(
    states: Sequence[ProgramState], validate_last_update: Callable[[], None]
) -> CheckpointState:
    """Return the checkpoint state of the executors of a process.

    Args:
        states: The state of each rank of this process.
        validate_last_update: A function that validates the last update of all these ranks.
    """
    transport: Any = states[0].transport
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    is_single_process = not isinstance(transport, ProcessTransport)
    group = None if is_single_process else transport.parent_group

    def collect_rank_states(optimizer: object) -> list[RankCheckpointState]:
        if optimizer is not RUN_OPTIMIZER and any(
            state.resources.optimizer is not optimizer for state in states
        ):
            raise UsageError(
                "optimizer is not the optimizer of the executor",
                hint="leave out optimizer=..., because the executor has one",
                fields=["optimizer"],
            )
        return [*map(_collect_rank_state, states)]

    return CheckpointState(collect_rank_states, validate_last_update, group, is_single_process)


def _collect_rank_state(state: ProgramState) -> RankCheckpointState:
    _require_between_steps(state)
    program, resources = state.program, state.resources

    def set_loading(is_loading: bool) -> None:
        for service in state.list_services():
            service.on_load()
        resources.is_in_step = is_loading

    return RankCheckpointState(
        program,
        state.rank,
        {s: _collect_stage_state(state, s) for s in state.stages},
        state.resources.shard_spec,
        state.resources.optimizer,
        state.options.loss,
        state.random_streams,
        [program.shape.ranks, program.tp, program.dp, program.shape.stages],
        set_loading,
        state.options.gradients.loss_scale,
        state.resources.ties.weights,
        resources.ties.aliases,
        state.transport.tp,
        state.transport.tp_rank,
    )


def _require_between_steps(state: ProgramState) -> None:
    resources = state.resources
    if resources.is_in_step:
        raise CheckpointError(
            "an earlier step or load failed, and may have changed only some of the weights"
        )
    for service in state.list_services():
        service.require_savable()


def _collect_stage_state(state: ProgramState, s: int) -> StageCheckpointState:
    stage = state.stages[s]
    shard_ranges: dict[nn.Parameter, ShardRange] = {}
    for bucket in stage.gradients.buckets:
        ranges = bucket.list_shard_ranges()
        rows = zip(bucket.parameters, bucket.shapes, ranges, strict=True)
        shard_ranges |= {
            p: ShardRange(tuple(shape), low, high) for p, shape, (low, high, _) in rows
        }
    return StageCheckpointState(
        stage.module, stage.gradients.names, shard_ranges, stage.parameter_shards
    )
