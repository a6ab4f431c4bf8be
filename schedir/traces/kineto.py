"""Read the files of torch.profiler.

The form is Chrome's trace events with what torch adds (github.com/pytorch/kineto): ranges that the
program named (`user_annotation`), operators (`cpu_op`), launches (`cuda_runtime`, `cuda_driver`)
and what they launched (`kernel`, `gpu_memcpy`, `gpu_memset`), joined by `args.correlation`.
`ts` and `dur` are microseconds; absolute time is `baseTimeNanoseconds + 1000 ts`.

A file may have gigabytes, of which little is of use: it is read as a stream, and only that is kept.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from schedir.errors import TraceError, UsageError, describe, format_bytes
from schedir.io.files import open_regular_file
from schedir.io.profiler_range_names import is_instruction_range, is_torch_range

Ints = NDArray[np.int64]

_STEP_NAME: Final = re.compile(r"ProfilerStep#(\d{1,9})", re.ASCII)
_RANK_IN_NAME: Final = re.compile(r"rank[-_ ]?(\d{1,9})", re.IGNORECASE | re.ASCII)
_MESSAGE_OPS: Final = {
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::recv_any_source_": "recv",
}
_WAIT_RANGES: Final = (
    "gloo:recv",
)  # from when a receive is posted until somebody who waited saw it
_AUTOGRAD_PREFIX: Final = "autograd::engine::"
_LAUNCH_SUFFIXES: Final = (
    "_runtime",
    "_driver",
)  # cuda_runtime, cuda_driver, and others' like them
_KEPT_CATEGORIES: Final = ("user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
_MAX_MICROSECONDS: Final = 2**61 / 1e3  # microseconds: since 1970, in files that say no base
_MAX_OPEN_BRACKETS: Final = 1000  # brackets that may stay open in some bytes that are read
_MAX_HEADER_BYTES: Final = (
    2**22
)  # bytes before the events: of torch's some thousands, more in large jobs
_HEADER_KEYS: Final = ("distributedInfo", "host_name", "baseTimeNanoseconds")


class ProfilerRange(NamedTuple):
    """What happened on a thread of the host, numbered, from `start` to `end` in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int


class GpuKernels(NamedTuple):
    """What ran on the GPU, in nanoseconds, when and on which thread of the host it was launched,
    on which stream it ran, and whether it is NCCL's; each of shape (n,)."""

    start: Ints
    end: Ints
    launch_time: Ints
    launch_thread: Ints
    stream: Ints
    is_nccl: NDArray[np.bool_]


@dataclass
class Trace:
    """What of one file is of use.  Times are nanoseconds by the clock of its host.

    `rank` is the number among all processes, if the file or its name says one, and `groups` are
    the ranks of each process group that it is in, as far as the file says.  `instruction_ranges`
    are the ranges that mark instructions, `messages` the operators that post sends and receives
    (named "send" and "recv"), `receive_waits` the receives until they were seen, `steps` the start
    and end of each ProfilerStep, `op_end_times` when each operator of a thread that marks or runs
    backwards ended, in order, and `autograd_threads` the threads that run backwards.
    """

    path: str
    rank: int | None = None
    host: str = ""
    backend: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    instruction_ranges: list[ProfilerRange] = field(default_factory=list)
    messages: list[ProfilerRange] = field(default_factory=list)
    receive_waits: list[ProfilerRange] = field(default_factory=list)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    op_end_times: dict[int, Ints] = field(default_factory=dict)
    autograd_threads: set[int] = field(default_factory=set)
    kernels: GpuKernels | None = None


def read_trace(path: str | Path) -> Trace:
    """What a file of torch.profiler, packed by gzip or not, says of the instructions of a rank.

    Raises UsageError for a file that cannot be read, TraceError for one that is cut off, that is no
    JSON, or no trace of torch.profiler.
    """
    try:
        header = _read_header(path)
        if "traceEvents" not in header:
            raise TraceError(
                f"{path} is no trace of torch.profiler: it has no traceEvents",
                hint="where other files lie beside, a pattern names the traces only",
            )
        with _TraceFile(path) as file:
            return _TraceReader(str(path), header).read(file)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
            raise TraceError(f"{path} is no whole gzip file: {error}") from None
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


