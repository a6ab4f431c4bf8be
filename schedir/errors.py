"""The errors with which schedir refuses input.  A defect of schedir raises another exception.

An error carries its facts as fields; the message is built from them, so that a program can
read what a person reads.  Line 1 says which program and what is wrong, then come the
instructions concerned (`rank R #I instr`), a window of a Stream, and a hint where it is sure.

>>> from schedir import PipelineShape, check, compile, errors, from_text, schedules, to_text
>>> text = to_text(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=2)), folded=False)
>>> try:
...     check(from_text(text.replace("recv_grad 0.1", "")))
... except errors.SchedirError as error:
...     refusal = error
>>> type(refusal).__name__, refusal.program, refusal.fact
('UnmatchedTransferError', 'gpipe', 'send_grad 1.1 has no recv_grad 0.1 on rank 0')
>>> [(site.rank, site.index, str(site.instr)) for site in refusal.sites]
[(1, 8, 'send_grad 1.1')]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from numbers import Real

_MAX_LINE_WIDTH = 160  # characters of a line that are shown


def format_bytes(size: float) -> str:
    """A number of bytes for people to read, in powers of ten: `1.5 GB`.

    >>> format_bytes(40e9), format_bytes(1234567), format_bytes(12)
    ('40 GB', '1.235 MB', '12 B')
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = next((k for k in range(len(units) - 1, 0, -1) if size >= 1000**k), 0)
    return f"{size / 1000**power:.4g} {units[power]}"


def describe_exception(error: BaseException) -> str:
    """An exception as its kind and, if it has any, the first line of its words.

    >>> describe_exception(ValueError("no\\nnever")), describe_exception(MemoryError())
    ('ValueError: no', 'MemoryError')
    """
    try:
        line = str(error).strip().partition("\n")[0]
    except Exception:  # of a class that cannot be said
        line = ""
    line = line if len(line) <= 1000 else f"{line[:1000]}..."
    return f"{type(error).__name__}: {line}".removesuffix(": ")


@dataclass(frozen=True)
class InstructionSite:
    """An instruction that an error speaks of: where it stands, and what is to be said of it."""

    rank: int
    index: int
    instr: object
    note: str = ""


@dataclass(frozen=True)
class CycleWait:
    """One step of a cycle: an instruction at the head of its queue, and what it waits for.

    `current_index` is the index at which the queue of the needed instruction stands.
    """

    rank: int
    index: int
    instr: object
    needed_instr: object
    needed_rank: int
    needed_index: int
    current_index: int


class SchedirError(Exception):
    """A program, or what was to become one, is refused.

    `fact` is one sentence, `program` the name of the program, `sites` the instructions
    concerned, `hint` what would be right, given only where that is sure.  `fields` are the settings
    that do not fit, by their names in `PipelineShape`, `Program` or a configuration, the likeliest
    first.
    """

    def __init__(
        self,
        fact: str,
        *,
        program: str = "",
        sites: Sequence[InstructionSite] = (),
        hint: str = "",
        fields: Sequence[str] = (),
    ) -> None:
        super().__init__(fact)
        self.fact = fact
        self.program = program
        self.sites = tuple(sites)
        self.hint = hint
        self.fields = tuple(fields)

    def format_lines(self) -> list[str]:
        """The body of the message, a line each, without the first and the hint."""
        width = max((len(str(s.instr)) for s in self.sites), default=0)
        return [
            f"rank {s.rank} #{s.index:<3} {s.instr!s:<{width}}  {s.note}".rstrip()
            for s in self.sites
        ]

    def __str__(self) -> str:
        head = f"{self.program}: {self.fact}" if self.program else self.fact
        hint = [f"hint: {self.hint}"] if self.hint else []
        return "\n".join([head, *(f"  {line}" for line in [*self.format_lines(), *hint])])


class UsageError(SchedirError):
    """A command, an option, a configuration or a file name that cannot be used."""


