"""Find the instruction that first produced inf or NaN.

A step skips an update if gradients are not finite. By then, the step has freed its intermediate
values. To find the origin, the step runs again with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.errors import InstructionSite, NonFiniteError
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    FORWARD_OPS,
    INSTRUCTIONS,
    Instr,
    Opcode,
    Value,
    find_producers,
)
from schedir.ir.program import Program
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.step_skipping import are_finite
from schedir.runtime.program_state import Call
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.step_inputs import Keywords, Microbatches
from schedir.transports.json_collectives import gather
from schedir.transports.process_transport import ProcessTransport

# The opcodes that produce the gradient of an update from the gradients of its microbatches.
_REDUCTION_OPS = find_producers(Value.GRAD)


def find_origin(
    executor: Executor,
    transport: ProcessTransport,
    residue: Iterable[Instr],
    inputs: Microbatches,
    targets: Microbatches,
    scale: float | Tensor,
    keywords: Keywords = (),
) -> NanOrigin | None:
    """Find the instruction that first produced inf or NaN in the last step.

    All processes must call this function, and get the same result. They run the step again. Without
    a seed, the new run draws other random numbers and may be finite. The result then comes from
    `residue`.

    Args:
        executor: The executor, after the step.
        transport: The transport of the executor.
        residue: The local instructions whose results were not finite in the first run, from
            `StepResidue.find_nonfinite`.
        inputs: The inputs of the step.
        targets: The targets of the step.
        scale: The `grad_scale` of the step.
        keywords: The keyword arguments of the step.

    Returns:
        The origin, or None if no rank found one.
    """
    process_ids = dist.get_rank(), transport.dp_rank
    local_residue = [
        NanOrigin(*process_ids, executor.rank, executor.state.index_of[i], i) for i in residue
    ]
    local_rerun = rerun_step(executor, *process_ids, inputs, targets, scale, keywords)
    local_origins = local_residue, local_rerun
    gathered = gather(local_origins, record_types=[NanOrigin, Instr, Opcode])
    residue_origins, rerun_origins = ([*chain(*lists)] for lists in zip(*gathered, strict=True))
    last_stage = executor.state.shape.stages - 1
    return find_earliest(rerun_origins, last_stage) or find_earliest(residue_origins, last_stage)


class NanOrigin(NamedTuple):
    """An instruction of a rank whose output, loss or gradient is not finite.

    Args:
        process: The index of the process, from 0.
        replica: The data-parallel replica.
        rank: The pipeline rank.
        stream_index: The index of the instruction in the stream of the rank.
        instr: The instruction.
    """

    process: int
    replica: int
    rank: int
    stream_index: int
    instr: Instr

    @property
    def is_forward(self) -> bool:
        """True if the output of a forward, or a loss, is not finite."""
        return self.instr.op in FORWARD_OPS

    @property
    def sort_key(self) -> tuple[int, ...]:
        """A key that sorts origins by microbatch, and then by data flow. Reductions come last."""
        op, stage, mb = self.instr
        if op not in COMPUTE_OPS:  # a reduction, whose `mb` is the index of the update
            return 1, 0, 0, -stage, self.process
        return 0, mb, not self.is_forward, stage if self.is_forward else -stage, self.process


def find_earliest(origins: Iterable[NanOrigin], last_stage: int) -> NanOrigin | None:
    """Return the earliest origin that any rank found, or None if there are no origins.

    A forward is an origin only if the loss of its microbatch is not finite, too. Otherwise an
    infinite output, such as a mask, is intended.

    Args:
        origins: The origins of all ranks.
        last_stage: The number of the last stage.
    """
    origins = [*origins]
    nonfinite_losses = {
        (origin.replica, origin.instr.mb)
        for origin in origins
        if origin.is_forward and origin.instr.stage == last_stage
    }
    return min(
        (
            origin
            for origin in origins
            if not origin.is_forward or (origin.replica, origin.instr.mb) in nonfinite_losses
        ),
        key=lambda origin: origin.sort_key,
        default=None,
    )


def make_nonfinite_error(origin: NanOrigin | None, program: Program, step: int) -> NonFiniteError:
    """Return the error for a step with an infinite or NaN loss or gradient.

    Args:
        origin: The instruction that first produced inf or NaN, or None if it is unknown.
        program: The program.
        step: The number of the step, from 1.
    """
    subject = "the loss" if origin and origin.is_forward else "a gradient"
    outcome = (
        "was skipped" if program.clip_grad_norm else "was made only on ranks with finite gradients"
    )
    sites = []
    if origin is not None:
        note = f"has the first such value, in replica {origin.replica}"
        note = note if program.dp > 1 else note.partition(",")[0]
        sites.append(InstructionSite(origin.rank, origin.stream_index, origin.instr, note))
    return NonFiniteError(
        f"{subject} of step {step} is infinite or NaN; the update {outcome}",
        program=program.name,
        sites=sites,
        hint='[train] on_nonfinite = "skip" skips such updates' * program.clip_grad_norm,
        step=step,
        process=origin.process if origin else 0,
    )


class StepResidue:
    """The losses of a step and the gradients of its last update, which remain after the step.

    `check_finite` checks these values on the device, and the host does not wait. When the host has
    read the result, `find_nonfinite` returns the instructions that produced non-finite values.

    Args:
        executor: The executor of the rank.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, state = executor, executor.state
        shape = state.shape
        update = shape.optimizer_steps - 1
        self.trained_stages = {
            s: stage
            for s, stage in executor.stages.items()
            if any(flat.numel() for flat in stage.gradients.reduced_flat)
        }
        self.instructions = [
            [i for i in state.stream if i.op in _REDUCTION_OPS and i[1:] == (s, update)]
            for s in self.trained_stages
        ]
        if shape.stages - 1 in executor.stages:
            self.instructions += [
                [Instr(FORWARD_OPS[0], shape.stages - 1, mb)] for mb in range(shape.microbatches)
            ]

    def __len__(self) -> int:
        return len(self.instructions)

    def check_finite(self) -> Tensor:
        """Return whether each value is finite, as a bool tensor on the rank's device.

        The gradients of the local trained stages come first. On a rank with the last stage, the
        losses of all microbatches follow.
        """
        state = self.executor.state
        finite_flags = [
            are_finite(stage.gradients.reduced_flat) for stage in self.trained_stages.values()
        ]
        if len(finite_flags) < len(self):
            finite_flags += torch.stack(state.losses).isfinite().unbind()
        if not finite_flags:
            return torch.zeros(0, dtype=torch.bool, device=state.device)
        return torch.stack(finite_flags)

    def find_nonfinite(self, finite: Sequence[float]) -> list[Instr]:
        """Return the instructions that produced non-finite values.

        Args:
            finite: The result of `check_finite`, read by the host.
        """
        return [
            i
            for instructions, is_finite in zip(self.instructions, finite, strict=True)
            if not is_finite
            for i in instructions
        ]


