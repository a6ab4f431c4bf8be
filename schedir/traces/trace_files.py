"""Find and read trace files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from schedir.errors import TraceError, UsageError
from schedir.io.files import expand_paths
from schedir.traces.kineto import Trace, read_trace

FILE_PATTERNS: Final = ("*.json", "*.json.gz")
PARALLEL_READ_BYTES: Final = (
    2**26
)  # bytes, from which on processes of their own read, and progress is of use


def find_trace_files(sources: Iterable[str | Path]) -> list[Path]:
    """The files that are named: files, folders of them, and patterns like `trace/rank*.json.gz`.

    Raises UsageError for a name that names none.
    """
    found: dict[Path, None] = {}
    for source in sources:
        if not (own := expand_paths(source, _find_in_directory)):
            raise UsageError(f"cannot read {source}: no such file")
        found |= dict.fromkeys(own)
    return [*found]


def _find_in_directory(directory: Path) -> list[Path]:
    own = sorted({file for name in FILE_PATTERNS for file in directory.glob(name)})
    if not own:
        below = sorted(
            {file.parent for name in FILE_PATTERNS for file in directory.glob(f"**/{name}")}
        )
        raise UsageError(
            f"{directory} has no traces: no {' or '.join(FILE_PATTERNS)}",
            hint=f"{below[-1]} has some" if below else "",
        )
    return own


def sum_file_sizes(files: Iterable[Path]) -> int:
    """How many bytes some files have."""
    return sum(path.stat().st_size for path in files if path.is_file())


def read_traces(
    files: Sequence[Path], on_read: Callable[[Path], object] | None = None
) -> list[Trace]:
    """What is of use in each file; large ones are read by as many processes as there are cores.

    `on_read` is called with each that was read.  Raises what `read_trace` does, and TraceError
    where none marks an instruction.
    """
    traces = []
    for path, trace in zip(files, _read_each(files), strict=True):
        traces.append(trace)
        if on_read is not None:
            on_read(path)
    if not any(trace.instruction_ranges for trace in traces):
        raise TraceError(
            f"none of {len(files)} files has a range that marks an instruction, such as PP:0F3"
            if len(files) > 1
            else f"{files[0]} has no range that marks an instruction, such as PP:0F3",
            hint="schedir.instrument() before the first step marks those of torch, Megatron-LM and "
            "DeepSpeed that do not mark themselves",
        )
    return traces


def _count_cores() -> int:
    """How many cores this process may use; not every system says that of a process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_each(files: Sequence[Path]) -> Iterator[Trace]:
    workers = min(len(files), _count_cores())
    if workers < 2 or sum_file_sizes(files) < PARALLEL_READ_BYTES:
        yield from map(read_trace, files)
        return
    # At Ctrl-C they end, as this one does, and only this one says so.
    end_quietly = signal.SIGINT, signal.SIG_DFL
    with ProcessPoolExecutor(
        workers, get_context("forkserver"), initializer=signal.signal, initargs=end_quietly
    ) as pool:
        yield from pool.map(read_trace, files)