def describe(value: object) -> str:
    """Return a value as a short text for an error message.

    >>> describe((2, 3)), describe(int), describe([0] * 99), describe(describe)
    ('(2, 3)', 'the class int', 'a list', 'the function describe')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if type(value).__name__ == "function":
        return f"the function {getattr(value, '__name__', '')}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {list(value.shape)} of {value.dtype}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a whole number of more than 30 digits"
    try:
        words = repr(value)
    except (RecursionError, ValueError):  # deep nesting, or an int of thousands of digits
        words = "\n"
    plain = len(words) <= 60 and "\n" not in words and " at 0x" not in words
    return words if plain else f"a {type(value).__name__}"


def require_type(value: object, kind: type, example: str) -> None:
    """Raise UsageError for a value of another kind, with an expression that gives the right one."""
    if not isinstance(value, kind):
        raise UsageError(
            f"this takes a {kind.__name__}, not {describe(value)}", hint=f"such as {example}"
        )


def to_float(value: object) -> float | None:
    """A number, as numpy and fractions say it, too; None for anything else, for NaN, and for one
    that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return None if isnan(found) else found


def require_bool(value: object, name: str) -> bool:
    """True or False, as numpy and 1 and 0 say it, too.  Raises UsageError for anything else."""
    if type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise UsageError(f"{name} is True or False, not {describe(value)}", fields=[name])


class ConfigError(UsageError):
    """A setting that cannot be used; `location` is its file, or the option that gave it.

    `line` and `column` count from 1, and are 0 where the setting has no place of its own.
    """

    def __init__(
        self,
        fact: str,
        *,
        location: str,
        line: int = 0,
        column: int = 0,
        hint: str = "",
        fields: Sequence[str] = (),
    ) -> None:
        place = f"{location}, line {line}, column {column}" if line else location
        super().__init__(fact, program=place, hint=hint, fields=fields)
        self.location = location
        self.line, self.column = line, column


class CheckpointError(SchedirError):
    """A checkpoint, or a folder of them, that cannot be read or written; of which `step`, and which
    of its files, where it is one."""

    def __init__(self, fact: str, step: int | None = None, file: str = "", hint: str = "") -> None:
        super().__init__(fact, hint=hint)
        self.step, self.file = step, file


class ShapeError(SchedirError):
    """A shape that cannot be: no ranks, too many microbatches, a placement with holes."""


class CostsError(SchedirError):
    """Costs that are negative, not finite, or not one per stage."""


class ScheduleError(SchedirError):
    """A schedule function that raises, returns no words, or names what its rank does not own."""


