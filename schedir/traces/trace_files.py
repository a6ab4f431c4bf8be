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
from schedir.io.files import named
from schedir.traces.kineto import Trace, read_trace

NAMES: Final = ("*.json", "*.json.gz")
LARGE: Final = 2**26  # bytes, from which on processes of their own read, and progress is of use


def files_of(sources: Iterable[str | Path]) -> list[Path]:
    """The files that are named: files, folders of them, and patterns like `trace/rank*.json.gz`.

    Raises UsageError for a name that names none.
    """
    found: dict[Path, None] = {}
    for source in sources:
        if not (own := named(source, _in_folder)):
            raise UsageError(f"cannot read {source}: no such file")
        found |= dict.fromkeys(own)
    return [*found]


def _in_folder(folder: Path) -> list[Path]:
    own = sorted({file for name in NAMES for file in folder.glob(name)})
    if not own:
        below = sorted({file.parent for name in NAMES for file in folder.glob(f"**/{name}")})
        raise UsageError(
            f"{folder} has no traces: no {' or '.join(NAMES)}",
            hint=f"{below[-1]} has some" if below else "",
        )
    return own


def size_of(files: Iterable[Path]) -> int:
    """How many bytes some files have."""
    return sum(path.stat().st_size for path in files if path.is_file())


def read_all(files: Sequence[Path], seen: Callable[[Path], object] | None = None) -> list[Trace]:
    """What is of use in each file; large ones are read by as many processes as there are cores.

    `seen` is called with each that was read.  Raises what `read_trace` does, and TraceError where
    none marks an instruction.
    """
    traces = []
    for path, trace in zip(files, _each(files), strict=True):
        traces.append(trace)
        if seen is not None:
            seen(path)
    if not any(trace.marked for trace in traces):
        raise TraceError(
            f"none of {len(files)} files has a range that marks an instruction, such as PP:0F3"
            if len(files) > 1
            else f"{files[0]} has no range that marks an instruction, such as PP:0F3",
            hint="schedir.instrument() before the first step marks those of torch, Megatron-LM and "
            "DeepSpeed that do not mark themselves",
        )
    return traces


def _cores() -> int:
    """How many cores this process may use; not every system says that of a process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _each(files: Sequence[Path]) -> Iterator[Trace]:
    workers = min(len(files), _cores())
    if workers < 2 or size_of(files) < LARGE:
        yield from map(read_trace, files)
        return
    # At Ctrl-C they end, as this one does, and only this one says so.
    end_quietly = signal.SIGINT, signal.SIG_DFL
    with ProcessPoolExecutor(
        workers, get_context("forkserver"), initializer=signal.signal, initargs=end_quietly
    ) as pool:
        yield from pool.map(read_trace, files)
