"""Find the instruction that first gave inf or NaN.

The device alone decides that an update is not made (`mixed_precision.step_if`).  Who wants to know
where it went wrong runs the step again: its weights are still there, and what it ran has been let
go.
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
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.mixed_precision import are_finite
from schedir.runtime.rank_state import Call
from schedir.runtime.step_inputs import Keywords, Microbatches
from schedir.transports.gloo import ProcessTransport
from schedir.transports.json_collectives import gather

_REDUCTION_OPS = find_producers(
    Value.GRAD
)  # what makes an update's gradient of those of its microbatches


def find_origin(
    executor: Executor,
    transport: ProcessTransport,
    residue: Iterable[Instr],
    inputs: Microbatches,
    targets: Microbatches,
    scale: float | Tensor,
    keywords: Keywords = (),
) -> NanOrigin | None:
    """Where the step before `draws.step`, which was not finite, went wrong; None if nobody saw it.

    The step is run again; what cannot be seen so, as nobody can draw its numbers again, is told
    from what it `residue`, as `StepResidue.spoilt` says.  All processes must call this, and come to
    the same.
    """
    who = dist.get_rank(), transport.dp_rank
    before = [NanOrigin(*who, executor.rank, executor.state.index_of[i], i) for i in residue]
    known = before, rerun_step(executor, *who, inputs, targets, scale, keywords)
    everyone = gather(known, record_types=[NanOrigin, Instr, Opcode])
    before, again = ([*chain(*each)] for each in zip(*everyone, strict=True))
    last = executor.state.shape.stages - 1
    return find_earliest(again, last) or find_earliest(before, last)


class NanOrigin(NamedTuple):
    """An instruction of a rank that gives what is not finite, or leaves it in a gradient."""

    process: int
    replica: int
    rank: int
    stream_index: int
    instr: Instr

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward's output, or a loss."""
        return self.instr.op in FORWARD_OPS

    @property
    def sort_key(self) -> tuple[int, ...]:
        """What was earlier is less: the first stage of a forward, the last of a backward."""
        op, stage, mb = self.instr
        if op not in COMPUTE_OPS:  # of an update, whichever microbatch it was
            return 1, 0, 0, -stage, self.process
        return 0, mb, not self.is_forward, stage if self.is_forward else -stage, self.process


def find_earliest(origins: Iterable[NanOrigin], last_stage: int) -> NanOrigin | None:
    """Where it began, of all that all ranks have found; `last_stage` is the last stage.

    An output may be infinite, as that of a mask, where the loss of its microbatch is finite.
    """
    origins = [*origins]
    lost = {
        (f.replica, f.instr.mb) for f in origins if f.is_forward and f.instr.stage == last_stage
    }
    return min(
        (f for f in origins if not f.is_forward or (f.replica, f.instr.mb) in lost),
        key=lambda f: f.sort_key,
        default=None,
    )


def make_nonfinite_error(origin: NanOrigin | None, program: Program, step: int) -> NonFiniteError:
    """The error of a step (from 1) that was not finite, and began where `origin` says."""
    what = "the loss" if origin and origin.is_forward else "a gradient"
    taken = (
        "was not made"
        if program.clip_grad_norm
        else "was made where a rank's own gradients are finite"
    )
    sites = []
    if origin is not None:
        note = f"is where it began, in replica {origin.replica}"
        note = note if program.dp > 1 else note.partition(",")[0]
        sites.append(InstructionSite(origin.rank, origin.stream_index, origin.instr, note))
    return NonFiniteError(
        f"{what} of step {step} is infinite or NaN; the update {taken}",
        program=program.name,
        sites=sites,
        hint='train.on_nonfinite = "skip" goes on without such updates' * program.clip_grad_norm,
        step=step,
        process=origin.process if origin else 0,
    )


class StepResidue:
    """What a step leaves to look at: losses, and the gradients of its last update.

    `check_finite` says what of it is, without the host; who has read that asks for the instructions
    that gave what is not.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, state = executor, executor.state
        shape = state.shape
        update = shape.optimizer_steps - 1
        self.trained_stages = {
            s: stage
            for s, stage in executor.stages.items()
            if any(kept.numel() for kept in stage.gradients.reduced_flat)
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
        """Of gradients by stage, then of losses by microbatch: bool, on the rank's device."""
        state = self.executor.state
        each = [are_finite(stage.gradients.reduced_flat) for stage in self.trained_stages.values()]
        if len(each) < len(self):
            each += torch.stack(state.losses).isfinite().unbind()
        return torch.stack(each) if each else state.finite_updates[:0]

    def find_nonfinite(self, finite: Sequence[float]) -> list[Instr]:
        """The instructions that gave what is not finite, as `finite` said."""
        return [
            i for of, sound in zip(self.instructions, finite, strict=True) if not sound for i in of
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
    """Run a step without its updates, and look at what each instruction gives.

    All ranks must call this.  Of a stage's gradients the first instruction is told that spoils
    them: what comes after adds to the same sum.
    """
    found: list[NanOrigin] = []
    usual = (
        executor.calls,
        executor.state.optimizer,
        executor.record_timestamps,
        executor.state.reduce_after_backward,
    )

    def watch(k: int, i: Instr, call: Call) -> Call:
        def run() -> None:
            call.run()
            known = any(f.instr.stage == i.stage and not f.is_forward for f in found)
            if not (known and i.op not in FORWARD_OPS) and not are_finite(gives()):
                found.append(NanOrigin(process, replica, executor.rank, k, i))

        gives = partial(_list_outputs, executor, i)
        return Call(call.wait, run) if i.op in COMPUTE_OPS else call

    executor.calls = [watch(k, i, executor.calls[k]) for k, i in enumerate(executor.state.stream)]
    executor.state.optimizer, executor.record_timestamps = None, False
    executor.state.reduce_after_backward = (
        True  # a sum over replicas would be looked at for a rank's own
    )
    executor.random_streams.step -= 1  # the same random numbers
    try:
        executor.step(inputs, targets, scale, keywords)
    finally:
        (
            executor.calls,
            executor.state.optimizer,
            executor.record_timestamps,
            executor.state.reduce_after_backward,
        ) = usual
    return found


def _list_outputs(executor: Executor, i: Instr) -> list[Tensor]:
    """What a compute has just given: its output, or the sums of gradients and what it passes on."""
    if i.op in FORWARD_OPS and i.stage == executor.state.shape.stages - 1:
        return [executor.state.losses[i.mb]]
    given = [] if i.op in FORWARD_OPS else [*executor.stages[i.stage].gradients.flat]
    for kind in (Value.ACT_OUT, Value.GRAD_OUT):
        if kind in INSTRUCTIONS[i.op].gives and (i.stage or kind is Value.ACT_OUT):
            given += executor.state.get_outgoing_tensors(kind, i.stage, i.mb)
    return [x for x in given if x.is_floating_point() or x.is_complex()]
