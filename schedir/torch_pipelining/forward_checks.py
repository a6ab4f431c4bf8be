"""Check each forward of torch's runtime, and keep losses by microbatch.

After each forward, a check decides whether torch's split backward would give wrong gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import describe
from schedir.runtime.arguments import require_scalar_loss
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.torch_pipelining import backward_split
from schedir.torch_pipelining.fsdp_stages import accumulate_gradients
from schedir.torch_pipelining.hook_detection import (
    checkpoint_count,
    has_parameter_hooks,
    hook_count,
)
from schedir.torch_pipelining.stages import require_declared_output
from schedir.torch_pipelining.step_checks import PendingOutputs

# ---------------------------------------------------------------- losses by microbatch

# torch appends losses in the order of the last stage's forwards, but reads the loss of microbatch k
# at index k.


def compute_loss(
    loss_fn: Callable[..., Any], output: Any, target: Any, mb: int, keywords: Mapping[str, Any]
) -> Any:
    """Return the loss of a microbatch. An error gets a note with the shapes of both arguments.

    Args:
        loss_fn: The loss function of the user.
        output: The output of the last stage.
        target: The target.
        mb: The number of the microbatch.
        keywords: More arguments for `loss_fn`.
    """
    try:
        return loss_fn(output, target, **keywords)
    except Exception as error:
        error.add_note(
            f"in loss_fn of microbatch {mb}: the output of the last stage is {describe(output)}, "
            f"and the target is {describe(target)}"
        )
        raise


class MicrobatchLossRuntime(_PipelineScheduleRuntime):
    """torch's runtime, which stores the loss of each microbatch under the microbatch's number."""

    _has_backward: bool
    _losses_by_mb: dict[int, Tensor]
    _loss_kwargs: dict[str, Any] | None

    def _on_forward_end(self, stage: Any, output: Any, mb_index: int) -> None:
        """Do nothing. Subclasses override this method, which runs after a forward and its loss."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *_: Any
    ) -> None:
        if stage.is_last and self._loss_fn is not None and target_mbs is not None:
            self._losses_by_mb[mb_index] = self._compute_checked_loss(
                self._loss_fn, mb_index, output, target_mbs[mb_index], **(self._loss_kwargs or {})
            )
        self._on_forward_end(stage, output, mb_index)

    def _compute_checked_loss(
        self, loss_fn: Callable[..., Any], mb: int, output: Any, target: Any, **keywords: Any
    ) -> Any:
        """Return the loss of a microbatch, which must have one element if the step trains."""
        loss = compute_loss(loss_fn, output, target, mb, keywords)
        return require_scalar_loss(loss) if self._has_backward else loss

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._losses_by_mb[mb_index] if stage.is_last and self._losses_by_mb else None

    def _update_losses(self, stages: Any, losses: list[Tensor] | None) -> None:
        self._internal_losses[:] = [self._losses_by_mb[mb] for mb in sorted(self._losses_by_mb)]
        self._losses_by_mb.clear()
        super()._update_losses(stages, losses)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- checks of forwards