class _TraceFile:
    """A file, unpacked where its first bytes say that it is packed, of which no more than
    `max_bytes` bytes are read.  It is refused where it opens brackets and closes none: parsers keep
    all."""

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        self.path, self.max_bytes, self.bytes_read, self.raw_file = (
            path,
            max_bytes,
            0,
            open_regular_file(path),
        )
        packed = self.raw_file.read(2) == b"\x1f\x8b"
        self.raw_file.seek(0)
        self.file = (
            cast(IO[bytes], gzip.GzipFile(fileobj=self.raw_file)) if packed else self.raw_file
        )

    def read(self, size: int) -> bytes:
        """Some bytes, of which few are unclosed brackets."""
        data = self.file.read(size)
        self.bytes_read += len(data)
        unclosed = sum(map(data.count, (b"[", b"{"))) - sum(map(data.count, (b"]", b"}")))
        if unclosed > _MAX_OPEN_BRACKETS:
            raise TraceError(f"{self.path} is no trace of torch.profiler: it is nested too deeply")
        if self.max_bytes is not None and self.bytes_read > self.max_bytes:
            raise TraceError(
                f"{self.path} is no trace of torch.profiler: it has no traceEvents in its first "
                f"{format_bytes(self.max_bytes)}"
            )
        return data

    def __enter__(self) -> IO[bytes]:
        return cast(IO[bytes], self)

    def __exit__(self, *_: object) -> None:
        self.raw_file.close()


def _parse_events(path: str | Path, events: Iterator[Any]) -> Iterator[Any]:
    """What a parser gives, its errors in our words."""
    import ijson

    try:
        yield from events
    except ijson.IncompleteJSONError as error:
        cut = "premature EOF" in str(error) or "Incomplete" in str(error)
        why = "it ends in the middle" if cut else f"it is no JSON: {_first_line(error)}"
        hint = "was the run stopped while it was written?" if cut else ""
        raise TraceError(f"{path} cannot be read: {why}", hint=hint) from None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is no JSON: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _read_header(path: str | Path) -> dict[str, Any]:
    """What stands beside the events, by name; of the events, that they are there.

    torch writes it before them; where others have changed the order it is looked for behind.
    """
    import ijson

    found: dict[str, Any] = {}
    with _TraceFile(path, _MAX_HEADER_BYTES) as file:
        builder, name = None, ""
        for prefix, event, value in _parse_events(path, ijson.parse(file, use_float=True)):
            if prefix == "" and event not in ("map_key", "start_map", "end_map"):
                break  # no object
            if prefix == "traceEvents" and event == "start_array":
                found["traceEvents"] = True
                break
            if prefix == "" and event == "map_key":
                if builder is not None:
                    found[name] = getattr(builder, "value", None)
                builder, name = ijson.ObjectBuilder() if value in _HEADER_KEYS else None, value
            elif builder is not None and prefix:
                builder.event(event, value)
                found[name] = getattr(builder, "value", None)
    for name in [name for name in _HEADER_KEYS if name not in found and "traceEvents" in found]:
        with _TraceFile(path) as file:
            for value in _parse_events(path, ijson.items(file, name, use_float=True)):
                found[name] = value
    return found


