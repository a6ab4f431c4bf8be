"""RankResources: stages, gradients, optimizer and memory of a rank, for all its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from schedir.analysis.memory.buffer_slots import SLOT_KINDS, assign_slots, count_slots
from schedir.errors import ModelError
from schedir.ir.isa.instructions import BOUNDARY_VALUES, INSTRUCTIONS, RECV_OPS, Opcode, Value
from schedir.ir.program import Program
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.boundaries.boundary_table import BoundaryTable
from schedir.runtime.model_checks.parameter_guard import ParameterGuard
from schedir.runtime.parameters import overlapped_reduction
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.tied_parameters import (
    TiedWeight,
    has_separate_copies,
    make_substitutes,
)
from schedir.runtime.services.service import Service, find_or_create
from schedir.runtime.stage_state import StageState
from schedir.transports.transport import SlotKey, Transport

Loss = Callable[[Any, Any], Tensor]  # Its arguments: the output of the last stage, and a target.


_Kind = TypeVar("_Kind", bound="RankService")


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
        spill_dir: The directory for values that programs move to the disk, or None.

    Raises:
        ModelError: The parameters are on several devices.
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
        spill_dir: Path | None = None,
    ) -> None:
        self.program, self.debug = program, debug
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
        self.device = find_device(stages)
        self.spill_dir = spill_dir
        self.random_streams = RandomStreams(seed, self.device)
        self.services: dict[type[Service], Service] = {}
        self.is_in_step = False  # Also True after a step that failed.
        self.buffer_sizes: dict[Value, list[int]] = {}  # Bytes of each slot, by kind.
        self.receive_buffers: dict[SlotKey, Tensor] = {}  # Static memory of received values.
        # Static memory of sent values, by kind, slot, and the instructions that changed their form.
        self.send_buffers: dict[tuple[Value, int, tuple[Opcode, ...]], Tensor] = {}

    def service(self, kind: type[_Kind]) -> _Kind:
        """Return the rank's service of a kind, which the first call creates.

        Args:
            kind: The class of the service.
        """
        return find_or_create(self.services, kind, self)

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


class RankService(Service):
    """The state of a feature that all programs of a rank share.

    Args:
        resources: The resources of the rank.
    """

    def __init__(self, resources: RankResources) -> None:
        self.resources = resources

    @classmethod
    def create(cls, owner: RankResources) -> Self:
        """Create the service of a rank.

        Args:
            owner: The resources of the rank.
        """
        return cls(owner)


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
