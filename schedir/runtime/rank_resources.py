"""RankResources: stages, gradients, optimizer and memory of a rank, for all its programs."""

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

Loss = Callable[[Any, Any], Tensor]  # Its arguments: the output of the last stage, and a target.


class RankResources:
    """The stages of a rank with their gradients, its optimizer, random streams and transport.

    All programs of the rank share these. The values and messages of a step are in the `State` of
    the program that runs.

    Args:
        program: The first program. Its attributes determine sharding, frozen stages and offload.
        rank: The pipeline rank.
        stages: The modules of the local stages, by number.
        transport: The transport of the rank.
        loss: The loss function or module.
        optimizer: The optimizer of the local parameters, or None.
        max_norm: The largest global norm of the gradients.
        loss_scale: The loss scale, or None.
        seed: The seed of the random streams, or None.
        tied_weights: The tied weights with copies on this rank.
        parameter_copies: The Parameter with which this rank computes, by each Parameter that
            virtual ranks of the process share.
        other_rank_stages: The stages of other ranks, if they are in this process.
        accumulate_grads: Add to the existing gradients, as autograd does.
        debug: Allow checks for which the host reads results from a GPU.
        memory_tiers: The host and disk memory of the rank. By default there is no disk memory.

    Raises:
        ModelError: The parameters are on several devices, or the optimizer cannot step one stage
            at a time although the program offloads its state.
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
        self.debug = debug
        self.accumulate_grads = accumulate_grads
        self.rank, self.transport, self.loss = rank, transport, loss
        self.optimizer, self.max_norm, self.loss_scale = optimizer, max_norm, loss_scale
        self.tied_weights, self.parameter_copies, shape = (
            tied_weights,
            parameter_copies,
            program.shape,
        )
        self.other_rank_stages = other_rank_stages
        substitutes, self.aliases = make_substitutes(tied_weights, parameter_copies)
        self.has_separate_copies = any(
            has_separate_copies(weight, shape) for weight in tied_weights
        )
        self.shard_spec = ShardSpec(program.dp, transport.dp_rank, program.zero)
        self.stages = {
            s: StageState(
                stages[s],
                substitutes.get(s, {}),
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
        self.can_step = True  # False in warm-up steps in which the optimizer must not step.
        self.device = find_device(stages)
        self.snapshots = SnapshotCopies(self.device)
        self.copy_lanes, self.memory_tiers = (
            CopyLanes(self.device),
            memory_tiers or MemoryTiers(self.device, rank, (), None),
        )
        # The offloaded optimizer state, if the program offloads it.
        self.host_optimizer_state: HostOptimizerState | None = None
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
        self.is_in_step = False  # Also True after a step that failed.
        # Returns the gradient norm and the finite updates of the last step.
        self.get_last_update_result: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.buffer_sizes: dict[Value, list[int]] = {}  # Bytes of each slot, by kind.
        self.receive_buffers: dict[SlotKey, Tensor] = {}  # Static memory of received values.
        # Static memory of sent values, by kind, slot, and the instructions that changed their form.
        self.send_buffers: dict[tuple[Value, int, tuple[Opcode, ...]], Tensor] = {}

    def _create_optimizer_state(
        self, program: Program, parameters: Mapping[int, Sequence[Tensor]], optimizer: OptimizerLike
    ) -> HostOptimizerState:
        """Return the object that moves or steps the optimizer state off the device."""
        names: dict[Tensor, str] = {
            p: f"{name} of stage {s}"
            for s, stage in self.stages.items()
            for p, name in stage.gradients.names.items()
        }
        given = parameters, optimizer, self.copy_lanes, self.device, names
        try:
            # A rank whose stages are all frozen has no file, because it has no optimizer state.
            if program.optimizer_placement == "disk" and self.memory_tiers.spill_file is not None:
                return DiskOptimizerState(*given, self.memory_tiers)
            if program.optimizer_placement == "cpu_step":
                return CpuOptimizer(*given, self.stages, self.shard_spec.replica)
            return HostOptimizerState(*given)
        except ModelError as error:
            error.program = program.name
            raise

    def allocate_buffers(self, runs: Sequence[tuple[Program, BoundaryTable]]) -> None:
        """Allocate the message buffers, which all programs of the rank share.

        A buffer has the size of the largest message of its slot in all programs. Only one program
        runs at a time. All processes must call this.

        Args:
            runs: Each program with its boundaries.
        """
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
        """Shard the parameters and the optimizer state over the replicas (ZeRO).

        Call this last in the construction of an executor, because it cannot be undone.
        """
        alias_shards: dict[nn.Parameter, Tensor] = {}
        shard_ranges: dict[nn.Parameter, tuple[torch.Size, int, int]] = {}
        for stage in self.stages.values():
            if (weights := stage.sharded_parameters) is not None:
                weights.shard_weights(alias_shards)
                for bucket, shard in zip(weights.buckets, weights.shards, strict=True):
                    alias_shards |= dict.fromkeys(bucket.parameters[:1], shard)
                    ranges = bucket.list_shard_ranges(self.shard_spec.replica)
                    for p, shape, (low, high, _) in zip(
                        bucket.parameters, bucket.shapes, ranges, strict=True
                    ):
                        shard_ranges[p] = shape, low, high
        shard_optimizer_state(self.optimizer, shard_ranges)


def compute_buffer_sizes(
    program: Program, rank: int, boundaries: BoundaryTable
) -> dict[Value, list[int]]:
    """Return the bytes of the message buffer of each slot, by kind of value.

    A buffer has the size of the largest value that is sent from the slot or received into it. It is
    0 for a slot whose values stay on the rank.

    Args:
        program: The program.
        rank: The pipeline rank.
        boundaries: The tensors that pass between stages.
    """
    slot_counts = dict(zip(SLOT_KINDS, count_slots(program)[rank].tolist(), strict=True))
    sizes = {kind: [0] * slot_counts[kind] for kind in BOUNDARY_VALUES}
    for (kind, stage, mb), fills in assign_slots(program, rank).items():
        if kind in sizes and program.peer_stage(kind, stage) >= 0:
            size = boundaries[mb].get_value_tensors(kind, stage).nbytes
            for slot in fills.values():
                sizes[kind][slot] = max(sizes[kind][slot], size)
    return sizes


def find_device(stages: Mapping[int, nn.Module]) -> torch.device:
    """Return the device of the parameters of a rank's stages, or the CPU if there are none.

    Args:
        stages: The local stages by number.

    Raises:
        ModelError: The parameters are on several devices.
    """
    devices = {p.device for stage in stages.values() for p in stage.parameters()}
    if len(devices) > 1:
        raise ModelError(
            "the parameters of a rank must be on one device, not on "
            f"{' and '.join(sorted(map(str, devices)))}"
        )
    return next(iter(devices), torch.device("cpu"))
