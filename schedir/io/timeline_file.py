"""Read and write a Timeline as a file. `docs/reference/file-formats.md` describes the format.

The file is a zip archive with four members: `header.json`, `program.sched`, `start.npy` and
`end.npy`. The last two have one number per instruction, in the order of the program. Nothing is
pickled. A file that is not a Timeline is refused before much memory is allocated.
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
from schedir.errors import (
    OTHER_VERSION_HINT,
    InstructionSite,
    SchedirError,
    TraceError,
    UsageError,
    describe,
)
from schedir.io.files import atomic_write, is_perfetto_export, open_regular_file
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
    require_timeline,
)
from schedir.retired_names import RENAMED_SIZES, get_current_value
from schedir.verify.check import check

FORMAT_VERSION: Final = 1
TIMELINE_SUFFIX: Final = ".timeline"
MAX_INSTRUCTIONS: Final = 2**24  # bounds the memory that a file can request
_HEADER_FILE = "header.json"
_PROGRAM_FILE = "program.sched"
_START_FILE = "start.npy"
_END_FILE = "end.npy"
# The number of bytes that a program's text may have in addition to the lines of its instructions.
_EXTRA_PROGRAM_BYTES = 2**16
_MAX_HEADER_BYTES = 2**23  # A header may have a size per stage and microbatch.


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a Timeline to a file that `load_timeline` reads.

    Equal timelines give equal bytes. The file is written completely or not at all.

    Args:
        timeline: The timeline.
        path: The file.

    Raises:
        UsageError: The file cannot be written, `timeline.sizes` has too many numbers, or a size or
            the clock error is not finite.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from schedir import PipelineShape, compile, save_timeline, schedules, simulate
        >>> run = simulate(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4)))
        >>> with TemporaryDirectory() as folder:
        ...     save_timeline(run, f"{folder}/gpipe.timeline")
        ...     print(*[path.name for path in Path(folder).iterdir()])
        gpipe.timeline
    """
    require_timeline(timeline, "timeline")
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
        encoded_header = json.dumps(header, indent=2, allow_nan=False).encode() + b"\n"
    except ValueError:
        raise UsageError(
            "cannot save the Timeline: its clock_error or its sizes contain an infinite number or "
            "NaN",
            fields=["clock_error", "sizes"],
        ) from None
    if len(encoded_header) > _MAX_HEADER_BYTES:
        encoded_header = json.dumps(header, allow_nan=False).encode() + b"\n"
    if len(encoded_header) > _MAX_HEADER_BYTES:
        raise UsageError(
            f"cannot save the Timeline: with its sizes, the header has {len(encoded_header)} "
            f"bytes, more than {_MAX_HEADER_BYTES}",
            hint="save dataclasses.replace(timeline, sizes=None), or use sizes with one number per "
            "stage",
            fields=["sizes"],
        )
    members = {
        _HEADER_FILE: encoded_header,
        _PROGRAM_FILE: to_text(timeline.program).encode(),
        _START_FILE: _encode_npy(timeline.spans["start"]),
        _END_FILE: _encode_npy(timeline.spans["end"]),
    }
    with atomic_write(path) as temporary, ZipFile(temporary, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            # ZipInfo has a fixed date, so that the bytes depend on the content only.
            archive.writestr(ZipInfo(name), content, ZIP_DEFLATED)


def _encode_npy(values: NDArray[np.float64]) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, values.astype("<f8"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def load_timeline(path: str | Path) -> Timeline:
    """Read a Timeline from a file that `save_timeline` wrote.

    The program is checked under the progress model of the run. If an effect comes before its cause
    in a prediction, an error is raised. In a measured run, clocks may be wrong, so no error is
    raised. `Timeline.causality_warning` then describes the problem.

    Args:
        path: The file.

    Returns:
        The timeline, with a checked program.

    Raises:
        TraceError: The file is not a Timeline, or an effect comes before its cause in a prediction.
        UsageError: The file cannot be read.
        SchedirError: `from_text` or `check` refuses the program.

    Example:
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
        first_bytes = file.read(8)
        if first_bytes == b"schedir ":
            raise TraceError(
                f"{path} contains a program, not a run: the file of a program ends in .sched",
                hint="schedir.from_text(text) reads the text of a program"
                if Path(path).suffix == ".sched"
                else f"rename the file to {Path(path).with_suffix('.sched')}",
            )
        file.seek(0)
        try:
            with ZipFile(file) as archive:
                return _TimelineReader(archive).read_timeline()
        except SchedirError as error:
            error.add_note(f"in {path}")
            raise
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
        except Exception as error:  # zipfile raises many types for a damaged file
            fact = f"{path} is not a Timeline file: {error or type(error).__name__}"
            hint = ""
            if first_bytes.startswith(b"PK"):
                hint = "the file is cut off or damaged: write or copy it again"
            # A JSON file, perhaps compressed by gzip, is probably a trace.
            elif first_bytes.startswith((b"{", b"[", b"\x1f\x8b")):
                name = Path(path).stem
                hint = (
                    f"give the FILE.timeline that was exported to {path}"
                    if is_perfetto_export(Path(path))
                    else f"schedir import FOLDER -o {name}.timeline reads torch.profiler traces "
                    "(.json)"
                )
            raise TraceError(fact, hint=hint) from None


class _TimelineReader:
    """Reads the members of the archive in order. It checks the size of a member before reading."""

    def __init__(self, archive: ZipFile) -> None:
        self.archive = archive
        names = [_HEADER_FILE, _PROGRAM_FILE, _START_FILE, _END_FILE]
        if sorted(i.filename for i in archive.infolist()) != sorted(names):
            raise TraceError(f"a Timeline file must contain exactly {', '.join(names)}")

    def read_timeline(self) -> Timeline:
        header = self._read_header()
        n = header["instructions"]
        # One line of a program's text can expand to millions of instructions. So the sizes of the
        # two members with times, which grow with the number of instructions, are checked first.
        # float32 times pass this check, but `_read_times` refuses them.
        self._require_size(_START_FILE, 8 * n + 1024, 4 * n)
        self._require_size(_END_FILE, 8 * n + 1024, 4 * n)
        self._require_size(_PROGRAM_FILE, 32 * n + _EXTRA_PROGRAM_BYTES)
        program = from_text(self._read_member(_PROGRAM_FILE).decode(), max_instructions=n)
        if len(program) != n:
            raise TraceError(f"the header has {n} instructions, but the program has {len(program)}")
        # Some fields were renamed, and the digest of older files contains the old names.
        is_older = "model" in header
        if program.digest != header["digest"] and not is_older:
            raise TraceError("the digest of the program differs from the digest in the header")
        model, blocking_hosts = header["progress_model"], header["blocking_hosts"]
        program = check(program, model, blocking_hosts=blocking_hosts)
        start = self._read_times(_START_FILE, n)
        end = self._read_times(_END_FILE, n)
        _require_valid_times(program, start, end)
        spans = build_spans(program, start, end)
        timeline = Timeline(
            program, spans, header["kind"], header["unit"], model, float(header["clock_error"]),
            _parse_sizes(header.get("sizes"), program.shape), blocking_hosts,
        )  # fmt: skip
        _require_causal_order(timeline)
        return timeline

    def _read_header(self) -> dict[str, Any]:
        self._require_size(_HEADER_FILE, _MAX_HEADER_BYTES)
        header = json.loads(self._read_member(_HEADER_FILE))
        if not isinstance(header, dict) or header.get("schedir_timeline") != FORMAT_VERSION:
            version = header.get("schedir_timeline") if isinstance(header, dict) else None
            raise TraceError(
                f"the header must have schedir_timeline = {FORMAT_VERSION}, not "
                f"{describe(version)}",
                hint=OTHER_VERSION_HINT if type(version) is int else "",
            )
        for old, new in (("model", "progress_model"), ("blocks", "blocking_hosts")):
            if old in header and new in header:
                raise TraceError(f"the header has both {new} and {old}, its former name")
        model = header.get("progress_model", header.get("model"))  # older files have "model"
        model = header["progress_model"] = get_current_value("progress_model", str(model))
        header.setdefault("blocking_hosts", header.get("blocks", False))
        n = header.get("instructions")
        unit = header.get("unit")
        error = header.get("clock_error")
        validity = {
            "instructions": type(n) is int and 0 <= n <= MAX_INSTRUCTIONS,
            "digest": isinstance(header.get("digest"), str),
            "kind": header.get("kind") in TIMELINE_KINDS,
            "unit": isinstance(unit, str) and unit in TIME_UNITS,
            "progress_model": model in MODELS,
            "blocking_hosts": isinstance(header["blocking_hosts"], bool),
            "clock_error": isinstance(error, int | float) and 0 <= error < math.inf,
        }
        if type(n) is int and n > (limit := get_max_file_instructions()):
            raise TraceError(
                f"the header has {n} instructions, but a program may have at most {limit}"[:200],
                hint=RAISE_LIMIT_HINT,
            )
        for key, is_valid in validity.items():
            if not is_valid:
                hint = f"the units are {' and '.join(map(repr, TIME_UNITS))} (units of cost)"
                raise TraceError(
                    f"the header has an invalid {key}: {header.get(key)!r:.80}",
                    hint=hint if key == "unit" else "",
                )
        return header

    def _require_size(self, name: str, max_bytes: int, min_bytes: int = 0) -> None:
        """Raise TraceError if the archive lists an invalid size or compression for a member."""
        info = self.archive.getinfo(name)
        if not min_bytes <= info.file_size <= max_bytes:
            raise TraceError(f"{name} has {info.file_size} bytes, not {min_bytes} to {max_bytes}")
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise TraceError(f"{name} is compressed by method {info.compress_type}, not deflate")

    def _read_member(self, name: str) -> bytes:
        """Return the bytes of a member.

        A zip bomb expands to more bytes than the archive lists. So this method reads at most one
        byte more than the listed size.
        """
        info = self.archive.getinfo(name)
        with self.archive.open(info) as member:
            return member.read(info.file_size + 1)

    def _read_times(self, name: str, count: int) -> NDArray[np.float64]:
        file = BytesIO(self._read_member(name))
        if np.lib.format.read_magic(file) != (1, 0):
            raise TraceError(f"{name} is not an npy file of version 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if shape != (count,) or dtype != np.dtype("<f8"):
            expected = f"dtype float64 and shape ({count},)"
            raise TraceError(f"{name} has dtype {dtype} and shape {shape}, not {expected}")
        values = np.frombuffer(file.read(), "<f8").astype(float)
        if len(values) != count or not np.isfinite(values).all():
            raise TraceError(f"{name} does not have a finite time for each instruction")
        if (max_time := np.abs(values).max(initial=0.0)) > MAX_TIME:
            raise TraceError(f"{name} has the time {max_time:g}; times are at most {MAX_TIME:g}")
        return values


def _parse_sizes(value: Any, shape: PipelineShape) -> Sizes | None:
    """Return the sizes in the header, or None for a file without them."""
    names = [f.name for f in fields(Sizes)]
    if value is None:
        return None
    if isinstance(value, dict):  # An older file may have former names of sizes.
        current = {RENAMED_SIZES.get(name, name): size for name, size in value.items()}
        if len(current) < len(value):
            raise TraceError(f"sizes contain one size under two names: {value!r:.80}")
        value = current
    if not isinstance(value, dict) or not value.keys() <= {*names}:
        raise TraceError(
            f"sizes must be an object with names from {', '.join(names)}, not {value!r:.80}"
        )
    sizes = Sizes(**value)
    sizes.validate(shape)
    return sizes


def _require_valid_times(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> None:
    """Raise TraceError if an end is before its start, or compute of one rank overlaps."""
    if (end < start).any():
        k = int((end < start).argmax())
        raise TraceError(f"instruction {k} has the end {end[k]:g} before its start {start[k]:g}")
    spans = build_spans(program, start, end)
    compute = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~program.joined)
    is_same_rank = spans["rank"][compute][1:] == spans["rank"][compute][:-1]
    is_early = is_same_rank & (start[compute][1:] < end[compute][:-1])
    if is_early.any():
        k = int(compute[1:][is_early][0])
        raise TraceError(
            f"instruction {k} starts at {start[k]:g}, before its rank's last compute ends"
        )


def _require_causal_order(timeline: Timeline) -> None:
    """Raise TraceError if an effect comes before its cause in a prediction."""
    if timeline.kind == "measured":
        return
    violation, cause = timeline.causality_violations
    if not violation.any():
        return
    worst_position, spans = int(violation.argmax()), timeline.spans
    sites = []
    for k in (worst_position, int(cause[worst_position])):
        rank, index, instr = timeline.graph.index.locate(k)
        sites.append(
            InstructionSite(rank, index, instr, f"{spans['start'][k]:g} to {spans['end'][k]:g}")
        )
    raise TraceError(
        "in this prediction, the first instruction below starts or ends too early: it must wait "
        "for the second",
        program=timeline.program.name,
        sites=sites,
    )