# Stage -> the schedule that ran it last.
_LAST_SCHEDULE: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
_STAGE_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class CheckedRuntime(MicrobatchLossRuntime):
    """torch's runtime, with checks of each forward."""

    _has_backward: bool
    _split_stages: frozenset[int]  # stages with at least one split backward
    _last_modules: list[Any]  # modules of the last step that succeeded
    # The next four attributes belong to the current step.
    _full_stages: set[int]  # stages that run full backwards for all microbatches
    _full_microbatches: set[tuple[int, int]]  # (stage, microbatch) pairs with a full backward
    _pending_outputs: PendingOutputs
    # `hook_count()` and `checkpoint_count()` before the current forward.
    _counts_before: tuple[int, int]
    _has_warned_of_checkpoints = False

    def _claim_stages(self) -> None:
        """Make torch infer shapes again if another schedule ran these stages last."""
        if any(
            stage in _LAST_SCHEDULE and _LAST_SCHEDULE[stage]() is not self
            for stage in self._stages
        ):
            self._stages_forward_initialized = self._stages_backward_initialized = False
        for stage in self._stages:
            _LAST_SCHEDULE[stage] = ref(self)

    @contextmanager
    def _check_stage_calls(self) -> Iterator[None]:
        """Replace the forward and backward methods of stages by methods of this object."""
        self._pending_outputs = PendingOutputs(by_value=self._last_modules != self._stage_modules())
        self._full_microbatches = set()
        self._full_stages = {
            stage.stage_index
            for stage in self._stages
            if self._can_split_backward(stage) and has_parameter_hooks(stage.submod)
        }
        runs = (self._run_forward, self._run_backward, self._run_weight_backward)
        with ExitStack() as stack:
            for stage in self._stages:
                for name, run in zip(_STAGE_METHODS, runs, strict=True):
                    stack.enter_context(_replace_method(stage, name, run))
            yield
            self._pending_outputs.finish()
        self._last_modules = self._stage_modules()

    def _stage_modules(self) -> list[Any]:
        return [stage.submod for stage in self._stages]

    def _can_split_backward(self, stage: Any) -> bool:
        """Return whether torch splits the backwards of a stage.

        torch does not split the backwards of the first stage: at W, it runs the full backward.
        """
        has_split = self._has_backward and stage.stage_index in self._split_stages
        return has_split and not stage.is_first and stage.dw_builder is None

    # ------------------------------------------------------------ shapes

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Let torch infer shapes with a forward and a backward of each stage, without side effects.

        These passes run on copies of the inputs. The state and the gradients of stages are restored
        afterwards. Each step receives into new tensor objects, which have no hooks from the last
        step.
        """
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        checkpoints_before = checkpoint_count()
        with PreservedState() as preserved:
            if not self._stages_forward_initialized or (
                self._has_backward != self._stages_backward_initialized
            ):
                for stage in self._stages:
                    preserved.add_buffers(stage.submod)
                    preserved.add_attributes(stage.submod)
                    preserved.add_gradients(stage.submod.parameters(), clear=True)
                    run = backward_split.compute_input_gradients
                    preserved.enter_context(_replace_method(stage, "_compute_input_grads", run))
            # torch also calls the loss function while it infers shapes.
            loss_fn = self._loss_fn
            if loss_fn is not None:
                self._loss_fn = partial(self._compute_checked_loss, loss_fn, 0)
            try:
                super()._initialize_stages(*args, **kwargs)
            finally:
                self._loss_fn = loss_fn
        self._warn_of_checkpoints(checkpoints_before)
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in infos:
                    # An argument of the first stage has no buffer.
                    if getattr(info, "buffer", None) is not None:
                        info.buffer = info.buffer.detach().contiguous()

    def _warn_of_checkpoints(self, count_before: int) -> None:
        """Warn once if forwards ran activation checkpoints, because I then runs the full backward.

        `count_before` is `checkpoint_count()` before these forwards.
        """
        split_stages = [
            stage.stage_index for stage in self._stages if self._can_split_backward(stage)
        ]
        if (
            self._has_warned_of_checkpoints
            or not split_stages
            or checkpoint_count() == count_before
        ):
            return
        self._has_warned_of_checkpoints = True
        warnings.warn(
            f"stages {split_stages} have activation checkpoints, and torch's split backward would "
            "recompute these several times. So I runs the full backward of these stages, and W "
            "does nothing; runtime='schedir' splits their backwards",
            stacklevel=2,
        )

    # ------------------------------------------------------------ a forward

    def _run_forward(
        self, stage: Any, run: Callable[..., Any], mb: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Check the inputs of a forward, and run it."""
        self._pending_outputs.require_unwritten((stage.stage_index - 1, mb))
        self._counts_before = hook_count(), checkpoint_count()
        output = run(mb, *args, **kwargs)
        self._pending_outputs.note_read(stage.stage_index - 1, mb)
        return output

    def _on_forward_end(self, stage: Any, output: Any, mb_index: int) -> None:
        """Check the outputs of a forward, and decide whether its backward may be split."""
        s, has_hooks = stage.stage_index, self._counts_before != (hook_count(), checkpoint_count())
        outputs, inputs = stage.fwd_cache[mb_index]
        local_stages = {local.stage_index for local in self._stages}
        is_sent = not stage.is_last and s + 1 not in local_stages
        if not stage.is_last:
            require_declared_output(stage, output, is_sent=is_sent)
        self._pending_outputs.add(s, mb_index, self._outputs_needed_later(stage, output, mb_index))
        if is_sent:
            outputs = tuple(map(_make_contiguous, outputs))
            stage.fwd_cache[mb_index] = outputs, inputs
        if not self._can_split_backward(stage):
            return
        self._warn_of_checkpoints(self._counts_before[1])
        if stage.is_last:
            roots = (backward_split.make_detachable(self._losses_by_mb[mb_index]),)
            self._losses_by_mb[mb_index] = roots[0]
        else:
            roots = tuple(map(backward_split.make_detachable, outputs))
            stage.fwd_cache[mb_index] = (roots, inputs)
        if s not in self._full_stages and backward_split.split_loses_gradients(
            stage, roots, mb_index
        ):
            self._full_stages.add(s)
        if s in self._full_stages or has_hooks:
            self._full_microbatches.add((s, mb_index))

    def _outputs_needed_later(self, stage: Any, output: Any, mb: int) -> list[Any]:
        """Return the outputs that are needed after a forward, and the loss of the last stage.

        torch needs the outputs of all stages except the last. The caller of `step` may need the
        outputs of the last stage.
        """
        if not stage.is_last:
            return tree_leaves(output)
        caller_outputs = tree_leaves(output) if stage.output_chunks else []
        return [*caller_outputs, self._losses_by_mb.get(mb)]

    # ------------------------------------------------------------ a backward

    def _run_backward(
        self, stage: Any, run: Callable[..., Any], mb: int, *args: Any, **kwargs: Any
    ) -> None:
        """Run a backward of a stage, or the half that computes the gradients of inputs."""
        is_full = kwargs.get("full_backward", True)
        if not stage.is_last and (is_full or not stage.is_first):
            self._pending_outputs.release(stage.stage_index, mb)
        with self._force_full_if_needed(stage, mb):
            run(mb, *args, **kwargs)
        if mb in stage.bwd_cache:
            stage.bwd_cache[mb] = tuple(map(_make_contiguous, stage.bwd_cache[mb]))

    def _run_weight_backward(
        self, stage: Any, run: Callable[..., Any], mb: int, *args: Any, **kwargs: Any
    ) -> None:
        """Run the half of a backward that computes the gradients of weights."""
        if stage.is_first and not stage.is_last:  # torch runs this stage's full backward at W
            self._pending_outputs.release(stage.stage_index, mb)
        with self._force_full_if_needed(stage, mb):
            run(mb, *args, **kwargs)
        accumulate_gradients(stage.submod)

    @contextmanager
    def _force_full_if_needed(self, stage: Any, mb: int) -> Iterator[None]:
        """Make torch run the full backward at I if a split backward would be wrong."""
        needs_full = (stage.stage_index, mb) in self._full_microbatches
        if needs_full:
            stage.dw_builder = backward_split.full_backward_dw_builder
        try:
            yield
        finally:
            if needs_full:
                stage.dw_builder = None


@contextmanager
def _replace_method(stage: Any, name: str, run: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a stage by a call of `run(stage, method, ...)` in this context."""
    own_attribute = vars(stage).get(name)
    setattr(stage, name, partial(run, stage, getattr(stage, name)))
    try:
        yield
    finally:
        delattr(stage, name)
        if own_attribute is not None:
            setattr(stage, name, own_attribute)


def _make_contiguous(value: Any) -> Any:
    """Return a tensor in contiguous memory, as Gloo needs it, and any other value unchanged."""
    return value.contiguous() if isinstance(value, Tensor) else value
