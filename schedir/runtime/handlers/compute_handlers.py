"""Handlers of Forward, Backward, BackwardInput and BackwardWeight.

See `handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from schedir.errors import ModelError, describe
from schedir.ir.isa.instructions import (
    BOUNDARY_VALUES,
    INSTRUCTIONS,
    RECOMPUTE,
    Instr,
    Opcode,
    Value,
)
from schedir.ir.pipeline.stage_segments import EXIT_COLLECTIVE
from schedir.runtime.arguments import require_loss_input, require_scalar_loss
from schedir.runtime.autograd.activation_checkpoint import Checkpoints
from schedir.runtime.autograd.random_streams import BACKWARD, BACKWARD_WEIGHT, FORWARD
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.splittable_layers import (
    describe_unsplit_layers,
    find_deferrable_weights,
    watch_accumulation,
)
from schedir.runtime.autograd.stage_context import bind_weight_version, wrap_stage_run
from schedir.runtime.handlers.transfer_handlers import make_message_wait, make_value_writer
from schedir.runtime.model_checks.memory_overlap import has_same_storage
from schedir.runtime.model_checks.parameter_guard import (
    require_stage_parameters,
    require_untrained,
)
from schedir.runtime.parameters.overlapped_reduction import BackwardRoot, GradientReduction
from schedir.runtime.program_state import Call, ProgramState, chain_calls
from schedir.runtime.services.loss_gradients import LossGradients
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.pending_sends import PendingSends
from schedir.runtime.services.stage_weight_versions import find_weight_versions
from schedir.runtime.stage_state import StageState
from schedir.runtime.step_inputs import require_input_tensors
from schedir.runtime.value_slots import Slot


def forward(state: ProgramState, i: Instr) -> Call:
    """Return the call of Forward: run a stage on a microbatch, and in the last stage the loss."""
    stage, mb, is_last_stage = state.stages[i.stage], i.mb, i.stage == state.shape.stages - 1
    input_slots = find_input_slots(state, i)
    write_outputs = _make_output_writer(state, i)
    stage_run = StageRun(state, i)
    trains = state.program.has_backward and i.stage >= state.program.frozen_stages
    versions = find_weight_versions(state, i.stage)
    saved_slot = state.find_slot(Value.SAVED, i.stage, mb, state.index_of[i]) if trains else None
    is_recomputed = Instr(RECOMPUTE, i.stage, mb) in state.index_of
    checkpoints = Checkpoints(state, i) if is_recomputed else None
    # A recomputation needs the inputs unchanged.
    is_exclusive = are_inputs_exclusive(input_slots) and not is_recomputed
    # Received inputs are copied if the next message may overwrite them, or if they are offloaded.
    is_offloaded = _is_offloaded(state, i)
    read_inputs = _make_input_reader(
        input_slots, Tensor.clone if state.program.shares_slots or is_offloaded else Tensor.detach
    )
    letter = state.program.segment_boundaries[i.stage : i.stage + 1]
    is_summed = letter == EXIT_COLLECTIVE and not state.program.sequence_parallel
    frees_weights = not stage.sharded_parameters.keeps_full_weights

    def run() -> None:
        xs = read_inputs() if input_slots else require_input_tensors(state.batch.inputs[mb], mb)
        value: object
        if checkpoints is not None:
            (ys, _), value = checkpoints.run_first_forward(partial(stage_run, xs, is_exclusive), xs)
        else:
            ys, xs = stage_run(xs, is_exclusive)
            value = stage_run.collect_saved(xs, ys)
        if is_last_stage:
            state.save_loss(mb, ys[0], xs)
        else:
            values = [*map(Tensor.detach, ys)]
            if is_summed and any(has_same_storage(values[0], x) for x in xs):
                values[0] = values[0].clone()  # the all-reduce is in place
            if frees_weights:
                values = [*stage.sharded_parameters.clone_if_in_weights(values)]
            write_outputs(values)
        if saved_slot is not None:
            if not stage.has_checked_parameters:
                stage.has_checked_parameters = True
                version_names = versions.names if versions is not None else ()
                require_stage_parameters(
                    ys, stage.module, version_names, i.stage, state.resources.optimizer
                )
            saved_slot.fill(value)
        for input_slot in input_slots:
            input_slot.slot.free()

    return Call(
        _make_input_wait(state, i, input_slots),
        wrap_stage_run(state, i, FORWARD, run if trains else torch.no_grad()(run)),
    )


class StageRun:
    """Runs the module of a local stage on the inputs of a microbatch.

    The handlers of Forward and Recompute use this class.

    Args:
        state: The state of the rank.
        i: A Forward or Recompute of the stage and the microbatch.
    """

    def __init__(self, state: ProgramState, i: Instr) -> None:
        forward_instr = i._replace(op=Opcode.Forward)
        stage = state.stages[i.stage]
        boundaries = state.boundaries[i.mb]
        frozen_stages = state.program.frozen_stages
        self.state = state
        self.stage = i.stage
        self.mb = i.mb
        self.module = stage.module
        self.input_adapter = stage.input_adapter
        self.num_skip_tensors = boundaries.count_skip_inputs(i.stage)
        are_local = [input_slot.is_local for input_slot in find_input_slots(state, forward_instr)]
        self.has_received_inputs = not all(are_local)
        self.is_offloaded = _is_offloaded(state, i)
        self.stage_state = stage
        self.is_last = i.stage == state.shape.stages - 1
        self.trains = state.program.has_backward and i.stage >= frozen_stages
        self.require_outputs = None if self.is_last else boundaries.make_output_validator(i.stage)
        requires_grad = [
            has_grad
            and i.stage >= frozen_stages
            and state.program.peer_stage(kind, i.stage) >= frozen_stages
            for kind in _select_boundary_kinds(
                state, forward_instr, INSTRUCTIONS[Opcode.Forward].needs
            )
            for has_grad in boundaries.get_value_tensors(kind, i.stage).requires_grad
        ]
        self.grad_input_indices = [
            k for k, has_grad in enumerate(requires_grad) if has_grad and state.program.has_backward
        ]

    def __call__(
        self, xs: Sequence[Tensor], is_exclusive: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the outputs of the stage, or the loss, and the leaves of the inputs.

        Args:
            xs: The inputs.
            is_exclusive: True if no other code reads the memory of the inputs, now or later.

        Returns:
            The outputs, or for the last stage only the loss. For each input, the leaf whose `grad`
            is its gradient.
        """
        batch, mb = self.state.batch, self.mb
        for k in self.grad_input_indices:
            xs[k].requires_grad_()
        keywords = batch.get_keywords(mb)
        # Give the module views of the leaves, because an offload frees the memory of leaves. In the
        # first step, `_finish_inputs` also frees this memory, after the backward.
        as_views = self.is_offloaded or (
            self.has_received_inputs and self.state.first_step_checks.is_active
        )
        y, xs = self.input_adapter.run(
            self.module,
            xs,
            keywords,
            is_exclusive=is_exclusive,
            as_views=as_views,
            skip_input_count=self.num_skip_tensors,
        )
        if self.require_outputs is not None:
            return self.require_outputs(y, self.stage), xs
        require_loss_input(y, self.stage)
        target = batch.targets[mb]
        try:
            loss = self.state.options.loss(y, target)
        except Exception as error:
            if not hasattr(error, "__notes__"):  # the loss of a `Schedule` adds such a note itself
                error.add_note(
                    f"in the loss: output is {describe(y)}, and target is {describe(target)}"
                )
            raise
        return (require_scalar_loss(loss),), xs

    def collect_saved(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> object:
        """Return the value for the slot of saved activations: leaves, and roots of the backward.

        Args:
            xs: The leaves of the inputs.
            ys: The outputs.
        """
        leaves = [xs[k] for k in self.grad_input_indices]
        roots = [*map(_get_backward_root, filter(_requires_grad, ys))]
        if self.trains and not self.stage_state.has_checked_gradient:
            self.stage_state.has_checked_gradient = True
            if not roots:
                require_untrained(self.module, self.stage, leaves, is_last=self.is_last)
        if self.state.first_step_checks.is_active:
            self.state.first_step_checks.note_gradients(self.stage, self.mb, leaves)
        return leaves, roots


class _InputSlot(NamedTuple):
    """An input of an instruction.

    Attributes:
        kind: The kind of value.
        slot: The slot that contains the value.
        is_local: True if another stage of this rank computes the value.
    """

    kind: Value
    slot: Slot
    is_local: bool


def are_inputs_exclusive(input_slots: Sequence[_InputSlot]) -> bool:
    """Return whether an instruction has inputs and all of them arrive in messages.

    If so, no other code reads these inputs.

    Args:
        input_slots: The inputs of the instruction.
    """
    return bool(input_slots) and not any(input_slot.is_local for input_slot in input_slots)


def _is_offloaded(state: ProgramState, i: Instr) -> bool:
    return Instr(Opcode.Offload, i.stage, i.mb) in state.index_of


def _select_boundary_kinds(state: ProgramState, i: Instr, kinds: Sequence[Value]) -> list[Value]:
    """Return the members of `kinds` that pass between the instruction's stage and another one."""
    return [
        kind
        for kind in kinds
        if kind in BOUNDARY_VALUES and state.program.peer_stage(kind, i.stage) >= 0
    ]


def find_input_slots(state: ProgramState, i: Instr) -> list[_InputSlot]:
    """Return the boundary inputs of an instruction.

    Either another stage of this rank or a received message fills the slot of an input.

    Args:
        state: The state of the rank.
        i: The instruction.
    """
    input_slots = []
    for kind in _select_boundary_kinds(state, i, INSTRUCTIONS[i.op].needs):
        peer_stage = state.program.peer_stage(kind, i.stage)
        is_local = state.find_local_stage(peer_stage, i.mb) is not None
        input_slots.append(_InputSlot(kind, state.find_slot(kind, i.stage, i.mb), is_local))
    return input_slots


def _make_input_reader(
    input_slots: Sequence[_InputSlot], copy_received: Callable[[Tensor], Tensor] | None
) -> Callable[[], Sequence[Tensor]]:
    """Return a function that returns the input tensors of an instruction.

    `copy_received` is applied to each received tensor. It is `Tensor.clone` if the next message may
    overwrite the memory. If `copy_received` is None, received tensors are returned unchanged.
    """

    def read_slot(input_slot: _InputSlot) -> Sequence[Tensor]:
        values: Sequence[Tensor] = input_slot.slot.peek()
        if input_slot.is_local or copy_received is None:
            return values
        return [*map(copy_received, values)]

    if len(input_slots) == 1:
        return partial(read_slot, input_slots[0])
    return lambda: [value for input_slot in input_slots for value in read_slot(input_slot)]


def _make_output_writer(state: ProgramState, i: Instr) -> Callable[[Sequence[Tensor]], None]:
    """Return a function that fills all output slots of an instruction with its outputs."""
    writers, end = [], 0
    for kind in _select_boundary_kinds(state, i, INSTRUCTIONS[i.op].gives):
        begin, end = end, end + len(state.boundaries[i.mb].get_value_tensors(kind, i.stage).tensors)
        writers.append((make_value_writer(state, i, kind), slice(begin, end)))

    if len(writers) == 1:
        return writers[0][0]

    def write_all(values: Sequence[Tensor]) -> None:
        for write, part in writers:
            write(values[part])

    return write_all


def _make_input_wait(
    state: ProgramState, i: Instr, input_slots: Sequence[_InputSlot]
) -> Callable[[], None] | None:
    """Return a function that waits for input messages, and for earlier sends from output slots."""
    waits = [make_message_wait(state, i, input_slot.kind) for input_slot in input_slots]
    sends = state.service(PendingSends)
    waits += [partial(sends.complete, k) for k in sends.before_reuse.get(state.index_of[i], ())]
    return chain_calls(*waits)


_requires_grad = attrgetter("requires_grad")


def _get_backward_root(y: Tensor) -> BackwardRoot:
    """Return the loss, or the gradient edge of another output.

    A gradient edge does not keep the memory of the output alive.
    """
    return y if not y.dim() else get_gradient_edge(y)


def backward(state: ProgramState, i: Instr, *, is_split: bool = False) -> Call:
    """Return the call of Backward, or of the autograd part of BackwardInput.

    Args:
        state: The state of the rank.
        i: The instruction.
        is_split: True for BackwardInput. Its deferred weight gradients keep the output gradients in
            memory.
    """
    mb, is_last_stage = i.mb, i.stage == state.shape.stages - 1
    input_slots = find_input_slots(state, i)
    write_outputs = _make_output_writer(state, i)
    loss_gradients = state.service(LossGradients)
    gives_gradients = bool(_select_boundary_kinds(state, i, INSTRUCTIONS[i.op].gives))
    saved_slot = state.find_slot(Value.SAVED, i.stage, mb, state.index_of[i])
    # Deferred weight gradients may need a received gradient after its slot gets another value.
    read_gradients = _make_input_reader(
        input_slots, Tensor.clone if is_split and state.program.shares_slots else None
    )
    forward_instr = i._replace(op=Opcode.Forward)
    forward_slots = find_input_slots(state, forward_instr)
    has_local_inputs = all(input_slot.is_local for input_slot in forward_slots)
    module, find_reduction = state.stages[i.stage].module, _make_reduction_finder(state, i)

    def run() -> None:
        xs, roots = saved_slot.peek()
        dys = (loss_gradients.compute(mb),) if is_last_stage else read_gradients()
        is_first_step = state.first_step_checks.is_active
        if is_first_step:
            # If a hook keeps one of these detached gradients, the memory of the gradient has one
            # more reference. `FirstStepChecks` counts the references.
            dys = [*map(Tensor.detach, dys)]
            if not state.first_step_checks.has_gradients_of_forward(i.stage, mb, xs):
                raise _other_microbatch_error()
        reduction = find_reduction()
        with nullcontext() if reduction is None else reduction.overlap_backward(module, roots):
            # Without roots, the stage has no trained parameters, and no input requires a gradient.
            if roots:
                torch.autograd.backward(roots, dys)
        if gives_gradients:
            write_outputs(_take_input_gradients(xs, dys, i.stage))
        if is_first_step:
            _finish_inputs(xs, has_local_inputs)
        saved_slot.free()
        for input_slot in input_slots:
            input_slot.slot.free()

    return Call(_make_input_wait(state, i, input_slots), wrap_stage_run(state, i, BACKWARD, run))


def _finish_inputs(xs: Sequence[Tensor], is_local: bool) -> None:
    """Refuse further gradients of a stage's inputs, and free the memory of received inputs.

    A module may keep a reference to the graph, for example through an output, and the graph has
    references to the leaves. `FirstStepChecks` counts the references to receive buffers. It does
    not count a leaf whose memory is freed.
    """
    for x in xs:
        x.register_post_accumulate_grad_hook(_refuse_gradient)
        if not is_local:
            x.data = x.detach().new_empty(0)


def _refuse_gradient(_: Tensor) -> None:
    raise _other_microbatch_error()


def _other_microbatch_error() -> ModelError:
    return ModelError(
        "a forward computes with an input that its stage kept from another microbatch: the "
        "gradient of that input would be lost",
        hint="keep a detached copy: self.last = x.detach().clone()",
    )


def _take_input_gradients(
    xs: Sequence[Tensor], dys: Sequence[Tensor], stage: int
) -> Sequence[Tensor]:
    """Return the gradients of a stage's inputs, and clear them. Unused inputs get zeros.

    The function raises ModelError if the output depends on none of the inputs.
    """
    dxs: list[Tensor] = []
    unused_count = 0
    for x in xs:
        dx, x.grad = x.grad, None
        if dx is None:
            dx, unused_count = torch.zeros_like(x), unused_count + 1
        for dy in dys:
            if has_same_storage(dx, dy):
                dx = dx.clone()  # autograd may return dy itself
        dxs.append(dx)
    if unused_count == len(xs):
        inputs = (
            "its input"
            if unused_count == 1
            else f"any of its {unused_count} inputs with a gradient"
        )
        raise ModelError(f"the output of stage {stage} does not depend on {inputs}")
    return dxs


def backward_input(state: ProgramState, i: Instr) -> Call:
    """Return the call of BackwardInput: compute input gradients, and defer weight gradients."""
    stage = state.stages[i.stage]
    deferred_slot = state.find_slot(Value.DEFERRED_WGRAD, i.stage, i.mb)
    wait, run_backward = backward(state, i, is_split=True)

    def run() -> None:
        deferred_gradients = DeferredGradients()
        deferred_slot.fill(deferred_gradients)
        no_watch: AbstractContextManager[set[str]] = nullcontext(set())
        with (
            defer_weight_gradients(deferred_gradients),
            no_watch
            if stage.has_checked_layers
            else watch_accumulation(stage.module) as accumulated_weights,
        ):
            run_backward()
        deferrable_weights = (
            set() if len(deferred_gradients) else find_deferrable_weights(stage.module)
        )
        if deferrable_weights & accumulated_weights:
            raise ModelError(
                f"{_describe_stage(stage, i)} has splittable layers, but its instruction I ran "
                "the full backward",
                hint="do not run the stage under torch.compile, and use the weights in their own "
                "layers, not copies of them",
            )
        # A later microbatch may use deferrable weights that this microbatch did not use.
        stage.has_checked_layers = not deferrable_weights
        if not stage.has_warned_of_layers and not deferrable_weights:
            stage.has_warned_of_layers = True
            # A segment of a stage may have no splittable layers, which is no reason for a warning.
            is_split = len(deferred_gradients) > 0 or bool(state.program.segment_boundaries)
            unsplit_layers = describe_unsplit_layers(stage.module, accumulated_weights, is_split)
            if unsplit_layers:
                warnings.warn(
                    f"the backward of {_describe_stage(stage, i)} is not split in {unsplit_layers}",
                    stacklevel=2,
                )

    return Call(wait, bind_weight_version(state, i, run))


def _describe_stage(stage: StageState, i: Instr) -> str:
    return f"{type(stage.module).__name__} (stage {i.stage})"


def backward_weight(state: ProgramState, i: Instr) -> Call:
    """Return the call of BackwardWeight: compute the deferred weight gradients."""
    deferred_slot = state.find_slot(Value.DEFERRED_WGRAD, i.stage, i.mb)
    find_reduction = _make_reduction_finder(state, i)

    def run() -> None:
        deferred_gradients = deferred_slot.peek()
        reduction = find_reduction()
        if reduction is None:
            deferred_gradients.run()
        else:
            reduction.overlap_deferred_wgrad(deferred_gradients)
        deferred_slot.free()

    return Call(None, wrap_stage_run(state, i, BACKWARD_WEIGHT, run))


def _make_reduction_finder(state: ProgramState, i: Instr) -> Callable[[], GradientReduction | None]:
    """Return a function that returns the reduction that overlaps with `i`, or None."""
    reductions = state.service(PendingReductions)
    if (reduction := reductions.overlapped.get(i)) is None:
        return lambda: None
    return lambda: (
        None if reductions.starts_after_backward else reductions.by_instruction[reduction]
    )


HANDLERS: Final = {
    Opcode.Forward: forward,
    Opcode.Backward: backward,
    Opcode.BackwardInput: backward_input,
    Opcode.BackwardWeight: backward_weight,
}
