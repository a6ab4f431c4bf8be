"""RankResources: stages, gradients, optimizer and memory of a rank, whatever program it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from schedir.analysis.memory.buffer_slots import SLOT_KINDS, assign_slots, count_slots
from schedir.errors import ModelError
from schedir.ir.isa.instructions import BOUNDARY_VALUES, INSTRUCTIONS, RECV_OPS, Opcode, Value
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.parameter_guard import ParameterGuard
from schedir.runtime.offload.copy_lanes import CopyLanes
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.offload.disk_optimizer_state import DiskOptimizerState
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState, require_stagewise_steps
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.snapshot_copies import SnapshotCopies
from schedir.runtime.parameters import overlapped_reduction
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.optimistic_step import OptimisticStep
from schedir.runtime.parameters.sharded_parameters import shard_optimizer_state
from schedir.runtime.parameters.tied_parameters import (
    TiedWeight,
    has_separate_copies,
    make_substitutes,
)
from schedir.runtime.stage_state import StageState
from schedir.transports.transport import SlotKey, Transport

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
        tied_weights: Sequence[TiedWeight] = (),
        parameter_copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
        other_rank_stages: Sequence[nn.Module] = (),
        accumulate_grads: bool = False,
        debug: bool = False,
        memory_tiers: MemoryTiers | None = None,
    ) -> None:
        self.debug = debug  # the host may look at what is computed, wherever that is
        self.accumulate_grads = accumulate_grads  # gradients, to what is there, as autograd does
        self.rank, self.transport, self.loss = rank, transport, loss
        self.optimizer, self.max_norm, self.loss_scale = optimizer, max_norm, loss_scale
        self.tied_weights, self.parameter_copies, shape = (
            tied_weights,
            parameter_copies,
            program.shape,
        )
        self.other_rank_stages = (
            other_rank_stages  # stages of other ranks, as far as this process knows them
        )
        instead, self.aliases = make_substitutes(tied_weights, parameter_copies)
        self.has_separate_copies = any(
            has_separate_copies(weight, shape) for weight in tied_weights
        )
        self.shard_spec = ShardSpec(program.dp, transport.dp_rank, program.zero)
        self.stages = {
            s: StageState(
                stages[s],
                instead.get(s, {}),
                max_bucket_bytes=None
                if accumulate_grads
                else overlapped_reduction.BUCKET_BYTES
                if self.shard_spec != ShardSpec()
                else inf,
                shard_spec=self.shard_spec
                if s >= program.frozen_stages
                else ShardSpec(program.dp, transport.dp_rank),
                tied_parameters=[
                    weight.local_copies[s] for weight in tied_weights if s in weight.local_copies
                ],
                aliases=self.aliases,
            )
            for s in shape.stages_on_rank[rank]
        }
        self.parameter_guard = ParameterGuard({s: stages[s] for s in self.stages})
        self.can_step = True  # else the optimizer is held back
        self.device = find_device(stages)
        self.snapshots = SnapshotCopies(self.device)
        self.copy_lanes, self.memory_tiers = (
            CopyLanes(self.device),
            memory_tiers or MemoryTiers(self.device, rank, (), None),
        )
        self.host_optimizer_state: HostOptimizerState | None = (
            None  # where the optimizer's lie elsewhere
        )
        if program.optimizer_placement != "device" and program.has_backward:
            trained = {s: stages[s].parameters() for s in self.stages if s >= program.frozen_stages}
            parameters = {
                s: [parameter_copies.get(p, p) for p in own] for s, own in trained.items()
            }
            require_stagewise_steps(program, parameters, optimizer)
            if optimizer is not None:
                self.host_optimizer_state = self._create_optimizer_state(
                    program, parameters, optimizer
                )
        self.random_streams = RandomStreams(seed, self.device)
        self.optimistic_step: OptimisticStep | None = None
        if program.norm_check == "after_step" and program.has_backward:
            own = self.stages.values()
            self.optimistic_step = OptimisticStep(
                [stage.gradients for stage in own], [stage.module for stage in own],
                optimizer, loss_scale, self.random_streams, self.device, debug,
            )  # fmt: skip
        self.is_in_step = False  # in a step, or one that has failed
        # Of the last update, its norm and what of it was finite.
        self.get_last_update_result: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.buffer_sizes: dict[Value, list[int]] = {}  # the bytes of each slot, by kind
        self.receive_buffers: dict[SlotKey, Tensor] = {}  # static memory of what is received
        # Static memory of sent values, also by the instructions that change their form.
        self.send_buffers: dict[tuple[Value, int, tuple[Opcode, ...]], Tensor] = {}

    def _create_optimizer_state(
        self, program: Program, parameters: Mapping[int, Sequence[Tensor]], optimizer: OptimizerLike
    ) -> HostOptimizerState:
        """Return what moves the optimizer's states as the program says.  Raises ModelError for an
        optimizer that cannot step one stage after the other."""
        names: dict[Tensor, str] = {
            p: f"{name} of stage {s}"
            for s, stage in self.stages.items()
            for p, name in stage.gradients.names.items()
        }
        given = parameters, optimizer, self.copy_lanes, self.device, names
        try:
            if program.optimizer_placement == "disk":
                return DiskOptimizerState(*given, self.memory_tiers)
            if program.optimizer_placement == "cpu_step":
                return CpuOptimizer(*given, self.stages, self.shard_spec.replica)
            return HostOptimizerState(*given)
        except ModelError as error:
            error.program = program.name
            raise

    def allocate_buffers(self, runs: Sequence[tuple[Program, BoundaryTable]]) -> None:
        """Make memory for the messages of programs, in which none is while another runs: for each
        slot that of the largest; all processes must call this."""
        for program, passing in runs:
            for kind, sizes in compute_buffer_sizes(program, self.rank, passing).items():
                both = zip_longest(self.buffer_sizes.get(kind, ()), sizes, fillvalue=0)
                self.buffer_sizes[kind] = [max(pair) for pair in both]
        received = {
            kind: self.buffer_sizes[kind] for op in RECV_OPS for kind in INSTRUCTIONS[op].gives
        }
        programs = [program for program, _ in runs]
        self.receive_buffers = self.transport.allocate_buffers(received, self.device, programs)

    def shard_parameters(self) -> None:
        """Keep of what replicas share no more than the own part: the end of what can be undone."""
        parts: dict[nn.Parameter, Tensor] = {}
        pieces: dict[nn.Parameter, tuple[torch.Size, int, int]] = {}
        for stage in self.stages.values():
            if (weights := stage.sharded_parameters) is not None:
                weights.shard_weights(parts)
                for bucket, own in zip(weights.buckets, weights.shards, strict=True):
                    parts |= dict.fromkeys(bucket.parameters[:1], own)
                    ranges = bucket.list_shard_ranges(self.shard_spec.replica)
                    for p, shape, (low, high, _) in zip(
                        bucket.parameters, bucket.shapes, ranges, strict=True
                    ):
                        pieces[p] = shape, low, high
        shard_optimizer_state(self.optimizer, pieces)


def compute_buffer_sizes(
    program: Program, rank: int, boundaries: BoundaryTable
) -> dict[Value, list[int]]:
    """The bytes of each slot that messages leave or come into, by kind: of the largest."""
    number = dict(zip(SLOT_KINDS, count_slots(program)[rank].tolist(), strict=True))
    rooms = {kind: [0] * number[kind] for kind in BOUNDARY_VALUES}
    for (kind, stage, mb), fills in assign_slots(program, rank).items():
        if kind in rooms and program.peer_stage(kind, stage) >= 0:
            size = boundaries[mb].get_value_tensors(kind, stage).nbytes
            for slot in fills.values():
                rooms[kind][slot] = max(rooms[kind][slot], size)
    return rooms


def find_device(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where a rank's stages are: where their parameters are.

    Raises ModelError if they are in several places.
    """
    found = {p.device for stage in stages.values() for p in stage.parameters()}
    if len(found) > 1:
        raise ModelError(
            f"the parameters of one rank are on {' and '.join(sorted(map(str, found)))}"
        )
    return next(iter(found), torch.device("cpu"))
