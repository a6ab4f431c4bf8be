"""Run one step inside Megatron, with a handler for each opcode.

Megatron's own `forward_step` and `backward_step` run the forwards and backwards. The program
decides their order, the messages, and when the gradients of a chunk are reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.distributed import Work
from torch.profiler import record_function

from schedir.io.profiler_range_names import format_range_name
from schedir.ir.isa.instructions import INSTRUCTIONS, Instr, Lane, Opcode
from schedir.ir.program import Program
from schedir.megatron.delayed_weight_gradients import DelayedModules
from schedir.megatron.pipeline_transport import PipelineGroupTransport
from schedir.megatron.weight_gradients import WeightGradients, defer_weight_gradients

StageMicrobatch = tuple[int, int]


@dataclass
class MegatronCall:
    """The arguments of a call of Megatron's `forward_backward_func` that a step uses.

    Args:
        forward_step_func: The user's function of a data iterator and a model chunk.
        data_iterators: A data iterator for each chunk.
        chunks: The model chunks of this rank.
        config: Megatron's TransformerConfig of the chunks.
        num_microbatches: The number of microbatches.
        forward_only: True to run forwards only, for evaluation.
        collect_non_loss_data: True to return the outputs of the loss function unchanged.
        first_val_step: True for the first validation step after training steps.
        boundary_shape: The shape of an activation between stages. None with
            `variable_seq_lengths`, where each activation is sent with its shape.
        context_parallel_size: The size of the context-parallel group.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    chunks: list[Any]
    config: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    boundary_shape: tuple[int, ...] | None
    context_parallel_size: int


@dataclass
class _PendingReceive:
    """A receive that was started, and its buffer."""

    work: Work
    buffer: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.buffer


