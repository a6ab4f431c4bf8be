"""Mark the instructions of DeepSpeed's PipelineEngine as profiler ranges.

DeepSpeed's instructions have the number of a buffer, but not of a microbatch. Each kind of
instruction runs in the order of microbatches (`TrainSchedule._step_to_micro_batch`). So the k-th
instruction of a kind is for microbatch k. schedir verifies that it uses the buffer of microbatch k.

Sends and receives block, so one range contains both post and wait. Only DualPipeV queues sends and
receives. `CommitP2P` then issues all queued messages as a batch, and waits.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Final
from warnings import warn

from schedir.errors import ExecutionError
from schedir.instrumentation.profiler_ranges import (
    FunctionPatches,
    is_profiling,
    make_instruction_range,
    make_posting_range,
    open_reduction_ranges,
)

PACKAGE: Final = "deepspeed"
ROOT_MODULE: Final = PACKAGE
SUPPORTED_VERSION: Final = "0.19.8"
_MODULE: Final = "deepspeed.runtime.pipe.engine"

_ACTIONS: Final = {
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
}
_COMMIT_KIND: Final = "CommitP2P"
_KNOWN_SCHEDULES: Final = ("TrainSchedule", "InferenceSchedule", "DualPipeVSchedule")
_MAP_ATTRIBUTE: Final = "_INSTRUCTION_MAP"


def add_patches(patches: FunctionPatches) -> None:
    """Add wrappers of DeepSpeed's functions to patches, without installing them.

    Args:
        patches: The patches to which wrappers are added.

    Raises:
        UsageError: DeepSpeed does not have one of the functions.
    """
    patches.wrap_function(import_module(_MODULE).PipelineEngine, "_exec_schedule", _run_schedule)


def _run_schedule(original: Any, engine: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_profiling():
        return original(engine, schedule, *args, **kwargs)
    if type(schedule).__name__ not in _KNOWN_SCHEDULES:
        kind = type(schedule).__name__
        known_schedules = ", ".join(_KNOWN_SCHEDULES)
        warn(
            f"schedir adds no profiler ranges to the schedule {kind}: it supports only "
            f"{known_schedules}",
            stacklevel=3,
        )
        return original(engine, schedule, *args, **kwargs)
    step = _DeepSpeedStep(
        schedule,
        queues_messages=any(kind.__name__ == _COMMIT_KIND for kind in engine._INSTRUCTION_MAP),
    )
    instance_map = vars(engine).get(_MAP_ATTRIBUTE)
    marked_map = {
        k: partial(step.run_instruction, k.__name__, run)
        for k, run in engine._INSTRUCTION_MAP.items()
    }
    setattr(engine, _MAP_ATTRIBUTE, marked_map)  # only in this engine, until the step ends
    try:
        return original(engine, schedule, *args, **kwargs)
    finally:
        delattr(engine, _MAP_ATTRIBUTE) if instance_map is None else setattr(
            engine, _MAP_ATTRIBUTE, instance_map
        )


class _DeepSpeedStep:
    """A step under a profiler, with the counts of its instructions and the queued messages.

    Args:
        schedule: The schedule of the step.
        queues_messages: True if messages are queued until `CommitP2P`.
    """

    def __init__(self, schedule: Any, queues_messages: bool) -> None:
        self.schedule = schedule
        self.queues_messages = queues_messages
        self.queued_actions: list[str] = []
        self.counts: Counter[tuple[str, int]] = Counter()
        self.num_buffers = schedule.num_pipe_buffers()
        # The stage of each phase. DualPipeV places the stages of its second phase in reverse order.
        stages = schedule.stage_id, 2 * schedule.stages - 1 - schedule.stage_id
        self.stage_of_phase = stages if queues_messages else stages[:1]

    def run_instruction(self, kind: str, original: Any, engine: Any, **kwargs: Any) -> Any:
        """Run an instruction in its range."""
        with self.make_range(kind, kwargs):
            return original(engine, **kwargs)

    def make_range(self, kind: str, arguments: dict[str, Any]) -> Any:
        """Return the range of an instruction, or an empty context if it has no range.

        Loads of data and queued messages have no range.
        """
        if kind in _ACTIONS:
            action = self.name_next_action(kind, arguments["buffer_id"], arguments.get("phase", 0))
            if not self.queues_messages or not kind.startswith(("Send", "Recv")):
                return make_instruction_range(action)
            self.queued_actions.append(action)
        elif kind == _COMMIT_KIND and self.queued_actions:
            actions, self.queued_actions = self.queued_actions, []
            return make_posting_range(actions)
        elif kind == "ReduceGrads":
            return open_reduction_ranges(self.stage_of_phase)
        elif kind == "OptimizerStep":
            return make_instruction_range("STEP")
        return nullcontext()

    def name_next_action(self, kind: str, buffer: int, phase: int) -> str:
        """Return the name of the next instruction of a kind.

        Raise ExecutionError if `buffer` is not the buffer of the instruction's microbatch.
        """
        mb = self.counts[kind, phase]
        self.counts[kind, phase] += 1
        if (phase * self.schedule.micro_batches + mb) % self.num_buffers != buffer:
            raise ExecutionError(
                f"DeepSpeed runs {kind} on buffer {buffer}, which is not the buffer of microbatch "
                f"{mb}",
                hint="run without schedir.instrument, which does not support this version of "
                "DeepSpeed",
            )
        return f"{self.stage_of_phase[phase]}{_ACTIONS[kind]}{mb}"
