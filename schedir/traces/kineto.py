"""Read the trace files of torch.profiler.

The format is Chrome's trace events with additions of torch (github.com/pytorch/kineto). The events
are ranges that the profiled code named (`user_annotation`), operators (`cpu_op`), launches
(`cuda_runtime`, `cuda_driver`) and the launched work (`kernel`, `gpu_memcpy`, `gpu_memset`).
`args.correlation` connects a launch and its work. `ts` and `dur` are microseconds, and absolute
time is `baseTimeNanoseconds + 1000 ts`.

A file may have gigabytes, but only a part of it is needed. So the file is parsed as a stream, and
only the needed events are kept.
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
# Ranges that start when a receive is posted, and end when a waiting thread sees the message.
_WAIT_RANGES: Final = ("gloo:recv",)
_AUTOGRAD_PREFIX: Final = "autograd::engine::"
# Suffixes of the categories of launches, such as cuda_runtime, cuda_driver, and the categories of
# other vendors.
_LAUNCH_SUFFIXES: Final = ("_runtime", "_driver")
_KEPT_CATEGORIES: Final = ("user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
# The largest time, in microseconds. In a file without a base time, times are counted from 1970. The
# time in nanoseconds must fit into int64.
_MAX_MICROSECONDS: Final = 2**61 / 1e3
# The largest number of brackets that one read may leave open. The parser needs memory for each open
# bracket.
_MAX_OPEN_BRACKETS: Final = 1000
# The largest size of the part of a file before the events, in bytes. This part usually has some
# thousand bytes, and more in large jobs.
_MAX_HEADER_BYTES: Final = 2**21
_HEADER_KEYS: Final = ("distributedInfo", "host_name", "baseTimeNanoseconds")


class ProfilerRange(NamedTuple):
    """A range of time on a thread of the host.

    Attributes:
        name: The name of the range.
        start: The start, in nanoseconds.
        end: The end, in nanoseconds.
        thread: The number of the thread within the file.
    """

    name: str
    start: int
    end: int
    thread: int


class GpuKernels(NamedTuple):
    """Kernels and copies that ran on the GPU, as arrays of shape (n,).

    Attributes:
        start: The start of each kernel or copy, in nanoseconds.
        end: Its end, in nanoseconds.
        launch_time: The time when the host launched it, in nanoseconds.
        launch_thread: The thread of the host that launched it.
        stream: The stream on which it ran.
        is_nccl: True for kernels of NCCL.
    """

    start: Ints
    end: Ints
    launch_time: Ints
    launch_thread: Ints
    stream: Ints
    is_nccl: NDArray[np.bool_]


@dataclass
class Trace:
    """The needed events of one file. Times are nanoseconds by the clock of its host.

    Attributes:
        path: The path of the file.
        rank: The rank among all processes, if the file or its name contains it; otherwise None.
        host: The name of the host, or "".
        backend: The backend of torch.distributed in lower case, or "".
        groups: The ranks of each process group that the file lists.
        instruction_ranges: The ranges that mark instructions.
        messages: The operators that post messages, named "send" and "recv".
        receive_waits: The receives, from posting until the message was seen.
        steps: The start and the end of each ProfilerStep, by its number.
        op_end_times: The end of each operator, ascending, by thread. Only of threads that mark
            instructions or run backwards.
        autograd_threads: The threads that run backwards.
        kernels: The work on the GPU. None if the file has none.
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
    """Read the events of one rank from a file of torch.profiler.

    Args:
        path: The path of the file, which may be compressed by gzip.

    Raises:
        UsageError: The file cannot be read.
        TraceError: The file is truncated, not JSON, or not a trace of torch.profiler.
    """
    try:
        header = _read_header(path)
        if "traceEvents" not in header:
            hint = "if the folder has other files, give a pattern that matches the traces only"
            if Path(path).name == "summary.json":  # `schedir train` writes it
                hint = "schedir train --trace DIR writes a timeline, which needs no import"
            raise TraceError(
                f"{path} is not a trace of torch.profiler: it has no traceEvents", hint=hint
            )
        with _TraceFile(path) as file:
            return _TraceReader(str(path), header).read(file)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
            raise TraceError(f"{path} is not a complete gzip file: {error}") from None
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


