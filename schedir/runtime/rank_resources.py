"""RankResources: stages, gradients, optimizer and memory of a rank, whatever program it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from schedir.analysis.memory.buffer_slots import KINDS, assign, counts
from schedir.errors import ModelError
from schedir.ir.isa.instructions import BOUNDARY, RECEIVES, ROWS, Opcode, Value
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.parameter_guard import ParameterGuard
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.offload.disk_optimizer_state import DiskOptimizerState
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState, require_by_stage
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.snapshot_copies import SnapshotCopies
from schedir.runtime.parameters import overlapped_reduction
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.optimistic_step import OptimisticStep
from schedir.runtime.parameters.sharded_parameters import cut_state
from schedir.runtime.parameters.tied_parameters import TiedWeight, is_apart, stand_ins
from schedir.runtime.stage_state import StageState
from schedir.transports.transport import Place, Transport

Loss = Callable[[Any, Any], Tensor]  # of what the last stage gives, and a target


class RankResources:
    """A rank's stages with their gradients, the optimizer, what modules draw from, and who moves
    tensors.  What is on its way in a step is the State of the program that runs.

    `program` is the one that trains.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        loss: Loss,
        optimizer: OptimizerLike | None,
        max_norm: float,
        loss_scale: LossScale | None,
        seed: int | None,
        weights: Sequence[TiedWeight] = (),
        copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
        others: Sequence[nn.Module] = (),
        adds: bool = False,
        debug: bool = False,
        tiers: MemoryTiers | None = None,
    ) -> None:
        self.debug = debug  # the host may look at what is computed, wherever that is
        self.adds = adds  # gradients, to what is there, as autograd does
        self.rank, self.transport, self.loss = rank, transport, loss
        self.optimizer, self.max_norm, self.loss_scale = optimizer, max_norm, loss_scale
        self.tied, self.copies, shape = weights, copies, program.shape
        self.others = others  # stages of other ranks, as far as this process knows them
        instead, self.aliases = stand_ins(weights, copies)
        self.apart = any(is_apart(weight, shape) for weight in weights)
        self.share = ShardSpec(program.dp, transport.dp_rank, program.zero)
        self.stages = {
            s: StageState(
                stages[s],
                instead.get(s, {}),
                most=None
                if adds
                else overlapped_reduction.BUCKET
                if self.share != ShardSpec()
                else inf,
                share=self.share
                if s >= program.frozen_stages
                else ShardSpec(program.dp, transport.dp_rank),
                tied=[weight.own[s] for weight in weights if s in weight.own],
                aliases=self.aliases,
            )
            for s in shape.stages_of[rank]
        }
        self.unchanged = ParameterGuard({s: stages[s] for s in self.stages})
        self.may_step = True  # else the optimizer is held back
        self.device = device_of(stages)
        self.snapshots = SnapshotCopies(self.device)
        self.lanes, self.tiers = (
            CopyLanes(self.device),
            tiers or MemoryTiers(self.device, rank, (), None),
        )
        self.states: HostOptimizerState | None = None  # where the optimizer's lie elsewhere
        if program.optimizer_placement != "device" and program.trains:
            trained = {s: stages[s].parameters() for s in self.stages if s >= program.frozen_stages}
            parameters = {s: [copies.get(p, p) for p in own] for s, own in trained.items()}
            require_by_stage(program, parameters, optimizer)
            if optimizer is not None:
                self.states = self._states_of(program, parameters, optimizer)
        self.draws = RandomStreams(seed, self.device)
        self.ahead: OptimisticStep | None = None
        if program.norm_check == "after_step" and program.trains:
            own = self.stages.values()
            self.ahead = OptimisticStep(
                [stage.gradients for stage in own], [stage.module for stage in own],
                optimizer, loss_scale, self.draws, self.device, debug,
            )  # fmt: skip
        self.under_way = False  # in a step, or one that has failed
        # Of the last update, its norm and what of it was finite.
        self.stepped: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.rooms: dict[Value, list[int]] = {}  # the bytes of each slot, by kind
        self.buffers: dict[Place, Tensor] = {}  # static memory of what is received
        # Static memory of sent values, also by the instructions that change their form.
        self.outgoing: dict[tuple[Value, int, tuple[Opcode, ...]], Tensor] = {}

    def _states_of(
        self, program: Program, parameters: Mapping[int, Sequence[Tensor]], optimizer: OptimizerLike
    ) -> HostOptimizerState:
        """Return what moves the optimizer's states as the program says.  Raises ModelError for an
        optimizer that cannot step one stage after the other."""
        names: dict[Tensor, str] = {
            p: f"{name} of stage {s}"
            for s, stage in self.stages.items()
            for p, name in stage.gradients.names.items()
        }
        given = parameters, optimizer, self.lanes, self.device, names
        try:
            if program.optimizer_placement == "disk":
                return DiskOptimizerState(*given, self.tiers)
            if program.optimizer_placement == "cpu_step":
                return CpuOptimizer(*given, self.stages, self.share.replica)
            return HostOptimizerState(*given)
        except ModelError as error:
            error.program = program.name
            raise

    def make_room(self, runs: Sequence[tuple[Program, BoundaryTable]]) -> None:
        """Make memory for the messages of programs, in which none is while another runs: for each
        slot that of the largest; all processes must call this."""
        for program, passing in runs:
            for kind, sizes in rooms_of(program, self.rank, passing).items():
                both = zip_longest(self.rooms.get(kind, ()), sizes, fillvalue=0)
                self.rooms[kind] = [max(pair) for pair in both]
        received = {kind: self.rooms[kind] for op in RECEIVES for kind in ROWS[op].gives}
        programs = [program for program, _ in runs]
        self.buffers = self.transport.buffers(received, self.device, programs)

    def cut(self) -> None:
        """Keep of what replicas share no more than the own part: the end of what can be undone."""
        parts: dict[nn.Parameter, Tensor] = {}
        pieces: dict[nn.Parameter, tuple[torch.Size, int, int]] = {}
        for stage in self.stages.values():
            if (weights := stage.weights) is not None:
                weights.cut(parts)
                for bucket, own in zip(weights.buckets, weights.own, strict=True):
                    parts |= dict.fromkeys(bucket.parameters[:1], own)
                    ranges = bucket.ranges(self.share.replica)
                    for p, shape, (low, high, _) in zip(
                        bucket.parameters, bucket.shapes, ranges, strict=True
                    ):
                        pieces[p] = shape, low, high
        cut_state(self.optimizer, pieces)


def rooms_of(program: Program, rank: int, passing: BoundaryTable) -> dict[Value, list[int]]:
    """The bytes of each slot that messages leave or come into, by kind: of the largest."""
    number = dict(zip(KINDS, counts(program)[rank].tolist(), strict=True))
    rooms = {kind: [0] * number[kind] for kind in BOUNDARY}
    for (kind, stage, mb), fills in assign(program, rank).items():
        if kind in rooms and program.other(kind, stage) >= 0:
            size = passing[mb].carried(kind, stage).nbytes
            for slot in fills.values():
                rooms[kind][slot] = max(rooms[kind][slot], size)
    return rooms


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where a rank's stages are: where their parameters are.

    Raises ModelError if they are in several places.
    """
    found = {p.device for stage in stages.values() for p in stage.parameters()}
    if len(found) > 1:
        raise ModelError(
            f"the parameters of one rank are on {' and '.join(sorted(map(str, found)))}"
        )
    return next(iter(found), torch.device("cpu"))
