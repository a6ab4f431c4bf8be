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
from schedir.io.files import expand_paths, is_perfetto_export
from schedir.traces.kineto import Trace, read_trace

FILE_PATTERNS: Final = ("*.json", "*.json.gz")
# Bytes. Larger inputs are read in several processes, and the command shows its progress.
PARALLEL_READ_BYTES: Final = 2**26


def find_trace_files(sources: Iterable[str | Path]) -> list[Path]:
    """Return the trace files that some names refer to, each once.

    Args:
        sources: Files, directories, and patterns such as `trace/rank*.json.gz`. A directory means
            its `*.json` and `*.json.gz` files.

    Raises:
        UsageError: A name refers to no file.
    """
    paths: dict[Path, None] = {}
    for source in sources:
        if not (source_paths := expand_paths(source, _find_in_directory)):
            raise UsageError(f"cannot read {source}: no such file")
        paths |= dict.fromkeys(source_paths)
    return [*paths]


def _find_in_directory(directory: Path) -> list[Path]:
    paths = sorted({file for name in FILE_PATTERNS for file in directory.glob(name)})
    if not paths:
        subfolders = sorted(
            {file.parent for name in FILE_PATTERNS for file in directory.glob(f"**/{name}")}
        )
        raise UsageError(
            f"{directory} has no traces: no file matches {' or '.join(FILE_PATTERNS)}",
            hint=f"{subfolders[-1]} has traces" if subfolders else "",
        )
    return paths


def sum_file_sizes(files: Iterable[Path]) -> int:
    """Return the total size of the existing files, in bytes.

    Args:
        files: Paths. A path that is not a file counts as 0 bytes.
    """
    return sum(path.stat().st_size for path in files if path.is_file())


def read_traces(
    files: Sequence[Path], on_read: Callable[[Path], object] | None = None
) -> list[Trace]:
    """Read trace files, with one process per core if the files are large.

    Args:
        files: The files to read.
        on_read: A function that is called with each file after the file was read.

    Returns:
        One trace for each file.

    Raises:
        UsageError: See `read_trace`.
        TraceError: See `read_trace`. Or no file marks an instruction.
    """
    traces = []
    for path, trace in zip(files, _read_each(files), strict=True):
        traces.append(trace)
        if on_read is not None:
            on_read(path)
    if not any(trace.instruction_ranges for trace in traces):
        for path in files:
            if is_perfetto_export(path):
                raise TraceError(
                    f"{path} was written by schedir export --to perfetto, and cannot be imported: "
                    "it contains no profiler ranges",
                    hint="use the FILE.timeline or FILE.sched that was exported; commands such as "
                    "schedir explain read it without an import",
                )
        raise TraceError(
            f"none of {len(files)} files has a range of an instruction, such as PP:0F3"
            if len(files) > 1
            else f"{files[0]} has no range of an instruction, such as PP:0F3",
            hint="call schedir.instrument() before the first step of torch, Megatron-LM or "
            "DeepSpeed, to add the ranges",
        )
    return traces


def _count_cores() -> int:
    """Return the number of cores that this process may use.

    If this number is unknown, return the number of all cores.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_each(files: Sequence[Path]) -> Iterator[Trace]:
    workers = min(len(files), _count_cores())
    if workers < 2 or sum_file_sizes(files) < PARALLEL_READ_BYTES:
        yield from map(read_trace, files)
        return
    # At Ctrl-C the workers must end without a traceback, because this process reports the error.
    end_quietly = signal.SIGINT, signal.SIG_DFL
    with ProcessPoolExecutor(
        workers, get_context("forkserver"), initializer=signal.signal, initargs=end_quietly
    ) as pool:
        yield from pool.map(read_trace, files)