class _TraceFile:
    """A trace file, which is decompressed if it begins with the first bytes of gzip.

    `read` refuses more than `max_bytes` bytes. It also refuses files with many unclosed brackets,
    because a parser keeps all of them in memory.
    """

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.bytes_read = 0
        self.raw_file = open_regular_file(path)
        is_gzip = self.raw_file.read(2) == b"\x1f\x8b"
        self.raw_file.seek(0)
        self.file = (
            cast(IO[bytes], gzip.GzipFile(fileobj=self.raw_file)) if is_gzip else self.raw_file
        )

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes.

        Raises:
            TraceError: The bytes have too many unclosed brackets, or exceed `max_bytes`.
        """
        data = self.file.read(size)
        self.bytes_read += len(data)
        num_unclosed = sum(map(data.count, (b"[", b"{"))) - sum(map(data.count, (b"]", b"}")))
        if num_unclosed > _MAX_OPEN_BRACKETS:
            raise TraceError(f"{self.path} is nested too deeply for a trace of torch.profiler")
        if self.max_bytes is not None and self.bytes_read > self.max_bytes:
            raise TraceError(
                f"{self.path} is not a trace of torch.profiler: it has no traceEvents in its first "
                f"{format_bytes(self.max_bytes)}"
            )
        return data

    def __enter__(self) -> IO[bytes]:
        return cast(IO[bytes], self)

    def __exit__(self, *_: object) -> None:
        self.raw_file.close()


def _parse_events(path: str | Path, events: Iterator[Any]) -> Iterator[Any]:
    """Yield the results of a parser, and raise its errors as TraceError."""
    import ijson

    try:
        yield from events
    except ijson.IncompleteJSONError as error:
        is_cut_off = "premature EOF" in str(error) or "Incomplete" in str(error)
        reason = "it is cut off" if is_cut_off else f"it is not JSON: {_first_line(error)}"
        hint = "was the run stopped while it wrote the trace?" if is_cut_off else ""
        raise TraceError(f"{path} cannot be read: {reason}", hint=hint) from None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is not JSON: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _read_header(path: str | Path) -> dict[str, Any]:
    """Return the needed values outside of the events, by name.

    The result also has the key `traceEvents` if the file has events. torch writes the values before
    the events. If another tool changed the order, further passes over the file read the values
    after the events.
    """
    import ijson

    header: dict[str, Any] = {}
    with _TraceFile(path, _MAX_HEADER_BYTES) as file:
        builder, name = None, ""
        for prefix, event, value in _parse_events(path, ijson.parse(file, use_float=True)):
            if prefix == "" and event not in ("map_key", "start_map", "end_map"):
                break  # the file is not an object
            if prefix == "traceEvents" and event == "start_array":
                header["traceEvents"] = True
                break
            if prefix == "" and event == "map_key":
                if builder is not None:
                    header[name] = getattr(builder, "value", None)
                builder, name = ijson.ObjectBuilder() if value in _HEADER_KEYS else None, value
            elif builder is not None and prefix:
                builder.event(event, value)
                header[name] = getattr(builder, "value", None)
    for name in [name for name in _HEADER_KEYS if name not in header and "traceEvents" in header]:
        with _TraceFile(path) as file:
            for value in _parse_events(path, ijson.items(file, name, use_float=True)):
                header[name] = value
    return header


class _TraceReader:
    """Reads the events of one file, and keeps the needed ones."""

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        distributed_info = header.get("distributedInfo")
        distributed_info = distributed_info if isinstance(distributed_info, dict) else {}
        rank = distributed_info.get("rank")
        base = header.get("baseTimeNanoseconds", 0)
        match = _RANK_IN_NAME.search(Path(path).name)
        if type(rank) is not int:
            rank = int(match[1]) if match else None
        self.base_time = int(base) if isinstance(base, int | float) and 0 <= base < 2**62 else 0
        host = str(header.get("host_name", ""))
        backend = str(distributed_info.get("backend", "")).lower()
        self.trace = Trace(
            path, rank, host, backend, _parse_groups(distributed_info.get("pg_config"))
        )
        self.op_end_times: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self.thread_numbers: dict[str, int] = {}
        # Concatenated rows of integers. A launch has the columns correlation, time and thread. A
        # kernel has the columns correlation, start, end, stream, and 1 if it is of NCCL.
        self.launch_rows = array("q")
        self.kernel_rows = array("q")

    def read(self, file: IO[bytes]) -> Trace:
        """Read all events of the file."""
        import ijson

        path, trace = self.trace.path, self.trace
        for event in _parse_events(path, ijson.items(file, "traceEvents.item", use_float=True)):
            if isinstance(event, dict) and event.get("ph") == "X":
                self._read_event(event)
        for ranges in (trace.instruction_ranges, trace.messages, trace.receive_waits):
            ranges.sort(key=lambda profiler_range: (profiler_range.start, -profiler_range.end))
        # A run of torch's GPipe may have ranges with torch's names (`PP:...`) and ranges with other
        # names. If a trace has both, only the ranges with torch's names are kept, because each of
        # them contains only one instruction. The other ranges also contain messages and waits.
        trace.instruction_ranges = [
            e for e in trace.instruction_ranges if is_torch_range(e.name)
        ] or trace.instruction_ranges
        threads = {
            profiler_range.thread for profiler_range in trace.instruction_ranges
        } | trace.autograd_threads
        trace.op_end_times = {
            thread: np.sort(np.array(ends, np.int64))
            for thread, ends in self.op_end_times.items()
            if thread in threads
        }
        if self.kernel_rows:
            trace.kernels = self._build_kernels()
        return trace

    def _read_event(self, event: dict[str, Any]) -> None:
        """Keep the needed parts of one event. Most events are not needed."""
        kind, name, ts, dur = (event.get(key) for key in ("cat", "name", "ts", "dur"))
        is_launch = isinstance(kind, str) and kind.endswith(_LAUNCH_SUFFIXES)
        if not (is_launch or kind in _KEPT_CATEGORIES) or not isinstance(name, str):
            return
        if not (isinstance(ts, int | float) and isinstance(dur, int | float)):
            return
        if not (-_MAX_MICROSECONDS < ts < _MAX_MICROSECONDS and 0 <= dur < _MAX_MICROSECONDS):
            raise TraceError(
                f"{self.trace.path}: event {describe(name)} has an invalid time: it starts at "
                f"{ts:g} us and lasts {dur:g} us"
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
            if is_launch:
                self.launch_rows.extend((number, start, thread))
            else:
                self.kernel_rows.extend(
                    (number, start, end, thread, name.lower().startswith("nccl"))
                )

    def _build_kernels(self) -> GpuKernels:
        """Return the kernels whose launch is in the trace."""
        launches = np.array(self.launch_rows, np.int64).reshape(-1, 3)
        kernels = np.array(self.kernel_rows, np.int64).reshape(-1, 5)
        launches = launches[np.argsort(launches[:, 0], kind="stable")]
        launch_indices = np.searchsorted(launches[:, 0], kernels[:, 0])
        is_in_range = launch_indices < len(launches)
        has_launch = np.zeros(len(kernels), bool)
        has_launch[is_in_range] = (
            launches[launch_indices[is_in_range], 0] == kernels[is_in_range, 0]
        )
        kernels, kernel_launches = kernels[has_launch], launches[launch_indices[has_launch]]
        return GpuKernels(
            kernels[:, 1],
            kernels[:, 2],
            kernel_launches[:, 1],
            kernel_launches[:, 2],
            kernels[:, 3],
            kernels[:, 4] > 0,
        )


def _parse_groups(config: object) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each process group that lists its ranks."""
    rank_lists = [group.get("ranks") for group in config if isinstance(group, dict)] if isinstance(
        config, list) else []  # fmt: skip
    return tuple(
        tuple(ranks)
        for ranks in rank_lists
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    )


def _correlation_id(args: object) -> int | None:
    """Return the number that connects a launch and a kernel, or None."""
    number = args.get("correlation") if isinstance(args, dict) else None
    return number if type(number) is int and 0 <= number < 2**63 else None
