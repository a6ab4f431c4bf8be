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

ITS_OWN: Final = object()  # in the place of an optimizer: whoever trains has it


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
    names: Mapping[nn.Parameter, str]
    ranges: Mapping[nn.Parameter, ShardRange] = field(default_factory=dict)
    pieces: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RankCheckpointState:
    """What a rank has, between two steps.

    `tied` are the tied weights of which it has copies, in the order in which all ranks have them,
    and `aliases` what is in another parameter's memory.  `share` is which replica it is, and `tp`
    and `tp_rank` which slice.  `world` decides which process draws for what.  `is_read` is told
    True before a load writes to any of it, and False when all has been: between, nobody goes on.
    Where replicas are `reduced_elsewhere`, whether they are equal is looked at.
    """

    program: Program
    rank: int
    stages: Mapping[int, StageCheckpointState]
    share: ShardSpec
    optimizer: Any
    loss: Any
    draws: RandomStreams
    world: Sequence[int]
    is_read: Callable[[bool], None]
    loss_scale: LossScale | None = None
    tied: Sequence[TiedWeight] = ()
    aliases: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    tp: int = 1
    tp_rank: int = 0
    reduced_elsewhere: bool = False


@dataclass(frozen=True)
class CheckpointState:
    """What a process has: `ranks(optimizer)`, which raises CheckpointError where it is not between
    steps; `settle`, which all processes call before they look at weights; and the `group` of
    torch.distributed that saves and loads together, unless the process is `alone`."""

    ranks: Callable[[Any], Sequence[RankCheckpointState]]
    settle: Callable[[], None]
    group: Any = None
    alone: bool = False


class Checkpointable(Protocol):
    """What is saved and loaded: an Executor, an InProcessExecutor, or a
    `schedir.torch_pipelining.Schedule`."""

    def kept(self) -> CheckpointState:
        """What this process has; all processes call this."""
        ...


def kept_of(states: Sequence[State], settle: Callable[[], None]) -> CheckpointState:
    """What the executors of a process have, and how they are settled."""
    transport: Any = states[0].transport
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    group, alone = (
        (transport.within, False) if isinstance(transport, ProcessTransport) else (None, True)
    )

    def ranks(optimizer: object) -> list[RankCheckpointState]:
        if optimizer is not ITS_OWN and any(state.optimizer is not optimizer for state in states):
            raise UsageError(
                "an executor has an optimizer of its own, and is given another one to save or load",
                hint="save(executor, folder, step=...)",
                fields=["optimizer"],
            )
        return [*map(_rank, states)]

    return CheckpointState(ranks, settle, group, alone)


def _rank(state: State) -> RankCheckpointState:
    _expect_at_rest(state)
    program, held = state.program, state.held

    def is_read(begins: bool) -> None:
        held.snapshots.forget()
        held.under_way = begins

    return RankCheckpointState(
        program,
        state.rank,
        {s: _stage(state, s) for s in state.stages},
        state.share,
        state.optimizer,
        state.loss,
        state.draws,
        [program.shape.ranks, program.tp, program.dp, program.shape.stages],
        is_read,
        state.loss_scale,
        state.tied,
        held.aliases,
        state.transport.tp,
        state.transport.tp_rank,
    )


def _expect_at_rest(state: State) -> None:
    held = state.held
    if held.under_way:
        raise CheckpointError(
            "a step or a load has failed, and left weights as they were within it"
        )
    if any(stage.weights is not None and stage.weights.shown for stage in held.stages.values()):
        raise CheckpointError(
            "weights are shown whole, and are kept in parts",
            hint="leave `with executor.whole():` before",
        )


def _stage(state: State, s: int) -> StageCheckpointState:
    stage = state.stages[s]
    found: dict[nn.Parameter, ShardRange] = {}
    for bucket in stage.gradients.buckets:
        ranges = bucket.ranges(state.share.replica)
        each = zip(bucket.parameters, bucket.shapes, ranges, strict=True)
        found |= {p: ShardRange(tuple(shape), low, high) for p, shape, (low, high, _) in each}
    pieces = {} if stage.weights is None else stage.weights.pieces
    return StageCheckpointState(stage.module, stage.gradients.names, found, pieces)
