"""Run the stages of a model in one process without a pipeline, as a reference for schedules.

Every schedule must compute the same losses and gradients, up to rounding. A schedule with
microbatches in ascending order computes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import (
    BACKWARD_INPUT_OPS,
    BACKWARD_OPS,
    BACKWARD_WEIGHT_OPS,
    FORWARD_OPS,
    FULL_BACKWARD_OPS,
    Instr,
)
from schedir.ir.pipeline.tied_weights import ParameterLocation, TiedWeights, find_sharing_ranks
from schedir.ir.program import Program
from schedir.runtime.arguments import (
    count_microbatches,
    require_loss,
    require_loss_input,
    require_model_stages,
    require_program,
    require_scalar_loss,
    require_seed,
)
from schedir.runtime.autograd.random_streams import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    RandomStreams,
    list_stream_numbers,
)
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.stage_inputs import StageInputAdapter
from schedir.runtime.boundaries.boundary import (
    infer_requires_grad,
    require_output_tensors,
    split_skip_output,
)
from schedir.runtime.model_checks.tied_weight_requirements import (
    ParameterTable,
    fingerprint_parameters,
)
from schedir.runtime.parameters.buckets import get_expert_slice
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.rank_resources import Loss
from schedir.runtime.step_inputs import (
    Keywords,
    Microbatches,
    StepInputs,
    require_input_tensors,
    require_keywords,
)


@explain_wrong_calls("run_sequential(stages, inputs, targets, loss=loss)")
def run_sequential(
    stages: Sequence[nn.Module],
    inputs: Microbatches,
    targets: Microbatches,
    *,
    loss: Loss,
    grad_scale: float = 1.0,
    program: Program | None = None,
    seed: int = 0,
    step: int = 0,
    tied_weights: TiedWeights | None = None,
    keywords: Keywords = (),
) -> Tensor:
    """Compute the gradients of all microbatches in one process, and return the sum of the losses.

    Each stage, from first to last, runs the forwards of all microbatches in order. Then each stage,
    from last to first, runs all backwards in order. After that, the parameters have the gradients
    in `grad`. Tensors between stages are contiguous, and require a gradient if the output of the
    stage requires one.

    Gradients are reduced in this order:

    1. The gradients of a stage are multiplied by `grad_scale`.
    2. If several ranks have a stage, each rank has a separate sum. These sums are added in the
       order of ranks, as in `InProcessExecutor`. Three or more ranks in separate processes may add
       the sums in another order.
    3. Each stage with a copy of a tied weight has a separate sum. These sums are added in the order
       of stages, and all copies get the total. The function finds tied weights as `Executor` does.

    Args:
        stages: All stages of the model, in order.
        inputs: The input of the first stage for each microbatch: a tensor or a tuple of tensors.
        targets: The target of the loss for each microbatch.
        loss: See `Executor`.
        grad_scale: A factor. The function computes the gradients of `grad_scale` times the sum of
            the losses.
        program: A program. Each stage runs its forwards and backwards in the order of this program,
            with the program's split backwards, frozen stages, skip connections and stage replicas.
            With stage replicas, the forwards are in ascending order of microbatches. By default
            there is no program, and forwards and backwards are in ascending order of microbatches.
        seed: The seed of the random streams, as in `Executor`. Afterwards torch's generators have
            the same state as before.
        step: The number of the step, from 0, which determines the random numbers.
        tied_weights: See `Executor`.
        keywords: For each microbatch, the keyword arguments of all stages. By default there are
            none.

    Returns:
        The unscaled sum of the losses, 0-dimensional.

    Raises:
        ModelError: The stages, the loss or the seed are invalid.
        ExecutionError: The numbers of inputs, targets and keywords differ.
        UsageError: `program` is not a `Program`.

    Example:
        >>> import schedir, torch
        >>> from copy import deepcopy
        >>> from torch import nn
        >>> from schedir.runtime import InProcessExecutor, run_sequential
        >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4))
        >>> stages = [nn.Linear(8, 8), nn.Linear(8, 1)]
        >>> plain = deepcopy(stages)
        >>> x, y, loss = torch.ones(4, 2, 8), torch.ones(4, 2, 1), nn.functional.mse_loss
        >>> total = InProcessExecutor(program, stages, loss=loss, boundary=(2, 8)).step(x, y)
        >>> bool(total == run_sequential(plain, x, y, loss=loss))
        True
        >>> torch.equal(stages[0].weight.grad, plain[0].weight.grad)
        True
    """
    stages = require_model_stages(stages)
    loss = require_loss(loss)
    seed = require_seed(seed)
    program = require_program(program) if program is not None else None
    for s, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            if (expert_slice := get_expert_slice(p)) is not None and expert_slice[1] > 1:
                raise ModelError(
                    f"{name} of stage {s} has only expert slice {expert_slice[0]} of "
                    f"{expert_slice[1]}: the other experts are missing",
                    hint="build_stage(..., ep=1)",
                )
    microbatches = count_microbatches(inputs, "inputs")
    target_count = count_microbatches(targets, "targets")
    if microbatches != target_count:
        raise ExecutionError(f"there are {microbatches} inputs and {target_count} targets")
    require_keywords(keywords)
    if len(keywords) not in (0, microbatches):
        raise ExecutionError(f"there are {microbatches} inputs and {len(keywords)} keywords")
    batch = StepInputs(inputs, targets, grad_scale, keywords)
    device = next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))
    random_streams = RandomStreams(seed, device, step=step)
    random_streams.begin_step(list_stream_numbers(microbatches))
    tied_locations = _find_tied_locations(stages, tied_weights)
    with random_streams.preserve_generators():
        sequential_step = _SequentialStep(stages, batch, loss, program, random_streams)
        total_loss = sequential_step.run()
        sequential_step.add_tied_gradients(tied_locations)
        return total_loss


class _SequentialStep:
    """One step of `run_sequential`. The caller must call `random_streams.begin_step` before."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        batch: StepInputs,
        loss: Loss,
        program: Program | None,
        random_streams: RandomStreams,
    ) -> None:
        self.stages = stages
        self.batch = batch
        self.loss = loss
        self.program = program
        self.random_streams = random_streams
        self.gradients = [GradientBuffers(stage) for stage in stages]
        self.frozen_stages = program.frozen_stages if program else 0
        skips = program.skips if program is not None else ()
        self.skip_ends = dict(skips)
        self.skip_begins = {end: begin for begin, end in skips}
        # (Source stage, microbatch) -> the tensors of a skip connection. `skip_gradients` has the
        # gradients of these tensors.
        self.skip_tensors: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.skip_gradients: dict[tuple[int, int], list[Tensor]] = {}
        # For each stage: microbatch -> (inputs, outputs) that require a gradient.
        self.saved_tensors: list[dict[int, tuple[list[Tensor], list[Tensor]]]] = [
            {} for _ in stages
        ]
        # Microbatch -> the inputs of the next stage. `output_gradients` has their gradients.
        self.stage_inputs = {
            mb: require_input_tensors(batch.inputs[mb], mb) for mb in range(len(batch.inputs))
        }
        self.losses = [torch.zeros(())] * len(self.stage_inputs)
        self.output_gradients: list[list[Tensor] | None] = [None] * len(self.losses)

    def run(self) -> Tensor:
        """Run all forwards and backwards, and return the sum of the losses."""
        for k in range(len(self.stages)):
            # Use the adapter that executors use, so that inputs have the same memory layout. With
            # a different layout, kernels may round differently.
            adapter = StageInputAdapter()
            for mb in _list_forwards(self.program, k, len(self.losses)):
                self._run_forward(k, mb, adapter)
        total = sum(self.losses, torch.zeros((), device=self.losses[0].device))
        for k in reversed(range(len(self.stages))):
            self._run_backwards(k)
        return total

    def _run_forward(self, k: int, mb: int, adapter: StageInputAdapter) -> None:
        """Run a forward of stage `k`, and keep its output as the input of the next stage."""
        self.random_streams.make_seeded(FORWARD, k, mb)()
        skip_inputs = self.skip_tensors[self.skip_begins[k], mb] if k in self.skip_begins else ()
        args, keywords = (*self.stage_inputs[mb], *skip_inputs), self.batch.get_keywords(mb)
        with torch.set_grad_enabled(k >= self.frozen_stages):
            y, xs = adapter.run(
                self.stages[k],
                args,
                keywords,
                is_exclusive=k > 0,
                skip_input_count=len(skip_inputs),
            )
        outputs, skip_outputs = self._get_outputs(y, k, mb)
        ys = (*outputs, *skip_outputs)
        leaves = [x for x in xs if x.requires_grad] if k else []
        self.saved_tensors[k][mb] = leaves, [y for y in ys if y.requires_grad]
        messages = zip(map(_copy_as_message, ys), infer_requires_grad(ys), strict=True)
        copies = tuple(
            y.requires_grad_(requires_grad and k >= self.frozen_stages)
            for y, requires_grad in messages
        )
        self.stage_inputs[mb] = copies[: len(outputs)]
        if k in self.skip_ends:
            self.skip_tensors[k, mb] = copies[len(outputs) :]

    def _get_outputs(self, y: object, k: int, mb: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors for the next stage and for a skip connection.

        The last stage has one output, the loss.
        """
        if k in self.skip_ends:
            return split_skip_output(y, k)
        if k < len(self.stages) - 1:
            return require_output_tensors(y, k), ()
        require_loss_input(y, k)
        loss = require_scalar_loss(self.loss(y, self.batch.targets[mb]))
        self.losses[mb] = loss.detach().clone()
        return (loss,), ()

    def _run_backwards(self, k: int) -> None:
        """Run the backwards of stage `k` rank by rank, and add the gradients of the ranks."""
        gradients = self.gradients[k]
        rank_gradients = []
        for backwards in _list_backwards(self.program, k, len(self.losses)):
            gradients.zero()
            deferred_gradients: dict[int, DeferredGradients] = {}
            for op, _, mb in backwards:
                is_weight_backward = op in BACKWARD_WEIGHT_OPS
                self.random_streams.make_seeded(
                    BACKWARD_WEIGHT if is_weight_backward else BACKWARD, k, mb
                )()
                if is_weight_backward:
                    deferred_gradients.pop(mb).run()
                    continue
                is_split = op in BACKWARD_INPUT_OPS
                with (
                    defer_weight_gradients(deferred_gradients.setdefault(mb, DeferredGradients()))
                    if is_split
                    else nullcontext()
                ):
                    self._compute_gradients(k, mb)
                self._pass_input_gradients(k, mb)
            gradients.scale(self.batch.grad_scale)
            rank_gradients.append([flat.clone() for flat in gradients.flat])
        for flat, first, *others in zip(gradients.flat, *rank_gradients, strict=True):
            flat.copy_(sum(others, first))

    def _compute_gradients(self, k: int, mb: int) -> None:
        _, roots = self.saved_tensors[k][mb]
        if roots:  # empty if no output requires a gradient
            dy = self.output_gradients[mb]
            torch.autograd.backward(roots, dy and [*dy, *self.skip_gradients.pop((k, mb), ())])

    def _pass_input_gradients(self, k: int, mb: int) -> None:
        """Keep the gradients of the inputs of a forward for the stages that sent the inputs."""
        leaves, _ = self.saved_tensors[k][mb]
        dxs = [_copy_as_message(torch.zeros_like(x) if x.grad is None else x.grad) for x in leaves]
        if k in self.skip_begins:
            edge = self.skip_begins[k], mb
            count = len(dxs) - len([x for x in self.skip_tensors[edge] if x.requires_grad])
            self.skip_gradients[edge] = dxs[count:]
            dxs = dxs[:count]
        self.output_gradients[mb] = dxs

    def add_tied_gradients(self, tied_locations: Sequence[tuple[ParameterLocation, ...]]) -> None:
        """Set the gradient of each copy of a tied weight to the sum over all copies."""
        views_by_stage = [
            {id(p): view for p, view in stage_gradients.bound_views}
            for stage_gradients in self.gradients
        ]
        for locations in tied_locations:
            copies = [
                views_by_stage[s][id(self.stages[s].get_parameter(name))] for s, name in locations
            ]
            total_gradient = copies[0].clone()
            for copy in copies[1:]:
                total_gradient += copy
            for copy in copies:
                copy.copy_(total_gradient)


def _copy_as_message(value: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor, like one that a rank receives."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def _list_forwards(program: Program | None, stage: int, microbatches: int) -> list[int]:
    """Return the microbatches in the order in which a program runs the forwards of a stage.

    Without a program, or with stage replicas, the order is ascending.
    """
    if program is None or program.shape.placement_rows > 1:
        return [*range(microbatches)]
    stream = program.streams[int(program.shape.first_rank_per_stage[stage])]
    return [i.mb for i in stream if i.op in FORWARD_OPS and i.stage == stage]


def _find_tied_locations(
    stages: Sequence[nn.Module], tied_weights: TiedWeights | None
) -> list[tuple[ParameterLocation, ...]]:
    """Return, for each tied weight, the stage and name of each copy."""
    fingerprints = fingerprint_parameters(dict(enumerate(stages)))
    named_stages = tuple(
        s
        for s, stage_fingerprints in fingerprints.items()
        if any(p.is_named_tied for p in stage_fingerprints)
    )
    return ParameterTable([fingerprints], tied_weights, (named_stages,)).weights


def _list_backwards(
    program: Program | None, stage: int, microbatches: int
) -> Iterator[list[Instr]]:
    """Yield, for each rank with the stage, a list of the backward instructions of the stage."""
    if program is None:
        yield [Instr(FULL_BACKWARD_OPS[0], stage, mb) for mb in range(microbatches)]
        return
    ops = BACKWARD_OPS + BACKWARD_WEIGHT_OPS
    for rank in find_sharing_ranks([stage], program.shape):
        yield [i for i in program.streams[rank] if i.stage == stage and i.op in ops]
