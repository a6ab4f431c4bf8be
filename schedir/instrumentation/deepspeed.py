"""Mark the instructions of DeepSpeed's PipelineEngine as profiler ranges.

Its instructions carry the number of a buffer, not of a microbatch; but each kind of them comes in
the order of microbatches (`TrainSchedule._step_to_micro_batch`), so that the k-th is that of
microbatch k, which the buffer must confirm.  Sends and receives block, and are whole ranges; those
of DualPipeV are queued until `CommitP2P` issues all of them as one and waits.
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
    mark,
    posting,
    profiling,
    reducing,
)

PACKAGE: Final = "deepspeed"
ROOT: Final = PACKAGE
KNOWN: Final = "0.19.8"
_MODULE: Final = "deepspeed.runtime.pipe.engine"

_ACTIONS: Final = {
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SEND_F",
    "RecvActivation": "RECV_F",
    "SendGrad": "SEND_B",
    "RecvGrad": "RECV_B",
}
_COMMIT: Final = "CommitP2P"
_KNOWN: Final = ("TrainSchedule", "InferenceSchedule", "DualPipeVSchedule")
_MAP: Final = "_INSTRUCTION_MAP"


def patch(patches: FunctionPatches) -> None:
    """Plan what is put around DeepSpeed's functions.  Raises UsageError where one is not there."""
    patches.around(import_module(_MODULE).PipelineEngine, "_exec_schedule", _exec_schedule)


def _exec_schedule(original: Any, engine: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
    if not profiling():
        return original(engine, schedule, *args, **kwargs)
    if type(schedule).__name__ not in _KNOWN:
        kind = type(schedule).__name__
        warn(f"{kind} is not one of {', '.join(_KNOWN)}: it is not marked", stacklevel=3)
        return original(engine, schedule, *args, **kwargs)
    step = _DeepSpeedStep(
        schedule, queues=any(kind.__name__ == _COMMIT for kind in engine._INSTRUCTION_MAP)
    )
    own = vars(engine).get(_MAP)
    marked = {k: partial(step.run, k.__name__, run) for k, run in engine._INSTRUCTION_MAP.items()}
    setattr(engine, _MAP, marked)  # this engine's, for as long as the step lasts
    try:
        return original(engine, schedule, *args, **kwargs)
    finally:
        delattr(engine, _MAP) if own is None else setattr(engine, _MAP, own)


class _DeepSpeedStep:
    """A step under a profiler: how many of each kind have run, and which messages are queued."""

    def __init__(self, schedule: Any, queues: bool) -> None:
        self.schedule = schedule
        self.queues = queues
        self.queued: list[str] = []
        self.counted: Counter[tuple[str, int]] = Counter()
        self.buffers = schedule.num_pipe_buffers()
        # By phase; in the second, stages come back to the ranks that they began on.
        both = schedule.stage_id, 2 * schedule.stages - 1 - schedule.stage_id
        self.stages = both if queues else both[:1]

    def run(self, kind: str, original: Any, engine: Any, **kwargs: Any) -> Any:
        """Run an instruction in its range."""
        with self.range(kind, kwargs):
            return original(engine, **kwargs)

    def range(self, kind: str, given: dict[str, Any]) -> Any:
        """The range of an instruction; what loads, or only queues, has none."""
        if kind in _ACTIONS:
            action = self.action(kind, given["buffer_id"], given.get("phase", 0))
            if not self.queues or not kind.startswith(("Send", "Recv")):
                return mark(action)
            self.queued.append(action)
        elif kind == _COMMIT and self.queued:
            queued, self.queued = self.queued, []
            return posting(queued)
        elif kind == "ReduceGrads":
            return reducing(self.stages)
        elif kind == "OptimizerStep":
            return mark("STEP")
        return nullcontext()

    def action(self, kind: str, buffer: int, phase: int) -> str:
        """What the next instruction of a kind is called, if it works on its buffer."""
        mb = self.counted[kind, phase]
        self.counted[kind, phase] += 1
        if (phase * self.schedule.micro_batches + mb) % self.buffers != buffer:
            raise ExecutionError(
                f"DeepSpeed runs {kind} on buffer {buffer}, which is not that of microbatch {mb}",
                hint="this version orders microbatches otherwise: run without schedir.instrument",
            )
        return f"{self.stages[phase]}{_ACTIONS[kind]}{mb}"
