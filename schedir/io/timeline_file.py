"""Read and write a Timeline as a file.  `docs/traces.md` describes the format.

A zip archive of four members: `header.json`, `program.sched`, and `start.npy` and `end.npy`,
one number per instruction in the order of the program.  Nothing in it is pickled, and a file
that is no Timeline is refused before anything large is allocated.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.progress_models import MODELS
from schedir.errors import InstructionSite, SchedirError, TraceError, UsageError
from schedir.io.files import atomic_write, open_regular_file
from schedir.ir.cost.sizes import Sizes
from schedir.ir.input_trust import RAISE_LIMIT_HINT, get_max_file_instructions
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.predict.timeline import (
    MAX_TIME,
    TIME_UNITS,
    TIMELINE_KINDS,
    Timeline,
    build_spans,
    require_timelines,
)
from schedir.retired_names import RENAMED_SIZES, get_current_value
from schedir.verify.check import check

FORMAT_VERSION: Final = 1
TIMELINE_SUFFIX: Final = ".timeline"
MAX_INSTRUCTIONS: Final = 2**24  # instructions
_HEADER_FILE, _PROGRAM_FILE, _START_FILE, _END_FILE = (
    "header.json",
    "program.sched",
    "start.npy",
    "end.npy",
)
_EXTRA_PROGRAM_BYTES = 2**16  # bytes of a program beyond what its instructions take
_MAX_HEADER_BYTES = 2**23  # of a header: sizes may be one per stage and microbatch


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a Timeline to a file that `load_timeline` reads.  The same Timeline, the same bytes.

    Raises UsageError for a path that cannot be written, and for sizes that are too many numbers for
    a file, or not finite; the file is there whole or not at all.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from schedir import PipelineShape, compile, save_timeline, schedules, simulate
    >>> run = simulate(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4)))
    >>> with TemporaryDirectory() as folder:
    ...     save_timeline(run, f"{folder}/gpipe.timeline")
    ...     print(*[path.name for path in Path(folder).iterdir()])
    gpipe.timeline
    """
    require_timelines([timeline])
    header = {
        "schedir_timeline": FORMAT_VERSION,
        "instructions": len(timeline),
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "unit": timeline.unit,
        "progress_model": timeline.progress_model,
        "blocking_hosts": timeline.blocking_hosts,
        "clock_error": timeline.clock_error,
        "sizes": timeline.sizes and asdict(timeline.sizes),
    }
    try:
        said = json.dumps(header, indent=2, allow_nan=False).encode() + b"\n"
    except ValueError:
        raise UsageError(
            "a Timeline's file holds no clock_error and no sizes that are infinite or NaN",
            fields=["clock_error", "sizes"],
        ) from None
    if len(said) > _MAX_HEADER_BYTES:
        said = json.dumps(header, allow_nan=False).encode() + b"\n"
    if len(said) > _MAX_HEADER_BYTES:
        raise UsageError(
            f"sizes of {len(said)} bytes are too many for a Timeline's file, which holds "
            f"{_MAX_HEADER_BYTES}",
            hint="dataclasses.replace(timeline, sizes=None), or one number per stage",
            fields=["sizes"],
        )
    members = {
        _HEADER_FILE: said,
        _PROGRAM_FILE: to_text(timeline.program).encode(),
        _START_FILE: _encode_npy(timeline.spans["start"]),
        _END_FILE: _encode_npy(timeline.spans["end"]),
    }
    with atomic_write(path) as temporary, ZipFile(temporary, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            # A fixed date, so that a file is decided by what is in it.
            archive.writestr(ZipInfo(name), content, ZIP_DEFLATED)


def _encode_npy(values: NDArray[np.float64]) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, values.astype("<f8"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def load_timeline(path: str | Path) -> Timeline:
    """Read a Timeline from a file that `save_timeline` wrote.

    Its program is checked under the model that it ran under.  A prediction with an effect before
    its cause is refused; a measured run, whose clocks may have lied, says so (`Timeline.doubt`).

    Raises TraceError for a file that is no Timeline, what `from_text` and `check` raise for its
    program, and UsageError for a file that cannot be read.

    >>> from tempfile import TemporaryDirectory
    >>> from schedir import PipelineShape, compile, schedules, simulate
    >>> from schedir import load_timeline, save_timeline
    >>> run = simulate(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4)))
    >>> with TemporaryDirectory() as folder:
    ...     save_timeline(run, f"{folder}/gpipe.timeline")
    ...     load_timeline(f"{folder}/gpipe.timeline")
    <predicted Timeline of gpipe: span 15, bubble 20.0%>
    """
    with open_regular_file(path) as file:
        try:
            with ZipFile(file) as archive:
                return _TimelineReader(archive).read_timeline()
        except SchedirError as error:
            error.add_note(f"in {path}")
            raise
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
        except Exception as error:  # zipfile has a dozen ways to say that it cannot read a file
            raise TraceError(f"{path} is no Timeline: {error or type(error).__name__}") from None


class _TimelineReader:
    """Reads the members one after the other, each only after its size was found sound."""

    def __init__(self, archive: ZipFile) -> None:
        self.archive = archive
        names = [_HEADER_FILE, _PROGRAM_FILE, _START_FILE, _END_FILE]
        if sorted(i.filename for i in archive.infolist()) != sorted(names):
            raise TraceError(f"a Timeline's file holds {', '.join(names)}, and nothing else")

    def read_timeline(self) -> Timeline:
        header = self._read_header()
        n = header["instructions"]
        # Times come first: without them a program of one line may unfold to millions.  Those of
        # half the width are refused by their type.
        self._require_size(_START_FILE, 8 * n + 1024, 4 * n)
        self._require_size(_END_FILE, 8 * n + 1024, 4 * n)
        self._require_size(_PROGRAM_FILE, 32 * n + _EXTRA_PROGRAM_BYTES)
        program = from_text(self._read_member(_PROGRAM_FILE).decode(), max_instructions=n)
        if len(program) != n:
            raise TraceError(f"the header says {n} instructions, the program has {len(program)}")
        is_older = "model" in header  # the digest has the names of fields, some of which changed
        if program.digest != header["digest"] and not is_older:
            raise TraceError("the program is not the one whose digest the header gives")
        model, blocks = header["progress_model"], header["blocking_hosts"]
        program = check(program, model, blocking_hosts=blocks)
        start, end = self._read_times(_START_FILE, n), self._read_times(_END_FILE, n)
        _require_valid_times(program, start, end)
        spans = build_spans(program, start, end)
        timeline = Timeline(
            program, spans, header["kind"], header["unit"], model, float(header["clock_error"]),
            _parse_sizes(header.get("sizes"), program.shape), blocks,
        )  # fmt: skip
        _require_causal_order(timeline)
        return timeline

    def _read_header(self) -> dict[str, Any]:
        self._require_size(_HEADER_FILE, _MAX_HEADER_BYTES)
        header = json.loads(self._read_member(_HEADER_FILE))
        if not isinstance(header, dict) or header.get("schedir_timeline") != FORMAT_VERSION:
            raise TraceError(
                f"this reads Timelines of format {FORMAT_VERSION}, which the header is not"
            )
        for old, new in (("model", "progress_model"), ("blocks", "blocking_hosts")):
            if old in header and new in header:
                raise TraceError(f"the header has both {old} and {new}, which is its present name")
        model = header.get("progress_model", header.get("model"))  # its name in older files
        model = header["progress_model"] = get_current_value("progress_model", str(model))
        header.setdefault("blocking_hosts", header.get("blocks", False))
        n, unit, error = header.get("instructions"), header.get("unit"), header.get("clock_error")
        sound = {
            "instructions": type(n) is int and 0 <= n <= MAX_INSTRUCTIONS,
            "digest": isinstance(header.get("digest"), str),
            "kind": header.get("kind") in TIMELINE_KINDS,
            "unit": isinstance(unit, str) and unit in TIME_UNITS,
            "progress_model": model in MODELS,
            "blocking_hosts": isinstance(header["blocking_hosts"], bool),
            "clock_error": isinstance(error, int | float) and 0 <= error < math.inf,
        }
        if type(n) is int and n > (most := get_max_file_instructions()):
            raise TraceError(
                f"it has {n} instructions, and a program may have {most}"[:200],
                hint=RAISE_LIMIT_HINT,
            )
        for key, fine in sound.items():
            if not fine:
                hint = f"there are {' and '.join(map(repr, TIME_UNITS))} (units of cost)"
                raise TraceError(
                    f"the header cannot have {key} {header.get(key)!r:.80}",
                    hint=hint if key == "unit" else "",
                )
        return header

    def _require_size(self, name: str, max_bytes: int, min_bytes: int = 0) -> None:
        """Refuse a member that says it is larger or smaller than it can be, or that is packed in an
        odd way."""
        info = self.archive.getinfo(name)
        if not min_bytes <= info.file_size <= max_bytes:
            raise TraceError(f"{name} cannot have {info.file_size} bytes")
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise TraceError(f"{name} is packed by method {info.compress_type}, not deflated")

    def _read_member(self, name: str) -> bytes:
        """A member; never more of it than it says there is, so that none unfolds to a bomb."""
        info = self.archive.getinfo(name)
        with self.archive.open(info) as member:
            return member.read(info.file_size + 1)

    def _read_times(self, name: str, count: int) -> NDArray[np.float64]:
        file = BytesIO(self._read_member(name))
        if np.lib.format.read_magic(file) != (1, 0):
            raise TraceError(f"{name} is not of npy's version 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if shape != (count,) or dtype != np.dtype("<f8"):
            raise TraceError(f"{name} is {dtype} of shape {shape}, not <f8 of shape ({count},)")
        values = np.frombuffer(file.read(), "<f8").astype(float)
        if len(values) != count or not np.isfinite(values).all():
            raise TraceError(f"{name} does not have a finite time for each instruction")
        if (most := np.abs(values).max(initial=0.0)) > MAX_TIME:
            raise TraceError(f"{name} has the time {most:g}; times are at most {MAX_TIME:g}")
        return values


def _parse_sizes(value: Any, shape: PipelineShape) -> Sizes | None:
    """What the header says of sizes; nothing in files that were written before they were kept."""
    names = [f.name for f in fields(Sizes)]
    if value is None:
        return None
    if isinstance(value, dict):  # a file may be older than the names
        current = {RENAMED_SIZES.get(name, name): size for name, size in value.items()}
        if len(current) < len(value):
            raise TraceError(f"sizes give one size by two names: {value!r:.80}")
        value = current
    if not isinstance(value, dict) or not value.keys() <= {*names}:
        raise TraceError(f"sizes are {', '.join(names)}, and not {value!r:.80}")
    sizes = Sizes(**value)
    sizes.validate(shape)
    return sizes


def _require_valid_times(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> None:
    """Refuse times that no run of the program can have."""
    if (end < start).any():
        k = int((end < start).argmax())
        raise TraceError(f"instruction {k} ends at {end[k]:g}, before it starts at {start[k]:g}")
    spans = build_spans(program, start, end)
    own = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~program.joined)
    same = spans["rank"][own][1:] == spans["rank"][own][:-1]
    early = same & (start[own][1:] < end[own][:-1])
    if early.any():
        k = int(own[1:][early][0])
        raise TraceError(f"instruction {k} starts at {start[k]:g}, before its rank is free")


def _require_causal_order(timeline: Timeline) -> None:
    """Refuse a prediction in which effects come before causes."""
    if timeline.kind == "measured":
        return
    by, cause = timeline.causality_violations
    if not by.any():
        return
    worst, spans = int(by.argmax()), timeline.spans
    sites = []
    for k in (worst, int(cause[worst])):
        rank, index, instr = timeline.graph.index.locate(k)
        sites.append(
            InstructionSite(rank, index, instr, f"{spans['start'][k]:g} to {spans['end'][k]:g}")
        )
    raise TraceError(
        "a prediction cannot have an effect before its cause",
        program=timeline.program.name,
        sites=sites,
    )