@dataclass
class MegatronStep:
    """Runs a step on one pipeline rank, and stores the values that its instructions exchange.

    Args:
        program: The program.
        rank: The pipeline rank.
        transport: The transport of the boundary tensors.
        call: The arguments of the call of `forward_backward_func` that runs the step.
        delayed_modules: The modules that delay their weight gradients.
        reduce_chunk: A function that starts the reduction of the gradients of a chunk.
        as_stage: A function of a stage. It returns the context in which the stage must run. In a
            vee, Megatron's functions for the pipeline rank return another rank in this context (see
            `vee_model`).
    """

    program: Program
    rank: int
    transport: PipelineGroupTransport
    call: MegatronCall
    delayed_modules: DelayedModules
    reduce_chunk: Callable[[int], None]
    as_stage: Callable[[int], AbstractContextManager[object]] = nullcontext
    forward_data: list[Any] = field(default_factory=list)
    num_tokens: Tensor = field(init=False)
    # The fields from `inputs` to `weight_gradients` have the keys (stage, microbatch). The keys of
    # `receives` also contain the lane.
    inputs: dict[StageMicrobatch, Tensor | None] = field(default_factory=dict)
    outputs: dict[StageMicrobatch, Tensor] = field(default_factory=dict)
    activations: dict[StageMicrobatch, Tensor] = field(default_factory=dict)
    gradients: dict[StageMicrobatch, Tensor | None] = field(default_factory=dict)
    weight_gradients: dict[StageMicrobatch, WeightGradients] = field(default_factory=dict)
    # The shapes of the outputs that are sent, with `variable_seq_lengths`.
    output_shapes: dict[StageMicrobatch, tuple[int, ...]] = field(default_factory=dict)
    receives: dict[tuple[Lane, int, int], _PendingReceive] = field(default_factory=dict)
    sends: deque[tuple[Work, Tensor]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.device = self.transport.device
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self.device)
        stages = self.program.shape.stages_on_rank[self.rank]
        self.chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
        self.last_stage = self.program.shape.stages - 1
        self.is_profiled = torch.autograd.profiler._is_profiler_enabled

    def run(self) -> None:
        """Run the instructions of the rank, and wait for its sends."""
        for instr in self.program.streams[self.rank]:
            with self.open_range(instr):
                HANDLERS[instr.op](self, instr)
        while self.sends:
            self.sends.popleft()[0].wait()

    def open_range(self, instr: Instr) -> AbstractContextManager[object]:
        """Return the profiler range of an instruction, or an empty context without a profiler.

        Reductions and optimizer steps have no range here, because Megatron ends reductions, and
        runs optimizer steps, after the program.
        """
        if not self.is_profiled or instr.op in (Opcode.ReduceGrads, Opcode.OptimizerStep):
            return nullcontext()
        return record_function(format_range_name(instr))

    def open_reduction_ranges(self) -> AbstractContextManager[object]:
        """Return the profiler ranges of the call that ends the reductions of all chunks."""
        ranges = ExitStack()
        for stage in self.chunk_of if self.is_profiled else ():
            name = format_range_name(Instr(Opcode.ReduceGrads, stage, 0))
            ranges.enter_context(record_function(name))
        return ranges

    def wait_for_message(self, op: Opcode, stage: int, mb: int) -> Tensor:
        """Wait for a boundary tensor, and return it."""
        receive = self.receives.pop((INSTRUCTIONS[op].lane, stage, mb))
        if not self.is_profiled:
            return receive.wait()
        with record_function(format_range_name(Instr(op, stage, mb)).replace("RECV", "WAIT_RECV")):
            return receive.wait()

    def start_receive(self, instr: Instr, requires_grad: bool) -> None:
        """Start the receive of a boundary tensor."""
        peer = self.program.peer_rank(instr)
        buffer = torch.empty(
            self.find_shape(instr, peer),
            dtype=self.call.config.pipeline_dtype,
            device=self.device,
            requires_grad=requires_grad,
        )
        lane = INSTRUCTIONS[instr.op].lane
        work = self.transport.recv(buffer.detach(), peer, lane)
        self.receives[lane, instr.stage, instr.mb] = _PendingReceive(work, buffer)

    def find_shape(self, receive: Instr, peer: int) -> tuple[int, ...]:
        """Return the shape of a boundary tensor. With `variable_seq_lengths`, wait for it."""
        if self.call.boundary_shape is not None:
            return self.call.boundary_shape
        stage, mb = receive.stage, receive.mb
        if receive.op == Opcode.RecvGrad:
            return self.output_shapes[stage, mb]
        self.output_shapes[stage - 1, mb] = shape = self.transport.receive_shape(peer)
        return shape

    def start_send(self, instr: Instr, tensor: Tensor) -> None:
        """Start the send of a boundary tensor, and release the tensors of sends that are done."""
        tensor = tensor.detach().contiguous()
        lane = INSTRUCTIONS[instr.op].lane
        work = self.transport.send(tensor, self.program.peer_rank(instr), lane)
        self.sends.append((work, tensor))
        while self.sends and self.sends[0][0].is_completed():
            self.sends.popleft()[0].wait()

    def take_input(self, stage: int, mb: int) -> Tensor | None:
        """Return the input of a forward, or None for the first stage."""
        if stage == 0:
            return None
        if stage - 1 in self.chunk_of:  # the previous stage is on this rank
            output = self.activations.pop((stage - 1, mb))
            input_tensor = output.detach().requires_grad_()
            self.deallocate(output)
            return input_tensor
        return self.wait_for_message(Opcode.RecvAct, stage, mb)

    def take_output_gradient(self, stage: int, mb: int) -> Tensor | None:
        """Return the gradient of a stage's output, or None for the last stage."""
        if stage == self.last_stage:
            return None
        if stage + 1 in self.chunk_of:
            return self.gradients.pop((stage + 1, mb))
        return self.wait_for_message(Opcode.RecvGrad, stage, mb)

    def deallocate(self, output: Tensor) -> None:
        """Free a stage's output, but not its graph, if Megatron's config requires it."""
        if not self.call.forward_only:
            deallocates = self.call.config.deallocate_pipeline_outputs
            schedules.deallocate_output_tensor(output, deallocates)

    def run_backward(self, instr: Instr, deferred: WeightGradients | None) -> None:
        """Run a backward.  If `deferred` is a list, store weight-gradient computations in it."""
        stage, mb = instr.stage, instr.mb
        with self.as_stage(stage), defer_weight_gradients(deferred):
            gradient = schedules.backward_step(
                self.inputs.pop((stage, mb)),
                self.outputs.pop((stage, mb)),
                self.take_output_gradient(stage, mb),
                None,  # the model type, which backward_step does not use
                self.call.config,
            )
        if stage > 0:
            self.gradients[stage, mb] = gradient
        delayed = self.delayed_modules.take_weight_gradients()
        if deferred is not None:
            deferred += delayed
            return
        for compute_gradient in delayed:
            compute_gradient()


