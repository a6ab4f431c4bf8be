"""`runtime="schedir"`: run torch's stages with schedir's Executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Replicated
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import UsageError, describe
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.torch_pipelining import gradients
from schedir.torch_pipelining.executor_factory import (
    CachedExecutor,
    ExecutorRequirements,
    facts_of,
    made,
    shapes_of,
)
from schedir.torch_pipelining.output_checks import PendingOutputs
from schedir.torch_pipelining.schedule_consistency import require_same, told

KEPT: Final = 4  # executors, of shapes that were met last


class ExecutorRuntime:
    """Runs the steps of a `schedir.torch_pipelining.Schedule` by our Executor.

    The executor is made at the first step, of what `submod` of the stages is then, and of the
    shapes that the first microbatch has on its way.  Before each step the ranks tell each other
    whether it still fits (one number); if shapes, types, autocast, modules, or what is trained have
    changed on any, all make another, and the last few are kept.  So a change is never a hang.

    A rank whose step fails leaves: waits of the others for it end in an ExecutionError.  The next
    step makes a new executor.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        program: Program,
        forward_program: Program,
        loss_fn: Any,
        scale_grads: bool,
        tied: TiedWeights | None,
        group: Any,
    ) -> None:
        self.stages, self.group, self.tied = stages, group, tied
        self.programs = {False: forward_program, program.trains: program}
        self.loss_fn = loss_fn
        self.divisor = program.shape.microbatches if scale_grads else 1
        self.aside = self.divisor > 1 or bool(program.tied_weights) or program.shape.rows > 1
        self.first = any(stage.is_first for stage in stages)
        self.last = next((stage for stage in stages if stage.is_last), None)
        self.made: dict[tuple[ExecutorRequirements, ...], CachedExecutor] = {}
        self.now: CachedExecutor | None = None
        self.failures = 0
        self.changed = torch.zeros(1, dtype=torch.int32, device=_device_of(group, stages[0].device))
        self.most = dist.AllreduceOptions()
        self.most.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        # Of the step under way, by microbatch.
        self.outputs: list[Any] = []
        self.losses: list[Any] = []
        self.keeps_outputs = self.takes_losses = False
        self.loss_kwargs: Mapping[str, Any] = {}
        self.returned = PendingOutputs(by_value=False)

    def step(
        self,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any] | None,
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Run one step, or the forwards alone if the stages' `has_backward` is False.

        Outputs of the last stage are left in its `output_chunks`, and losses in `losses`, both
        detached.
        """
        trains = bool(self.stages[0].has_backward)
        program = self.programs[trains]
        n = program.shape.microbatches
        wrong = self._wrong(n, arg_mbs, kwarg_mbs, target_mbs, losses, trains)
        inputs = [*(arg_mbs or [()] * n)] if self.first and not wrong else []
        before = self.now
        now = self.now = self._ready(trains, inputs, kwarg_mbs or [{}] * n, wrong)
        self.returned = PendingOutputs(by_value=now is not before)
        self.loss_kwargs = loss_kwargs or {}
        self.keeps_outputs = return_outputs
        self.takes_losses = self.loss_fn is not None and target_mbs is not None
        self.outputs, self.losses = [None] * n, [None] * n
        targets: Any = [*enumerate(target_mbs or [None] * n)] if self.last is not None else []
        try:
            with ExitStack() as stack:
                if trains and self.aside:
                    stack.enter_context(gradients.put_aside(self.stages))
                now.executor.step(inputs, targets, keywords=kwarg_mbs or ())
                self.returned.finish()
                if trains:
                    self._finish(program)
        except BaseException:
            self._failed(now)
            raise
        if self.last is not None and return_outputs:
            self.last.output_chunks.extend(self.outputs)
        if self.last is not None and losses is not None:
            losses.clear()
            losses.extend(self.losses if self.takes_losses else ())
        self.outputs, self.losses = [], []

    def _wrong(
        self, n: int, args: object, kwargs: object, targets: object, losses: object, trains: bool
    ) -> str:
        """What of a step's arguments is wrong, in words; other ranks wait to hear of it."""
        for what, given in (("arg_mbs", args), ("kwarg_mbs", kwargs), ("target_mbs", targets)):
            if given is not None and not isinstance(given, list):
                return f"{what} is {describe(given)}, and no list"
            if isinstance(given, list) and len(given) != n:
                return f"{what} has {len(given)} of {n} microbatches"
        for what, given, kind in (("arg_mbs", args, tuple | list), ("kwarg_mbs", kwargs, Mapping)):
            for each in given if isinstance(given, list) else ():
                if not isinstance(each, kind):
                    return f"{what} has {describe(each)} for a microbatch, and no tuple or mapping"
        if losses is not None and not isinstance(losses, list):
            return f"losses is {describe(losses)}, and no list"
        takes = self.last is not None and self.loss_fn is not None
        if takes and targets is None and (trains or losses is not None):
            return "a loss is taken, and no target is given"
        return ""

    def _finish(self, program: Program) -> None:
        """What torch's runtime does at REDUCE_GRAD."""
        if program.shape.rows > 1:  # in buffers of the executor's, which the next step fills
            for p in gradients.parameters(self.stages):
                p.grad = None if p.grad is None else p.grad.clone()
        for stage in self.stages:
            if isinstance(stage.submod, Replicated):
                gradients.mean_over_replicas(stage.submod)
        if self.divisor > 1:
            gradients.scale(self.stages, self.divisor)

    def _loss(self, y: Any, given: tuple[int, Any]) -> Tensor:
        """Keep the output and the loss of a microbatch; what the executor takes gradients of."""
        mb, target = given
        if self.keeps_outputs:
            self.outputs[mb] = tree_map_only(Tensor, self._apart, y)
        if self.takes_losses:
            loss = self.loss_fn(y, target, **self.loss_kwargs)
            self.losses[mb] = tree_map_only(Tensor, self._apart, loss)
        assert self.last is not None
        tensors = tree_leaves([self.outputs[mb], self.losses[mb]])
        self.returned.add(self.last.stage_index, mb, tensors)
        if not self.takes_losses:
            return torch.zeros(())
        trains = self.now is not None and self.now.facts.trains
        return loss if trains else torch.zeros(())

    def _apart(self, tensor: Tensor) -> Tensor:
        """What a step leaves to its caller: nothing that the next one writes over."""
        assert self.now is not None
        there = tensor.untyped_storage().data_ptr() in self.now.received
        return tensor.detach().clone() if there else tensor.detach()

    def _failed(self, now: CachedExecutor) -> None:
        self.failures += 1
        self.now = None
        self.made.clear()
        now.leave()

    # ------------------------------------------------------------ which executor

    def _ready(
        self, trains: bool, inputs: list[Any], kwarg_mbs: list[Any], wrong: str = ""
    ) -> CachedExecutor:
        """The executor of a step, which all ranks take or make together; or what is wrong with its
        arguments on one of them, which all raise."""
        if wrong:
            inputs, kwarg_mbs = [], []
        shapes = tuple(map(shapes_of, inputs)), tuple(map(shapes_of, kwarg_mbs))
        now = self.now
        fits = not wrong and now is not None and now.fits(trains, shapes, self.stages)
        self.changed.fill_(not fits)
        self.group.allreduce([self.changed], self.most).wait()
        if now is not None and not self.changed.item():
            return now
        program = self.programs[trains]

        def mine() -> ExecutorRequirements:
            if wrong:
                raise UsageError(wrong, program=program.name)
            return facts_of(self.stages, trains, shapes, self.failures, program)

        key = tuple(told(mine, self.group, [ExecutorRequirements]))
        require_same("whether gradients are taken", [facts.trains for facts in key])
        for other in [k for k in self.made if [*map(_failures, k)] != [*map(_failures, key)]]:
            self.made.pop(other).leave()
        if key not in self.made:
            while len(self.made) >= KEPT:
                self.made.pop(next(iter(self.made))).transport.end()
            args, kwargs = [*inputs, ()][0], [*kwarg_mbs, {}][0]
            self.made[key] = made(
                key, self.stages, program, self.group, self._loss, self.tied, args, kwargs
            )
        return self.made[key]


def _failures(facts: ExecutorRequirements) -> int:
    return facts.failures


def _device_of(group: Any, device: torch.device) -> torch.device:
    """Where processes of a group compare a number: on the host, if they have a backend there."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return torch.device(device)
    return torch.device("cpu")
