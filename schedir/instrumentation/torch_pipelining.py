"""Mark the actions of torch.distributed.pipelining 2.13 that its schedules do not mark.

`_PipelineScheduleRuntime` and its subclasses mark each action, but not the wait for a message. This
wait is inside the forward or backward that needs the message. `ScheduleGPipe` marks a forward with
its messages and waits as one range, and `Schedule1F1B` marks nothing. All these schedules call the
same methods of a stage, and post messages with `_batch_p2p`.
"""

from __future__ import annotations

from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

from torch.profiler import record_function

from schedir.instrumentation.profiler_ranges import (
    FunctionPatches,
    is_profiling,
    make_instruction_range,
    make_posting_range,
    wrap_works,
)

PACKAGE: Final = "torch"
ROOT_MODULE: Final = PACKAGE
SUPPORTED_VERSION: Final = "2.13"
_MODULE: Final = "torch.distributed.pipelining.schedules"

_BACKWARD_METHODS: Final = {
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
    "perform_reduce_grad": "REDUCE_GRAD",
}
_MESSAGE_METHODS: Final = {
    "get_fwd_send_ops": "SEND_F",
    "get_fwd_recv_ops": "RECV_F",
    "get_bwd_send_ops": "SEND_B",
    "get_bwd_recv_ops": "RECV_B",
}
_ACTION_ATTRIBUTE: Final = "_schedir_action"  # the name of the message of a P2POp


@dataclass
class _TorchStep:
    """A step under a profiler.

    Args:
        is_marked: True if the schedule marks its actions itself.
        has_loss: True if the schedule computes a loss.
        open_forward: The open range of a forward of the last stage, or None. The range ends when
            the loss is computed.
    """

    is_marked: bool
    has_loss: bool
    open_forward: record_function | None = None

    def make_range(self, stage: Any, action: str, chunk: object) -> Any:
        self.close_forward()
        return make_instruction_range(f"{stage.stage_index}{action}{chunk}")

    def close_forward(self) -> None:
        if self.open_forward is not None:
            self.open_forward.__exit__(None, None, None)
            self.open_forward = None


_CURRENT_STEP: ContextVar[_TorchStep | None] = ContextVar("schedir.torch_pipelining", default=None)


def add_patches(patches: FunctionPatches) -> None:
    """Add wrappers of torch's functions to patches, without installing them.

    Args:
        patches: The patches to which wrappers are added.

    Raises:
        UsageError: Torch does not have one of the functions.
    """
    schedules: Any = import_module(_MODULE)
    stage = import_module("torch.distributed.pipelining.stage")._PipelineStageBase
    runtime = schedules._PipelineScheduleRuntime
    step_patches = FunctionPatches()
    step_patches.wrap_function(schedules._PipelineSchedule, "_maybe_compute_loss", _compute_loss)
    step_patches.wrap_function(schedules, "_batch_p2p", _post_batch)
    step_patches.wrap_function(stage, "forward_one_chunk", _run_forward)
    for name, action in _BACKWARD_METHODS.items():
        step_patches.wrap_function(stage, name, partial(_run_backward, action))
    for name, action in _MESSAGE_METHODS.items():
        step_patches.wrap_function(stage, name, partial(_name_ops, action))
    for schedule_class in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        patches.wrap_function(schedule_class, "step", partial(_run_step, runtime, step_patches))


def _run_step(
    runtime: type,
    step_patches: FunctionPatches,
    original: Any,
    schedule: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_profiling():
        return original(schedule, *args, **kwargs)
    # A schedule may run inside a forward or a loss of another schedule, for example as a teacher.
    # Such an inner schedule is not marked.
    is_inner = _CURRENT_STEP.get() is not None
    step = None
    if not is_inner:
        step = _TorchStep(isinstance(schedule, runtime), schedule._loss_fn is not None)
    token = _CURRENT_STEP.set(step)
    try:
        with step_patches:
            return original(schedule, *args, **kwargs)
    finally:
        if step is not None:
            step.close_forward()
        _CURRENT_STEP.reset(token)


def _name_ops(action: str, original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the operations of a message, each tagged with the name of the message."""
    ops = original(stage, *args, **kwargs)
    if _CURRENT_STEP.get() is not None:
        for op in ops:
            setattr(
                op,
                _ACTION_ATTRIBUTE,
                f"{stage.stage_index}{action}{_read_microbatch(args, kwargs)}",
            )
    return ops


def _post_batch(original: Any, ops: Any, *args: Any, **kwargs: Any) -> Any:
    """Post messages in a range.

    Messages of other code, such as those before the first step, have no name and get no range.
    """
    step = _CURRENT_STEP.get()
    actions = [] if step is None else [getattr(op, _ACTION_ATTRIBUTE, "") for op in ops]
    if step is None or not all(actions) or not actions:
        return original(ops, *args, **kwargs)
    with nullcontext() if step.is_marked else make_posting_range(actions):
        works = original(ops, *args, **kwargs)
    return wrap_works(works, actions)


def _run_forward(original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    step = _CURRENT_STEP.get()
    if step is None or step.is_marked:
        return original(stage, *args, **kwargs)
    forward = step.make_range(stage, "F", _read_microbatch(args, kwargs))
    if stage.is_last and step.has_loss:
        step.open_forward = forward.__enter__()
        return original(stage, *args, **kwargs)
    with forward:
        return original(stage, *args, **kwargs)


def _compute_loss(original: Any, schedule: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    loss = original(schedule, stage, *args, **kwargs)
    if (step := _CURRENT_STEP.get()) is not None and stage.is_last:
        step.close_forward()
    return loss


def _run_backward(action: str, original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """Run B, I, W or the reduction of gradients in a range.

    In an evaluation (`eval` of a torch schedule), stages have no backward, so there is no range.
    """
    step = _CURRENT_STEP.get()
    if step is None or step.is_marked or not stage.has_backward:
        return original(stage, *args, **kwargs)
    if action == "B" and not (args[2] if len(args) > 2 else kwargs.get("full_backward", True)):
        action = "I"
    with step.make_range(
        stage, action, "" if action == "REDUCE_GRAD" else _read_microbatch(args, kwargs)
    ):
        return original(stage, *args, **kwargs)


def _read_microbatch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the microbatch, which is the first parameter of a stage's methods after `self`."""
    return int(args[0] if args else next(v for k, v in kwargs.items() if k.endswith("chunk_id")))