class _TraceReader:
    """Reads the events of one file, and keeps what is of use."""

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        world = header.get("distributedInfo")
        world = world if isinstance(world, dict) else {}
        rank, base = world.get("rank"), header.get("baseTimeNanoseconds", 0)
        named = _RANK_IN_NAME.search(Path(path).name)
        if type(rank) is not int:
            rank = int(named[1]) if named else None
        self.base_time = int(base) if isinstance(base, int | float) and 0 <= base < 2**62 else 0
        host, backend = str(header.get("host_name", "")), str(world.get("backend", "")).lower()
        self.trace = Trace(path, rank, host, backend, _parse_groups(world.get("pg_config")))
        self.op_end_times: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self.thread_numbers: dict[str, int] = {}
        # Rows of a correlation, a time, and a thread; and of a correlation, start, end, stream,
        # if NCCL's.
        self.launch_rows, self.kernel_rows = array("q"), array("q")

    def read(self, file: IO[bytes]) -> Trace:
        """All that the file has."""
        import ijson

        path, trace = self.trace.path, self.trace
        for event in _parse_events(path, ijson.items(file, "traceEvents.item", use_float=True)):
            if isinstance(event, dict) and event.get("ph") == "X":
                self._read_event(event)
        for ranges in (trace.instruction_ranges, trace.messages, trace.receive_waits):
            ranges.sort(key=lambda each: (each.start, -each.end))
        # Where a GPipe is marked by others, its own ranges have messages and waits in them.
        trace.instruction_ranges = [
            e for e in trace.instruction_ranges if is_torch_range(e.name)
        ] or trace.instruction_ranges
        threads = {each.thread for each in trace.instruction_ranges} | trace.autograd_threads
        trace.op_end_times = {
            thread: np.sort(np.array(ends, np.int64))
            for thread, ends in self.op_end_times.items()
            if thread in threads
        }
        if self.kernel_rows:
            trace.kernels = self._build_kernels()
        return trace

    def _read_event(self, event: dict[str, Any]) -> None:
        """Keep what is of use of one event; most are not."""
        kind, name, ts, dur = (event.get(key) for key in ("cat", "name", "ts", "dur"))
        launch = isinstance(kind, str) and kind.endswith(_LAUNCH_SUFFIXES)
        if not (launch or kind in _KEPT_CATEGORIES) or not isinstance(name, str):
            return
        if not (isinstance(ts, int | float) and isinstance(dur, int | float)):
            return
        if not (-_MAX_MICROSECONDS < ts < _MAX_MICROSECONDS and 0 <= dur < _MAX_MICROSECONDS):
            raise TraceError(
                f"{self.trace.path} has {describe(name)} at {ts:g} us for {dur:g} us: no clock "
                "says so"
            )
        start = self.base_time + round(1e3 * ts)
        end = max(start, self.base_time + round(1e3 * (ts + dur)))
        thread = self.thread_numbers.setdefault(str(event.get("tid")), len(self.thread_numbers))
        if kind == "cpu_op":
            if name in _MESSAGE_OPS:
                self.trace.messages.append(ProfilerRange(_MESSAGE_OPS[name], start, end, thread))
                return
            self.op_end_times[thread].append(end)
            if name.startswith(_AUTOGRAD_PREFIX):
                self.trace.autograd_threads.add(thread)
        elif kind == "user_annotation":
            if is_instruction_range(name):
                self.trace.instruction_ranges.append(ProfilerRange(name, start, end, thread))
            elif name in _WAIT_RANGES:
                self.trace.receive_waits.append(ProfilerRange(name, start, end, thread))
            elif step := _STEP_NAME.fullmatch(name):
                self.trace.steps[int(step[1])] = start, end
        elif (number := _correlation_id(event.get("args"))) is not None:
            if launch:
                self.launch_rows.extend((number, start, thread))
            else:
                self.kernel_rows.extend(
                    (number, start, end, thread, name.lower().startswith("nccl"))
                )

    def _build_kernels(self) -> GpuKernels:
        """What ran and was launched while the trace was taken."""
        launches = np.array(self.launch_rows, np.int64).reshape(-1, 3)
        ran = np.array(self.kernel_rows, np.int64).reshape(-1, 5)
        launches = launches[np.argsort(launches[:, 0], kind="stable")]
        at = np.searchsorted(launches[:, 0], ran[:, 0])
        inside = at < len(launches)
        known = np.zeros(len(ran), bool)
        known[inside] = launches[at[inside], 0] == ran[inside, 0]
        ran, by = ran[known], launches[at[known]]
        return GpuKernels(ran[:, 1], ran[:, 2], by[:, 1], by[:, 2], ran[:, 3], ran[:, 4] > 0)


def _parse_groups(config: object) -> tuple[tuple[int, ...], ...]:
    """The ranks of each process group, of those that say them."""
    each = [group.get("ranks") for group in config if isinstance(group, dict)] if isinstance(
        config, list) else []  # fmt: skip
    return tuple(
        tuple(ranks)
        for ranks in each
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    )


def _correlation_id(args: object) -> int | None:
    """What joins a launch and a kernel."""
    number = args.get("correlation") if isinstance(args, dict) else None
    return number if type(number) is int and 0 <= number < 2**63 else None