def _run_forward(step: MegatronStep, instr: Instr) -> None:
    call, stage, mb = step.call, instr.stage, instr.mb
    chunk = step.chunk_of[stage]
    is_first_mb = schedules.check_first_val_step(call.first_val_step, call.forward_only, mb == 0)
    input_tensor = step.take_input(stage, mb)
    with step.as_stage(stage):
        output, num_tokens = schedules.forward_step(
            call.forward_step_func,
            call.data_iterators[chunk],
            call.chunks[chunk],
            call.num_microbatches,
            input_tensor,
            step.forward_data,
            call.config,
            cp_group_size=call.context_parallel_size,
            collect_non_loss_data=call.collect_non_loss_data,
            is_first_microbatch=is_first_mb,
            current_microbatch=mb,
            vp_stage=chunk if len(call.chunks) > 1 else None,
            is_last_stage=stage == step.last_stage,
        )
    step.num_tokens += num_tokens
    if stage < step.last_stage:
        step.activations[stage, mb] = output
    if not call.forward_only:
        step.inputs[stage, mb], step.outputs[stage, mb] = input_tensor, output


def _run_full_backward(step: MegatronStep, instr: Instr) -> None:
    step.run_backward(instr, None)


def _run_backward_input(step: MegatronStep, instr: Instr) -> None:
    deferred: WeightGradients = []
    step.run_backward(instr, deferred)
    step.weight_gradients[instr.stage, instr.mb] = deferred


def _run_backward_weight(step: MegatronStep, instr: Instr) -> None:
    for add_gradient in step.weight_gradients.pop((instr.stage, instr.mb)):
        add_gradient()


def _receive_activation(step: MegatronStep, instr: Instr) -> None:
    step.start_receive(instr, requires_grad=not step.call.forward_only)


def _receive_gradient(step: MegatronStep, instr: Instr) -> None:
    step.start_receive(instr, requires_grad=False)


def _send_activation(step: MegatronStep, instr: Instr) -> None:
    output = step.activations.pop((instr.stage, instr.mb))
    if step.call.boundary_shape is None:
        step.output_shapes[instr.stage, instr.mb] = tuple(output.shape)
        step.sends.append(step.transport.send_shape(output.shape, step.program.peer_rank(instr)))
    step.start_send(instr, output)
    step.deallocate(output)


def _send_gradient(step: MegatronStep, instr: Instr) -> None:
    gradient = step.gradients.pop((instr.stage, instr.mb))
    if gradient is None:  # nothing in the stage depends on its input
        shape = step.call.boundary_shape or step.output_shapes[instr.stage - 1, instr.mb]
        gradient = torch.zeros(shape, dtype=step.call.config.pipeline_dtype, device=step.device)
    step.start_send(instr, gradient)


def _reduce_gradients(step: MegatronStep, instr: Instr) -> None:
    step.reduce_chunk(step.chunk_of[instr.stage])


def _leave_to_trainer(step: MegatronStep, instr: Instr) -> None:
    """Do nothing, because Megatron's trainer runs the optimizer step after the call."""


HANDLERS: Final[dict[int, Callable[[MegatronStep, Instr], None]]] = {
    Opcode.Forward: _run_forward,
    Opcode.Backward: _run_full_backward,
    Opcode.BackwardInput: _run_backward_input,
    Opcode.BackwardWeight: _run_backward_weight,
    Opcode.SendAct: _send_activation,
    Opcode.RecvAct: _receive_activation,
    Opcode.SendGrad: _send_gradient,
    Opcode.RecvGrad: _receive_gradient,
    Opcode.ReduceGrads: _reduce_gradients,
    Opcode.OptimizerStep: _leave_to_trainer,
}
