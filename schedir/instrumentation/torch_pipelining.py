"""Mark what the schedules of torch.distributed.pipelining 2.13 do not mark themselves.

`_PipelineScheduleRuntime` and what is made of it mark each action, but not the waits for messages,
which happen in the forward or backward that needs them.  `ScheduleGPipe` marks a forward with its
messages and waits in it as one, `Schedule1F1B` nothing.  All of them call the same methods of a
stage, and two functions of their module for messages.
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
    mark,
    posted,
    posting,
    profiling,
)

PACKAGE: Final = "torch"
ROOT: Final = PACKAGE
KNOWN: Final = "2.13"
_MODULE: Final = "torch.distributed.pipelining.schedules"

_BACKWARDS: Final = {
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
    "perform_reduce_grad": "REDUCE_GRAD",
}
_MESSAGES: Final = {
    "get_fwd_send_ops": "SEND_F",
    "get_fwd_recv_ops": "RECV_F",
    "get_bwd_send_ops": "SEND_B",
    "get_bwd_recv_ops": "RECV_B",
}
_ACTION: Final = "_schedir_action"  # what a P2POp of a step is to be called


@dataclass
class _TorchStep:
    """A step under a profiler: of which schedule, and whether that marks its actions itself."""

    marked: bool
    has_loss: bool
    open: record_function | None = None  # a forward that ends when its loss is there

    def mark(self, stage: Any, action: str, chunk: object) -> Any:
        self.close()
        return mark(f"{stage.stage_index}{action}{chunk}")

    def close(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


_STEP: ContextVar[_TorchStep | None] = ContextVar("schedir.torch_pipelining", default=None)


def patch(patches: FunctionPatches) -> None:
    """Plan what is put around torch's functions.  Raises UsageError where one is not there."""
    schedules: Any = import_module(_MODULE)
    stage = import_module("torch.distributed.pipelining.stage")._PipelineStageBase
    runtime = schedules._PipelineScheduleRuntime
    within = FunctionPatches()
    within.around(schedules._PipelineSchedule, "_maybe_compute_loss", _loss)
    within.around(schedules, "_batch_p2p", _batch)
    within.around(stage, "forward_one_chunk", _forward)
    for name, action in _BACKWARDS.items():
        within.around(stage, name, partial(_backward, action))
    for name, action in _MESSAGES.items():
        within.around(stage, name, partial(_ops, action))
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        patches.around(kind, "step", partial(_step, runtime, within))


def _step(
    runtime: type, within: FunctionPatches, original: Any, schedule: Any, *args: Any, **kwargs: Any
) -> Any:
    if not profiling():
        return original(schedule, *args, **kwargs)
    # A schedule within another's forward or loss, as a teacher's, is a part of that.
    inside = _STEP.get() is not None
    step = (
        None if inside else _TorchStep(isinstance(schedule, runtime), schedule._loss_fn is not None)
    )
    token = _STEP.set(step)
    try:
        with within:
            return original(schedule, *args, **kwargs)
    finally:
        if step is not None:
            step.close()
        _STEP.reset(token)


def _ops(action: str, original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """The operations of a message, each with the message's name."""
    ops = original(stage, *args, **kwargs)
    if _STEP.get() is not None:
        for op in ops:
            setattr(op, _ACTION, f"{stage.stage_index}{action}{_chunk(args, kwargs)}")
    return ops


def _batch(original: Any, ops: Any, *args: Any, **kwargs: Any) -> Any:
    """Post messages.  Others than a stage's, as those before the first step, have no name."""
    step = _STEP.get()
    actions = [] if step is None else [getattr(op, _ACTION, "") for op in ops]
    if step is None or not all(actions) or not actions:
        return original(ops, *args, **kwargs)
    with nullcontext() if step.marked else posting(actions):
        works = original(ops, *args, **kwargs)
    return posted(works, actions)


def _forward(original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    step = _STEP.get()
    if step is None or step.marked:
        return original(stage, *args, **kwargs)
    forward = step.mark(stage, "F", _chunk(args, kwargs))
    if stage.is_last and step.has_loss:
        step.open = forward.__enter__()
        return original(stage, *args, **kwargs)
    with forward:
        return original(stage, *args, **kwargs)


def _loss(original: Any, schedule: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    loss = original(schedule, stage, *args, **kwargs)
    if (step := _STEP.get()) is not None and stage.is_last:
        step.close()
    return loss


def _backward(action: str, original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward, half of one, or what is done with gradients after all; nothing in `eval`."""
    step = _STEP.get()
    if step is None or step.marked or not stage.has_backward:
        return original(stage, *args, **kwargs)
    if action == "B" and not (args[2] if len(args) > 2 else kwargs.get("full_backward", True)):
        action = "I"
    with step.mark(stage, action, "" if action == "REDUCE_GRAD" else _chunk(args, kwargs)):
        return original(stage, *args, **kwargs)


def _chunk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The microbatch, which is the first parameter of a stage's methods after itself."""
    return int(args[0] if args else next(v for k, v in kwargs.items() if k.endswith("chunk_id")))
