"""Forwards: what each shows of what torch's runtime will do, looked at before it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.runtime.buffers import remembered
from schedir.runtime.module_state import attributes_and_gradients_restored
from schedir.torch import halves
from schedir.torch.hooks import has_parameter_hooks, hooks_so_far
from schedir.torch.losses import ByMicrobatch
from schedir.torch.outputs import Outputs
from schedir.torch.sharding import accumulate_gradients
from schedir.torch.stages import require_as_told

_RUN_BY: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()  # stages, by what schedule last
_REPLACED = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class Watched(ByMicrobatch):
    """torch's runtime, with each forward looked at."""

    _has_backward: bool
    _splits: frozenset[int]  # stages some of whose backwards are in halves
    _settled: list[Any]  # modules that have run
    # Of the step under way.
    _whole_stages: set[int]  # stages none of whose backwards may be in halves
    _whole: set[tuple[int, int]]  # stages and microbatches whose backward may not
    _outputs: Outputs
    _hooks_before: int  # before the forward that runs

    def _take_stages(self) -> None:
        """Find shapes anew where another schedule has run these stages since, with its own."""
        if any(stage in _RUN_BY and _RUN_BY[stage]() is not self for stage in self._stages):
            self._stages_forward_initialized = self._stages_backward_initialized = False
        for stage in self._stages:
            _RUN_BY[stage] = ref(self)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Within this, stages run forwards and backwards through this object."""
        self._outputs = Outputs(by_value=self._settled != self._modules())
        self._whole = set()
        self._whole_stages = {
            stage.stage_index
            for stage in self._stages
            if self._may_be_split(stage) and has_parameter_hooks(stage.submod)
        }
        runs = (self._run_forward, self._run_backward, self._run_weights)
        with ExitStack() as stack:
            for stage in self._stages:
                for name, run in zip(_REPLACED, runs, strict=True):
                    stack.enter_context(_replaced(stage, name, run))
            yield
            self._outputs.finish()
        self._settled = self._modules()

    def _modules(self) -> list[Any]:
        return [stage.submod for stage in self._stages]

    def _may_be_split(self, stage: Any) -> bool:
        """Return whether torch splits backwards of a stage: at W, those of the first are full."""
        splits = self._has_backward and stage.stage_index in self._splits
        return splits and not stage.is_first and stage.dw_builder is None

    # ------------------------------------------------------------ shapes

    def _initialize_stages(self, *given: Any, **named: Any) -> None:
        """Let torch find shapes by a forward and a backward of each stage, as if there were none.

        They run on copies, and buffers and gradients are then what they were. What is received
        gets tensors of its own in each step: hooks on those of the step before are gone.
        """
        given, named = tree_map_only(Tensor, torch.clone, (given, named))
        with ExitStack() as stack:
            if not self._stages_forward_initialized or (
                self._has_backward != self._stages_backward_initialized
            ):
                for stage in self._stages:
                    stack.enter_context(_unchanged(stage.submod))
            super()._initialize_stages(*given, **named)
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in infos:
                    if getattr(info, "buffer", None) is not None:  # no argument of the first
                        info.buffer = info.buffer.detach().contiguous()

    # ------------------------------------------------------------ a forward

    def _run_forward(
        self, stage: Any, run: Callable[..., Any], mb: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a forward of a stage."""
        self._outputs.require_unwritten((stage.stage_index - 1, mb))
        self._hooks_before = hooks_so_far()
        output = run(mb, *args, **kwargs)
        self._outputs.passed_on(stage.stage_index - 1, mb)
        return output

    def _ran_forward(self, stage: Any, output: Any, mb_index: int) -> None:
        """Look at what a forward of a stage, and its loss, show of its backward."""
        s, has_hooks = stage.stage_index, hooks_so_far() != self._hooks_before
        outputs, inputs = stage.fwd_cache[mb_index]
        sent = not stage.is_last and s + 1 not in {each.stage_index for each in self._stages}
        if not stage.is_last:
            require_as_told(stage, output, sent=sent)
        self._outputs.add(s, mb_index, self._kept_or_sent(stage, output, mb_index))
        if sent:
            outputs = tuple(map(_contiguous, outputs))
            stage.fwd_cache[mb_index] = outputs, inputs
        if not self._may_be_split(stage):
            return
        if stage.is_last:
            ends = (halves.detachable(self._loss_of[mb_index]),)
            self._loss_of[mb_index] = ends[0]
        else:
            ends = tuple(map(halves.detachable, outputs))
            stage.fwd_cache[mb_index] = (ends, inputs)
        if s not in self._whole_stages and halves.loses(stage, ends, mb_index):
            self._whole_stages.add(s)
        if s in self._whole_stages or has_hooks:
            self._whole.add((s, mb_index))

    def _kept_or_sent(self, stage: Any, output: Any, mb: int) -> list[Any]:
        """Return the outputs of a forward, and its loss, that are needed after it."""
        if not stage.is_last:
            return tree_leaves(output)
        kept = tree_leaves(output) if stage.output_chunks else []
        return [*kept, self._loss_of.get(mb)]

    # ------------------------------------------------------------ a backward

    def _run_backward(
        self, stage: Any, run: Callable[..., Any], mb: int, *args: Any, **kwargs: Any
    ) -> None:
        """Run a backward of a stage, or its half of inputs."""
        full = kwargs.get("full_backward", True)
        if not stage.is_last and (full or not stage.is_first):
            self._outputs.release(stage.stage_index, mb)
        with self._full_if_needed(stage, mb):
            run(mb, *args, **kwargs)
        if mb in stage.bwd_cache:
            stage.bwd_cache[mb] = tuple(map(_contiguous, stage.bwd_cache[mb]))

    def _run_weights(
        self, stage: Any, run: Callable[..., Any], mb: int, *args: Any, **kwargs: Any
    ) -> None:
        """Run the half of a backward that computes the gradients of weights."""
        if stage.is_first and not stage.is_last:  # whose backward is full, and runs here
            self._outputs.release(stage.stage_index, mb)
        with self._full_if_needed(stage, mb):
            run(mb, *args, **kwargs)
        accumulate_gradients(stage.submod)

    @contextmanager
    def _full_if_needed(self, stage: Any, mb: int) -> Iterator[None]:
        """Within this, torch runs the full backward of a microbatch at I where halves are wrong."""
        full = (stage.stage_index, mb) in self._whole
        if full:
            stage.dw_builder = halves.whole_at_i
        try:
            yield
        finally:
            if full:
                stage.dw_builder = None


@contextmanager
def _replaced(stage: Any, name: str, run: Callable[..., Any]) -> Iterator[None]:
    """Within this context a method of a stage is `run`, which is given stage and method first."""
    own = vars(stage).get(name)
    setattr(stage, name, partial(run, stage, getattr(stage, name)))
    try:
        yield
    finally:
        delattr(stage, name)
        if own is not None:
            setattr(stage, name, own)


@contextmanager
def _unchanged(module: Any) -> Iterator[None]:
    """After this context a module's state and gradients are what they were before it."""
    put_back = remembered(module)
    try:
        with attributes_and_gradients_restored(module):
            yield
    finally:
        put_back()


def _contiguous(value: Any) -> Any:
    """Return a tensor as it can be sent, and anything else as it is."""
    return value.contiguous() if isinstance(value, Tensor) else value
