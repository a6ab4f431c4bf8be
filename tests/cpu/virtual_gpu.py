"""A virtual GPU: CUDA's streams and events with a clock of their own.

Work takes the time that a test gives, on the current stream. A stream continues when the work that
it waits for has ended, and never before the host has issued its work. Results are computed on the
CPU at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.ir.cost.costs import Costs
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import TRANSFER_OPS
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.runtime import in_process, program_runner
from schedir.runtime.program_state import Call
from schedir.runtime.recording import gpu_progress, recorder
from schedir.transports.in_process import mailbox
from schedir.transports.in_process.cuda_streams import StreamHub, StreamMailbox

LANE = -1  # the priority of a lane's stream


class VirtualGPU:
    """A virtual GPU. `host` is the host's time in seconds, and `timed` counts timing events."""

    def __init__(self) -> None:
        self.host, self.timed = 0.0, 0
        self.host_may_wait = True
        self.streams: list[Stream] = []
        self.current = [Stream(self)]

    @property
    def stream(self) -> Stream:
        """The current stream."""
        return self.current[-1]

    @property
    def over(self) -> float:
        """The time when all issued work has ended."""
        return max(self.host, *(stream.now for stream in self.streams))

    def work(self, seconds: float) -> None:
        """Occupy the current stream, from when the host has issued it."""
        self.stream.now = max(self.stream.now, self.host) + seconds
        self.stream.seen[self.stream] += 1

    @property
    def forked(self) -> list[Stream]:
        """Streams with work that the current stream does not wait for.

        A capture could not end while there is one.
        """
        seen = self.stream.seen
        return [stream for stream in self.streams if stream.seen[stream] > seen[stream]]

    def synchronize(self, device: object = None) -> None:
        """Let the host wait for all issued work."""
        assert self.host_may_wait, "the host waits"
        self.host = self.over


class Stream:
    def __init__(self, gpu: VirtualGPU, device: object = None, priority: int = 0) -> None:
        self.now, self.priority = 0.0, priority
        self.seen: Counter[Stream] = (
            Counter()
        )  # the amount of work of each stream before this point
        gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.now = max(self.now, event.time)
        self.seen |= event.seen

    def wait_stream(self, stream: Stream) -> None:
        self.now = max(self.now, stream.now)
        self.seen |= stream.seen


class Event:
    def __init__(self, gpu: VirtualGPU, enable_timing: bool = False) -> None:
        self.gpu, self.timed, self.recorded, self.time = gpu, enable_timing, False, 0.0
        self.seen = Counter[Stream]()
        gpu.timed += enable_timing

    def record(self, stream: Stream | None = None) -> None:
        # torch creates a CUDA event when the event is recorded for the first time.
        assert self.recorded or self.gpu.host_may_wait or not self.timed, "made inside a step"
        stream = stream or self.gpu.stream
        self.time, self.recorded = max(stream.now, self.gpu.host), True
        stream.seen[stream] += self.timed  # other events only order streams
        self.seen = stream.seen.copy()

    def elapsed_time(self, other: Event) -> float:
        assert self.timed and other.timed and self.recorded and other.recorded
        return 1e3 * (other.time - self.time)

    def query(self) -> bool:
        return self.time <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.synchronize()


class _Copies(TorchDispatchMode):
    """Charges every copy on a lane."""

    def __init__(self, gpu: VirtualGPU, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu, self.seconds = gpu, seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and self.gpu.stream.priority == LANE:
            self.gpu.work(self.seconds)
        return func(*args, **kwargs or {})


def install_virtual_gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGPU:
    """Make torch.cuda use a virtual GPU, and give virtual ranks their streams on it."""
    gpu = VirtualGPU()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        gpu.current.append(stream)
        yield
        gpu.current.pop()

    patches = {
        "Stream": partial(Stream, gpu), "Event": partial(Event, gpu), "stream": on,
        "synchronize": gpu.synchronize, "current_stream": lambda device=None: gpu.stream,
    }  # fmt: skip
    for name, patch in patches.items():
        monkeypatch.setattr(torch.cuda, name, patch)
    monkeypatch.setattr(program_runner, "make_timestamps", recorder.EventTimestamps)
    monkeypatch.setattr(gpu_progress, "make_event", lambda device: Event(gpu))
    monkeypatch.setattr(recorder, "perf_counter", lambda: gpu.host)

    def mailboxes(program: Any, model: Any, cuda: bool, told: Any) -> list[StreamMailbox]:
        hub = StreamHub()
        hub.payloads = told
        return [
            StreamMailbox(hub, rank, mailbox.list_group_members(program, rank), model)
            for rank in range(program.shape.ranks)
        ]

    monkeypatch.setattr(in_process, "make_mailboxes", mailboxes)
    return gpu


def charge_instructions(
    ranks: in_process.InProcessExecutor, gpu: VirtualGPU, costs: Costs, host: float = 0.0
) -> None:
    """Let every instruction except transfers take its cost on its stream.

    The host takes some time before each instruction.
    """
    index: InstructionIndex = ranks.graph.index
    table, row = ranks.graph.get_cost_table(costs)
    for rank in ranks.executors:
        first = int(ranks.program.offsets[rank.rank])
        for k, (wait, run) in enumerate(rank.runner.calls):
            moves = index.op[first + k] in TRANSFER_OPS
            seconds = 0.0 if moves else float(table[row[first + k]])
            rank.runner.calls[k] = Call(
                partial(_late, wait, gpu, host), _charged(run, gpu, seconds)
            )


def _late(wait: Callable[[], None] | None, gpu: VirtualGPU, seconds: float) -> None:
    gpu.host += seconds
    if wait is not None:
        wait()


def _charged(run: Callable[[], None], gpu: VirtualGPU, seconds: float) -> Callable[[], None]:
    def charged() -> None:
        run()
        if seconds:
            gpu.work(seconds)

    return charged


@contextmanager
def charge_messages(gpu: VirtualGPU, costs: Costs) -> Iterator[None]:
    """Make every message take its cost, and let no host wait, while the context is active."""
    gpu.host_may_wait = False
    with _Copies(gpu, float(np.max(costs.send or 0.0))):
        yield
    gpu.host_may_wait = True


def assert_runs_as_predicted(timeline: Timeline, costs: Costs) -> None:
    """Assert that instructions begin and end as predicted, and that transfers end so."""
    predicted = simulate(timeline.program, costs, progress_model="per_edge")
    for name in ("start", "end"):
        is_compared = ~np.isin(timeline.spans["op"], TRANSFER_OPS) | (name == "end")
        np.testing.assert_allclose(
            timeline.spans[name][is_compared], predicted.spans[name][is_compared], atol=1e-9
        )
