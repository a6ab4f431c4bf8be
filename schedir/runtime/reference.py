"""Reference: the same stages in one process, without a schedule.

What every schedule must reproduce.  An ascending one does, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from schedir.ops import Instr, Opcode
from schedir.program import Program
from schedir.runtime.gradients import Gradients
from schedir.runtime.rank import Loss, Microbatches
from schedir.runtime.split import Tape, recording


def reference(
    stages: Sequence[nn.Module],
    inputs: Microbatches,
    targets: Microbatches,
    *,
    loss: Loss,
    scale: float = 1.0,
    program: Program | None = None,
) -> Tensor:
    """The gradients of `scale` times the sum of losses, left in `.grad`; returns that sum.

    All microbatches forward in order; then stage by stage, the last first, all backward in
    order.  With a `program` the backwards of each stage come in its order.  Then the gradients
    are scaled; of two holders of a stage, which have a sum each, first and second are added; then
    the two copies of a tied weight, first plus last, once.
    """
    gradients = [Gradients(stage) for stage in stages]
    total = torch.zeros(())
    saved: list[list[tuple[Tensor, Tensor]]] = [[] for _ in stages]
    for x, target in zip(inputs, targets, strict=True):
        for k, stage in enumerate(stages):
            y = stage(x)
            if k == len(stages) - 1:
                y = loss(y, target)
                total = total.to(y.device) + y.detach()
            saved[k].append((x, y))
            x = y.detach().requires_grad_()
    dys: list[Tensor | None] = [None] * len(saved[-1])
    for k in reversed(range(len(stages))):
        sums = []
        for backwards in _backwards(program, k, len(dys)):
            gradients[k].zero()
            tapes: dict[int, Tape] = {}
            for op, _, mb in backwards:
                if op is Opcode.BackwardWeight:
                    tapes.pop(mb).run()
                    continue
                x, y = saved[k][mb]
                split = op is Opcode.BackwardInput
                with recording(tapes.setdefault(mb, Tape())) if split else nullcontext():
                    if y.requires_grad:  # a first stage may have nothing to train
                        torch.autograd.backward(y, dys[mb])
                dys[mb] = x.grad
            gradients[k].scale(scale)
            sums.append([flat.clone() for flat in gradients[k].flat])
        for flat, first, *second in zip(gradients[k].flat, *sums, strict=True):
            flat.copy_(sum(second, first))
    first, last = (getattr(s, "tied_weight", None) for s in (stages[0], stages[-1]))
    if len(stages) > 1 and first is not None and last is not None:
        last.grad.copy_(first.grad.add_(last.grad))
    return total


def _backwards(program: Program | None, stage: int, microbatches: int) -> Iterator[list[Instr]]:
    """What each holder of a stage runs of it but forwards, in order."""
    if program is None:
        yield [Instr(Opcode.Backward, stage, mb) for mb in range(microbatches)]
        return
    late = (Opcode.Backward, Opcode.BackwardInput, Opcode.BackwardWeight)
    for rank in program.plan.holders[:, stage].tolist():
        yield [i for i in program.streams[rank] if i.stage == stage and i.op in late]
