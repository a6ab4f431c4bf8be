"""`run_sequential`: run the same stages in one process without a pipeline.

What every schedule must reproduce.  An ascending one does, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
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
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.tied_parameters import ParameterTable, fingerprint_parameters
from schedir.runtime.rank_resources import Loss
from schedir.runtime.step_inputs import (
    Keywords,
    Microbatches,
    StepInputs,
    require_input_tensors,
    require_keywords,
)


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
    """The gradients of `grad_scale` times the sum of losses, left in `.grad`; returns that sum.

    Stage by stage all microbatches forward in order; then, the last stage first, all backward in
    order.  With a `program` those of each stage come in its order.  Then the gradients are scaled;
    of several holders of a stage, which have a sum each, these are added in the order of ranks (so
    do virtual ranks; of processes, three or more may add in another); then the sums of a tied
    weight, one for each stage that has it, are added once, in the order of stages, and all copies
    get the total.  What is tied is found as an Executor finds it.

    Random numbers are those of an executor of that `seed` in the step of that number, from 0;
    afterwards torch's generators are as they were.  What passes between stages is contiguous, and
    has a gradient where what a stage gives does.  `keywords` are those of a step.

    Raises ModelError for stages, a loss or a seed of another kind, ExecutionError for inputs and
    targets that are not as many.

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
    stages, loss, seed = require_model_stages(stages), require_loss(loss), require_seed(seed)
    program = require_program(program) if program is not None else None
    several, others = count_microbatches(inputs, "inputs"), count_microbatches(targets, "targets")
    if several != others:
        raise ExecutionError(f"there are {several} inputs and {others} targets")
    require_keywords(keywords)
    if len(keywords) not in (0, several):
        raise ExecutionError(f"there are {several} inputs and {len(keywords)} keywords")
    batch = StepInputs(inputs, targets, grad_scale, keywords)
    device = next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))
    draws = RandomStreams(seed, device, step=step)
    draws.begin_step(list_stream_numbers(several))
    with draws.preserve_generators():
        return _run_step(
            stages, batch, loss, program, draws, _find_tied_places(stages, tied_weights)
        )