def rerun_step(
    executor: Executor,
    process: int,
    replica: int,
    inputs: Microbatches,
    targets: Microbatches,
    scale: float | Tensor,
    keywords: Keywords = (),
) -> list[NanOrigin]:
    """Run the last step again without its updates, and check all computed results.

    All ranks must call this function. For the gradients of a stage, the result has only the first
    instruction that makes them non-finite, because later instructions add to the same sum.

    Args:
        executor: The executor.
        process: The index of this process, for the result.
        replica: The data-parallel replica, for the result.
        inputs: The inputs of the step.
        targets: The targets of the step.
        scale: The `grad_scale` of the step.
        keywords: The keyword arguments of the step.

    Returns:
        The local instructions with results that are not finite, in execution order.
    """
    origins: list[NanOrigin] = []
    reductions = executor.state.service(PendingReductions)

    def watch(k: int, i: Instr, call: Call) -> Call:
        def run() -> None:
            call.run()
            has_origin = any(
                origin.instr.stage == i.stage and not origin.is_forward for origin in origins
            )
            if not (has_origin and i.op not in FORWARD_OPS) and not are_finite(list_outputs()):
                origins.append(NanOrigin(process, replica, executor.rank, k, i))

        list_outputs = partial(_list_outputs, executor, i)
        return Call(call.wait, run) if i.op in COMPUTE_OPS else call

    with PreservedState() as preserved:
        preserved.add_fields(executor.runner, "calls", "record_timestamps")
        preserved.add_fields(executor.resources, "optimizer")
        preserved.add_fields(reductions, "starts_after_backward")
        executor.runner.calls = [
            watch(k, i, executor.runner.calls[k]) for k, i in enumerate(executor.state.stream)
        ]
        executor.resources.optimizer = None
        executor.record_timestamps = False
        # An overlapped sum over replicas would bring the NaN of another replica to this rank.
        reductions.starts_after_backward = True
        executor.random_streams.step -= 1  # draw the same random numbers
        executor.step(inputs, targets, scale, keywords)
    return origins


def _list_outputs(executor: Executor, i: Instr) -> list[Tensor]:
    """Return the results of a compute instruction: its output, loss or gradients."""
    if i.op in FORWARD_OPS and i.stage == executor.state.shape.stages - 1:
        return [executor.state.losses[i.mb]]
    outputs = [] if i.op in FORWARD_OPS else [*executor.stages[i.stage].gradients.flat]
    for kind in (Value.ACT_OUT, Value.GRAD_OUT):
        if kind in INSTRUCTIONS[i.op].gives and (i.stage or kind is Value.ACT_OUT):
            outputs += executor.state.get_outgoing_tensors(kind, i.stage, i.mb)
    return [x for x in outputs if x.is_floating_point() or x.is_complex()]