class ParseError(SchedirError):
    """A program text that does not follow the grammar; `line` and `column` count from 1."""

    location_format = "line {line}, column {column}"

    def __init__(
        self, fact: str, *, line: int, column: int, text: str = "", hint: str = ""
    ) -> None:
        super().__init__(fact, hint=hint)
        self.line = line
        self.column = column
        self.text = text

    def format_lines(self) -> list[str]:
        if not self.text:
            return []
        begin = (
            max(self.column - 1 - _MAX_LINE_WIDTH // 2, 0)
            if len(self.text) > _MAX_LINE_WIDTH
            else 0
        )
        return [self.text[begin : begin + _MAX_LINE_WIDTH], " " * (self.column - 1 - begin) + "^"]

    def __str__(self) -> str:
        self.program = self.location_format.format(line=self.line, column=self.column)
        return super().__str__()


class TraceError(SchedirError):
    """A file that is no Timeline, trace or dump: cut off, foreign, or with what no run can have."""


class CsvCellError(ParseError):
    """A cell of a CSV that is no action, or does not go with the others.

    `line` is its row and `column` which cell of it, from 1.
    """

    location_format = "row {line}, column {column}"


class LoweringLevelError(SchedirError):
    """A draft (compute only) where a lowered program is needed, or the reverse."""


class CompletenessError(SchedirError):
    """Work that is missing, there twice, out of range, or on a rank that does not own it."""


class UnmatchedTransferError(CompletenessError):
    """A transfer or collective whose other side is missing or comes twice."""


class ReductionError(CompletenessError):
    """A reduction or an optimizer step that is missing or comes twice."""


class GroupError(SchedirError):
    """Instructions issued as one that cannot be."""


class OrderError(SchedirError):
    """A Stream that uses a value before the instruction that gives it."""


class SlotError(SchedirError):
    """A Stream that fills more slots of a kind than its rank has."""


class MemoryLimitError(SchedirError):
    """A rank that would hold more bytes on a tier than it may; `live_values` says of what, how
    many."""

    def __init__(
        self,
        *,
        program: str = "",
        limit_bytes: float,
        required_bytes: float,
        live_values: Sequence[tuple[str, int, float]],
        site: InstructionSite,
        hint: str = "",
        tier: str = "device",
    ) -> None:
        more = format_bytes(required_bytes) + f" on the {tier}" * (tier != "device")
        fact = f"rank {site.rank} would hold {more}, and may hold {format_bytes(limit_bytes)}"
        super().__init__(fact, program=program, sites=[site], hint=hint)
        self.limit_bytes, self.required_bytes, self.tier, self.live_values = (
            limit_bytes,
            required_bytes,
            tier,
            tuple(live_values),
        )

    def format_lines(self) -> list[str]:
        width = max((len(name) for name, _, _ in self.live_values), default=0)
        most = max((len(str(number)) for _, number, _ in self.live_values), default=0)
        return [
            *super().format_lines(),
            *(
                f"  {name:<{width}}  {number:>{most}}  {format_bytes(size):>8}"
                for name, number, size in self.live_values
            ),
        ]


class DeadlockError(SchedirError):
    """Ranks that wait for each other under a progress model; `cycle` says who for what.

    `eager` is the least limit in bytes with which the program would finish, where `check` was told
    of sizes and there is one: messages that are no larger would have to wait for nobody.
    """

    def __init__(
        self,
        fact: str,
        *,
        program: str = "",
        progress_model: str,
        cycle: Sequence[CycleWait],
        executed_count: int,
        instruction_count: int,
        window: Sequence[InstructionSite] = (),
        hint: str = "",
    ) -> None:
        super().__init__(fact, program=program, sites=window, hint=hint)
        self.progress_model = progress_model
        self.cycle = tuple(cycle)
        self.executed_count = executed_count
        self.instruction_count = instruction_count
        self.eager_limit: float | None = None

    def format_lines(self) -> list[str]:
        width = max(len(str(w.instr)) for w in self.cycle)
        chain = [
            f"rank {w.rank} #{w.index:<3} {w.instr!s:<{width}}  needs {w.needed_instr} from rank "
            f"{w.needed_rank}, which is #{w.needed_index} there, and rank {w.needed_rank} stands "
            f"at #{w.current_index}"
            for w in self.cycle
        ]
        if not self.sites:
            return chain
        head = self.cycle[0].current_index
        width = max(len(str(s.instr)) for s in self.sites)
        around = [
            f"{'>' if s.index == head else ' '} #{s.index:<3} {s.instr!s:<{width}}  {s.note}"
            for s in self.sites
        ]
        return [*chain, f"around rank {self.sites[0].rank}:", *map(str.rstrip, around)]


class ChannelMismatchError(SchedirError):
    """A message whose two ends do not meet: they are on different communicators, which is so under
    the progress model "torch", or each meets another on the same."""


class ProgramSequenceError(SchedirError):
    """Steps of different ranks that meet each other's messages, or wait for each other.

    `sites` are the instructions concerned, each with the step that it is of; `model` is the
    progress model.
    """

    def __init__(
        self, fact: str, *, progress_model: str, sites: Sequence[InstructionSite], hint: str = ""
    ) -> None:
        super().__init__(fact, sites=sites, hint=hint)
        self.progress_model = progress_model


class ModelError(SchedirError):
    """A model that does not fit the program: layers, shapes, ties, or a transport too weak."""


class ExecutionError(SchedirError):
    """A run that failed: `sites` says at which instruction of which rank."""


class NonFiniteError(ExecutionError):
    """A step (from 1) with a loss or a gradient that is infinite or NaN, and so not taken.

    `sites` says where it began, if that could be found: the first stage whose output is not finite
    where it is a loss, else the last stage, from which gradients come, whose gradients are not.
    `process` is the one that has this stage.
    """

    def __init__(
        self,
        fact: str,
        *,
        program: str = "",
        sites: Sequence[InstructionSite] = (),
        hint: str = "",
        step: int,
        process: int = 0,
    ) -> None:
        super().__init__(fact, program=program, sites=sites, hint=hint)
        self.step, self.process = step, process