def _run_step(
    stages: Sequence[nn.Module],
    batch: StepInputs,
    loss: Loss,
    program: Program | None,
    random_streams: RandomStreams,
    tied_places: Sequence[tuple[ParameterLocation, ...]],
) -> Tensor:
    """As `run_sequential`, with the random numbers of a step that has begun."""
    gradients, frozen = (
        [GradientBuffers(stage) for stage in stages],
        program.frozen_stages if program else 0,
    )
    saved: list[dict[int, tuple[list[Tensor], list[Tensor]]]] = [{} for _ in stages]
    skips = program.skips if program is not None else ()
    ends, begins = dict(skips), {end: begin for begin, end in skips}
    skipped: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by the stage it comes from, and mb
    back: dict[tuple[int, int], list[Tensor]] = {}  # its gradients
    given = {mb: require_input_tensors(batch.inputs[mb], mb) for mb in range(len(batch.inputs))}
    losses = [torch.zeros(())] * len(given)
    for k, stage in enumerate(stages):
        lender = StageInputAdapter()  # as an executor's: a copy might lie, and so round, otherwise
        for mb in _list_forwards(program, k, len(given)):
            random_streams.make_seeded(FORWARD, k, mb)()
            came = skipped[begins[k], mb] if k in begins else ()
            lent, named = (*given[mb], *came), batch.get_keywords(mb)
            with torch.set_grad_enabled(k >= frozen):
                y, xs = lender.run(
                    stage, lent, named, is_exclusive=k > 0, skip_input_count=len(came)
                )
            ys: Sequence[Tensor] = ()
            if k in ends:
                rest, skip = split_skip_output(y, k)
                ys = (*rest, *skip)
            elif k < len(stages) - 1:
                ys = require_output_tensors(y, k)
            else:
                ys = (require_scalar_loss(loss(y, batch.targets[mb])),)
                losses[mb] = ys[0].detach().clone()
            leaves = [x for x in xs if x.requires_grad] if k else []
            saved[k][mb] = leaves, [y for y in ys if y.requires_grad]
            with_one = zip(map(_copy_as_message, ys), infer_requires_grad(ys), strict=True)
            given[mb] = tuple(y.requires_grad_(has and k >= frozen) for y, has in with_one)
            if k in ends:
                given[mb], skipped[k, mb] = given[mb][: len(rest)], given[mb][len(rest) :]
    total = sum(losses, torch.zeros((), device=losses[0].device))
    dys: list[list[Tensor] | None] = [None] * len(losses)
    for k in reversed(range(len(stages))):
        sums = []
        for backwards in _list_backwards(program, k, len(dys)):
            gradients[k].zero()
            tapes: dict[int, DeferredGradients] = {}
            for op, _, mb in backwards:
                weight = op in BACKWARD_WEIGHT_OPS
                random_streams.make_seeded(BACKWARD_WEIGHT if weight else BACKWARD, k, mb)()
                if weight:
                    tapes.pop(mb).run()
                    continue
                leaves, roots = saved[k][mb]
                split = op in BACKWARD_INPUT_OPS
                with (
                    defer_weight_gradients(tapes.setdefault(mb, DeferredGradients()))
                    if split
                    else nullcontext()
                ):
                    if roots:  # a first stage may have nothing to train
                        dy = dys[mb]
                        torch.autograd.backward(roots, dy and [*dy, *back.pop((k, mb), ())])
                dxs = [
                    _copy_as_message(torch.zeros_like(x) if x.grad is None else x.grad)
                    for x in leaves
                ]
                if k in begins:
                    own = len([x for x in skipped[begins[k], mb] if x.requires_grad])
                    back[begins[k], mb] = dxs[len(dxs) - own :]
                    dxs = dxs[: len(dxs) - own]
                dys[mb] = dxs
            gradients[k].scale(batch.grad_scale)
            sums.append([flat.clone() for flat in gradients[k].flat])
        for flat, first, *others in zip(gradients[k].flat, *sums, strict=True):
            flat.copy_(sum(others, first))
    views = [{id(p): view for p, view in own.bound_views} for own in gradients]
    for places in tied_places:
        copies = [views[s][id(stages[s].get_parameter(name))] for s, name in places]
        whole = copies[0].clone()
        for copy in copies[1:]:
            whole += copy
        for copy in copies:
            copy.copy_(whole)
    return total


def _copy_as_message(value: Tensor) -> Tensor:
    """A copy as a message brings it: contiguous."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def _list_forwards(program: Program | None, stage: int, microbatches: int) -> list[int]:
    """The microbatches of a stage in the order of its forwards; of several holders ascending."""
    if program is None or program.shape.placement_rows > 1:
        return [*range(microbatches)]
    stream = program.streams[int(program.shape.first_rank_per_stage[stage])]
    return [i.mb for i in stream if i.op in FORWARD_OPS and i.stage == stage]


def _find_tied_places(
    stages: Sequence[nn.Module], tied_weights: TiedWeights | None
) -> list[tuple[ParameterLocation, ...]]:
    """The places of each tied weight."""
    told = fingerprint_parameters(dict(enumerate(stages)))
    named = tuple(s for s, own in told.items() if any(p.is_named_tied for p in own))
    return ParameterTable([told], tied_weights, (named,)).weights


def _list_backwards(
    program: Program | None, stage: int, microbatches: int
) -> Iterator[list[Instr]]:
    """What each holder of a stage runs of it but forwards, in order; the first rank first."""
    if program is None:
        yield [Instr(FULL_BACKWARD_OPS[0], stage, mb) for mb in range(microbatches)]
        return
    parts = BACKWARD_OPS + BACKWARD_WEIGHT_OPS
    for rank in find_sharing_ranks([stage], program.shape):
        yield [i for i in program.streams[rank] if i.stage == stage and i.op in parts]
