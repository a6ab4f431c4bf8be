"""The errors that schedir raises when it refuses input.

A bug in schedir raises an exception of any other class.

An error has its facts as attributes, and builds its message from them.  So code can read the same
facts as a person. The first line of the message has the name of the program and the fact. The next
lines show the instructions that the error is about (`rank R #I instr`), and for some errors a part
of a Stream. The last line is a hint, if there is one.

Example:
    >>> from schedir import PipelineShape, check, compile, errors, from_text, schedules, to_text
    >>> text = to_text(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=2)),
    ...     folded=False)
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

import copyreg
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from numbers import Real
from typing import Any

# The hint for a file whose format has another number.
OTHER_VERSION_HINT = (
    "another version of schedir wrote the file: use that version, or write the file again"
)
_MAX_LINE_WIDTH = 160  # characters; a message cuts longer lines of a program text


def format_bytes(size: float) -> str:
    """Return a number of bytes as text, in powers of ten: `1.5 GB`.

    Args:
        size: Number of bytes.

    Example:
        >>> format_bytes(40e9), format_bytes(1234567), format_bytes(12)
        ('40 GB', '1.235 MB', '12 B')
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = next((k for k in range(len(units) - 1, 0, -1) if size >= 1000**k), 0)
    return f"{size / 1000**power:.4g} {units[power]}"


def describe_exception(error: BaseException) -> str:
    r"""Return the type of an exception and the first line of its message, if there is a message.

    Args:
        error: The exception.

    Returns:
        The text, with at most 1000 characters of the message.

    Example:
        >>> describe_exception(ValueError("no\nnever")), describe_exception(MemoryError())
        ('ValueError: no', 'MemoryError')
    """
    try:
        line = str(error).strip().partition("\n")[0]
    except Exception:  # the class has a broken __str__
        line = ""
    line = line if len(line) <= 1000 else f"{line[:1000]}..."
    return f"{type(error).__name__}: {line}".removesuffix(": ")


@dataclass(frozen=True)
class InstructionSite:
    """An instruction in an error message, with its place in the program.

    Args:
        rank: Rank of the instruction.
        index: Index of the instruction in the rank's Stream.
        instr: The instruction.
        note: Text that follows the instruction in the message, such as "gives it".
        replica: The data-parallel replica of the rank; None if all replicas have the instruction.
    """

    rank: int
    index: int
    instr: object
    note: str = ""
    replica: int | None = None


@dataclass(frozen=True)
class CycleWait:
    """One wait of a cycle: the next instruction of a queue and the instruction that it waits for.

    Args:
        rank: Rank of the instruction that waits.
        index: Index of this instruction in the rank's Stream.
        instr: The instruction that waits.
        needed_instr: The instruction for which `instr` waits.
        needed_rank: Rank of `needed_instr`.
        needed_index: Index of `needed_instr` in the Stream of its rank.
        current_index: Index of the first instruction that has not started in the queue of
            `needed_instr`.
        replica: The data-parallel replica of the instruction that waits. Only `check_replicas` sets
            this field.
        needed_replica: The replica of `needed_instr`. Only `check_replicas` sets this field.
    """

    rank: int
    index: int
    instr: object
    needed_instr: object
    needed_rank: int
    needed_index: int
    current_index: int
    replica: int | None = None
    needed_replica: int | None = None


def _format_rank(rank: int, replica: int | None) -> str:
    """Return the name of a rank in a message."""
    return f"rank {rank}" if replica is None else f"rank {rank} of replica {replica}"


class SchedirError(Exception):
    """The base class of all errors that schedir raises when it refuses input.

    Each argument is also an attribute.  The attributes `sites` and `fields` are tuples.

    Args:
        fact: One sentence with the reason.
        program: Name of the program, the first part of the message; "" if there is none.
        sites: The instructions that the error is about.
        hint: A suggestion for correcting the input; "" if there is none. If schedir is
            not certain of the cause, the hint is a question or has a condition.
        fields: Names of the settings that do not fit, the most likely cause first.  A name is a
            field of `PipelineShape` or `Program`, a setting of a configuration, or an argument of
            an executor.
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
        self.sites: tuple[InstructionSite, ...] = tuple(sites)
        self.hint = hint
        self.fields: tuple[str, ...] = tuple(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # The method of Exception passes only `fact` to the class. Some classes need more arguments.
        reduced: Any = super().__reduce__()
        _, args, *state = reduced
        return copyreg.__newobj__, (type(self), *args), *state  # type: ignore[attr-defined]

    def format_lines(self) -> list[str]:
        """Return the lines of the message between the first line and the hint."""
        width = max((len(str(s.instr)) for s in self.sites), default=0)
        return [
            f"{_format_rank(s.rank, s.replica)} #{s.index:<3} {s.instr!s:<{width}}  "
            f"{s.note}".rstrip()
            for s in self.sites
        ]

    def __str__(self) -> str:
        head = f"{self.program}: {self.fact}" if self.program else self.fact
        hint = [f"hint: {self.hint}"] if self.hint else []
        return "\n".join([head, *(f"  {line}" for line in [*self.format_lines(), *hint])])


class CommandHint(str):
    """A hint for Python, with the same hint for the command line.

    The string itself is the hint for Python.  The command line prints `command` instead.

    Args:
        python: The hint with arguments of Python, such as "zero=3".
        command: The hint with options of the command line, such as "-O zero=3".

    Example:
        >>> hint = CommandHint("zero=3", "-O zero=3")
        >>> hint, hint.command
        ('zero=3', '-O zero=3')
    """

    command: str

    def __new__(cls, python: str, command: str) -> CommandHint:  # noqa: D102
        hint = super().__new__(cls, python)
        hint.command = command
        return hint

    def __reduce__(self) -> tuple[type[CommandHint], tuple[str, str]]:
        return CommandHint, (str(self), self.command)


class UsageError(SchedirError):
    """A command, an option, a configuration or a file name that cannot be used."""


def describe(value: object) -> str:
    """Return a value as a short text for an error message.

    Args:
        value: Any object.

    Example:
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
        return "an integer of more than 30 digits"
    try:
        words = repr(value)
    except (RecursionError, ValueError):  # deep nesting, or an int of thousands of digits
        words = "\n"
    plain = len(words) <= 60 and "\n" not in words and " at 0x" not in words
    return words if plain else f"a {type(value).__name__}"


def require_type(value: object, name: str, kind: type, example: str) -> None:
    """Raise an error if an argument does not have the required type.

    Args:
        value: The value.
        name: Name of the argument, for the error message.
        kind: The required type.
        example: An expression for a valid value, for the hint.

    Raises:
        UsageError: `value` is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOUi" else "a"
        raise UsageError(
            f"{name} must be {article} {kind.__name__}, not {describe(value)}",
            hint=f"for example {example}",
            fields=[name],
        )


def to_float(value: object) -> float | None:
    """Return a number as a float, or None if it is not a usable number.

    Args:
        value: Any object. Numbers include the numbers of numpy and `fractions`, but not booleans.

    Returns:
        The float.  The result is None for NaN, for a number that is too large for a float, and for
        all objects that are not real numbers.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if isnan(number) else number


def require_bool(value: object, name: str, hint: str = "") -> bool:
    """Convert a user's value of a boolean setting to a bool.

    Args:
        value: A bool, a numpy bool, or the integer 0 or 1.
        name: Name of the setting, for the error message.
        hint: The hint of the error.

    Raises:
        UsageError: `value` is anything else.
    """
    if type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    fact = f"{name} must be True or False, not {describe(value)}"
    raise UsageError(fact, hint=hint, fields=[name])


class ConfigError(UsageError):
    """A setting that cannot be used.

    Each argument is also an attribute.

    Args:
        fact: One sentence with the reason.
        location: The file of the setting, or the option that gave the setting.
        line: Line of the setting, from 1; 0 if it is unknown.
        column: Column of the setting, from 1; 0 if it is unknown.
        hint: A suggestion for correcting the input.
        fields: Names of the settings that do not fit.
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
        location_text = f"{location}, line {line}, column {column}" if line else location
        super().__init__(fact, program=location_text, hint=hint, fields=fields)
        self.location = location
        self.line: int = line
        self.column: int = column


class CheckpointError(SchedirError):
    """A checkpoint, or a directory of checkpoints, that cannot be read or written.

    Each argument is also an attribute.

    Args:
        fact: One sentence with the reason.
        step: Training step of the checkpoint; None if the error concerns no single checkpoint.
        file: The file of the checkpoint that caused the error; "" if there is none.
        hint: A suggestion for correcting the input.
    """

    def __init__(self, fact: str, step: int | None = None, file: str = "", hint: str = "") -> None:
        super().__init__(fact, hint=hint)
        self.step: int | None = step
        self.file: str = file


class ShapeError(SchedirError):
    """A pipeline shape that is not possible, such as no ranks, or a rank without a stage."""


class CostsError(SchedirError):
    """Costs that are not valid numbers, do not fit the stages, or cannot be used in a search."""


class ScheduleError(SchedirError):
    """A schedule function that raises an error or returns a wrong rank schedule.

    For example, the rank schedule has a stage that the rank does not have.
    """


class ParseError(SchedirError):
    """A program text that does not follow the grammar.

    Each argument is also an attribute.

    Args:
        fact: One sentence with the reason.
        line: Line of the error, from 1.
        column: Column of the error, from 1.
        text: The line, which the message shows with a mark at the column.
        hint: A suggestion for correcting the input.

    Attributes:
        location_format: Format of the position with which the message begins.
    """

    location_format = "line {line}, column {column}"

    def __init__(
        self, fact: str, *, line: int, column: int, text: str = "", hint: str = ""
    ) -> None:
        super().__init__(fact, hint=hint)
        self.line = line
        self.column = column
        self.text = text

    def format_lines(self) -> list[str]:
        """Return the line with the error, and a line that marks the column.

        A long line is cut to 160 characters.
        """
        if not self.text:
            return []
        begin = (
            max(self.column - 1 - _MAX_LINE_WIDTH // 2, 0)
            if len(self.text) > _MAX_LINE_WIDTH
            else 0
        )
        return [self.text[begin : begin + _MAX_LINE_WIDTH], " " * (self.column - 1 - begin) + "^"]

    def __str__(self) -> str:
        self.program: str = self.location_format.format(line=self.line, column=self.column)
        return super().__str__()


class TraceError(SchedirError):
    """A timeline, trace or dump file that cannot be used.

    For example, the file is cut off, has another format, or has times that no run can have.
    """


class CsvCellError(ParseError):
    """A cell of a CSV file that is not an action, or does not fit the other cells.

    `line` is the row of the cell, and `column` is the number of the cell in this row, both from 1.
    """

    location_format = "row {line}, column {column}"


class LoweringLevelError(SchedirError):
    """A draft (compute only) where a program with communication is required, or the reverse."""


class CompletenessError(SchedirError):
    """An instruction that is missing, exists twice, is out of range, or is on the wrong rank."""


class UnmatchedTransferError(CompletenessError):
    """A transfer or collective whose other side is missing or exists twice."""


class ReductionError(CompletenessError):
    """A reduction or an optimizer step that is missing or exists twice."""


class GroupError(SchedirError):
    """A group of instructions that cannot be issued together."""


class OrderError(SchedirError):
    """A Stream that uses a value before the instruction that produces it."""


class SlotError(SchedirError):
    """A Stream that fills more slots (static buffers) of a kind than its rank has."""


class MemoryLimitError(SchedirError):
    """A rank that needs more bytes on a memory tier than the limit of this tier.

    Each argument is also an attribute, except that `site` is in `sites`.

    Args:
        program: Name of the program.
        limit_bytes: The limit, in bytes.
        required_bytes: The bytes that the rank needs at its peak.
        live_values: The values in memory at the peak: for each kind of value, its name, the number
            of values, and their bytes.
        site: The instruction at the peak.
        hint: A suggestion for correcting the input.
        tier: The memory tier: "device", "host" or "disk".
    """

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
        required_text, limit_text = format_bytes(required_bytes), format_bytes(limit_bytes)
        if required_text == limit_text:  # The difference is below the digits of the texts.
            required_text, limit_text = f"{required_bytes:,.0f} bytes", f"{limit_bytes:,.0f} bytes"
        required_text += f" on the {tier}" * (tier != "device")
        fact = f"rank {site.rank} needs {required_text}, but the limit is {limit_text}"
        super().__init__(fact, program=program, sites=[site], hint=hint)
        self.limit_bytes: float = limit_bytes
        self.required_bytes: float = required_bytes
        self.tier: str = tier
        self.live_values: tuple[tuple[str, int, float], ...] = tuple(live_values)

    def format_lines(self) -> list[str]:
        """Return a line for the instruction at the peak, and for each entry of `live_values`."""
        width = max((len(name) for name, _, _ in self.live_values), default=0)
        number_width = max((len(str(number)) for _, number, _ in self.live_values), default=0)
        return [
            *super().format_lines(),
            *(
                f"  {name:<{width}}  {number:>{number_width}}  {format_bytes(size):>8}"
                for name, number, size in self.live_values
            ),
        ]


class DeadlockError(SchedirError):
    """Ranks that wait for each other in a cycle under a progress model.

    Each argument is also an attribute, except that `window` is in `sites`.

    Args:
        fact: One sentence with the reason.
        program: Name of the program.
        progress_model: Name of the progress model.
        cycle: The waits of the cycle.
        executed_count: Number of instructions that finish before the deadlock. For lazy
            communicators, the number of instructions that the processes of the ranks
            had issued.
        instruction_count: Number of instructions of the program.
        window: Instructions of one rank around the deadlock; the message shows them.
        hint: A suggestion for correcting the input.

    Attributes:
        eager_limit: The smallest eager limit in bytes with which the program finishes. Messages of
            at most this size do not wait for their receive. None if there is no such limit, or if
            `check` has no `sizes`.
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
        self.cycle: tuple[CycleWait, ...] = tuple(cycle)
        self.executed_count = executed_count
        self.instruction_count = instruction_count
        self.eager_limit: float | None = None

    def format_lines(self) -> list[str]:
        """Return a line for each wait of the cycle, and the lines of `window`."""
        width = max(len(str(w.instr)) for w in self.cycle)
        chain = [
            f"{_format_rank(w.rank, w.replica)} #{w.index:<3} {w.instr!s:<{width}}  needs "
            f"{w.needed_instr}, #{w.needed_index} on {needed}; {needed} is at #{w.current_index}"
            for w in self.cycle
            for needed in [_format_rank(w.needed_rank, w.needed_replica)]
        ]
        if not self.sites:
            return chain
        head = self.cycle[0].current_index
        width = max(len(str(s.instr)) for s in self.sites)
        shown_indices = [
            f"{'>' if s.index == head else ' '} #{s.index:<3} {s.instr!s:<{width}}  {s.note}"
            for s in self.sites
        ]
        title = f"around the position of {_format_rank(self.sites[0].rank, self.sites[0].replica)}:"
        return [*chain, title, *map(str.rstrip, shown_indices)]


class ChannelMismatchError(SchedirError):
    """A message that its receive cannot match.

    There are two causes. Under the progress model "torch_lazy", the send and the receive use
    different communicators. Or two ranks send and receive eager messages in different orders.
    """


class CollectiveOrderError(SchedirError):
    """Replicas that issue the collectives of one group in different orders.

    Each argument is also an attribute.

    Args:
        fact: One sentence with the reason.
        program: Names of the programs of the two replicas, only one if both have the same name.
        rank: The rank whose collectives differ.
        replicas: The two replicas with different collectives.
        sites: For each of the two replicas, its first collective that differs. A replica without
            such a collective has no site.
    """

    def __init__(
        self,
        fact: str,
        *,
        program: str = "",
        rank: int,
        replicas: tuple[int, int],
        sites: Sequence[InstructionSite],
    ) -> None:
        super().__init__(fact, program=program, sites=sites)
        self.rank: int = rank
        self.replicas: tuple[int, int] = replicas


class ProgramSequenceError(SchedirError):
    """A sequence of steps in which a receive gets another step's message, or ranks deadlock.

    Each argument is also an attribute.

    Args:
        fact: One sentence with the reason.
        progress_model: Name of the progress model.
        sites: The instructions that the error is about, each with its step in the note.
        hint: A suggestion for correcting the input.
    """

    def __init__(
        self, fact: str, *, progress_model: str, sites: Sequence[InstructionSite], hint: str = ""
    ) -> None:
        super().__init__(fact, sites=sites, hint=hint)
        self.progress_model = progress_model


class ModelError(SchedirError):
    """A model or a transport that does not fit the program."""


class ExecutionError(SchedirError):
    """A run that failed; `sites` has the rank and the instruction, if they are known."""


class NonFiniteError(ExecutionError):
    """A step with a loss or a gradient that is infinite or NaN.

    Each argument is also an attribute.

    Args:
        fact: One sentence with the reason.
        program: Name of the program.
        sites: The first instruction that produced an infinite or NaN value; empty if it was not
            found. For a loss, it is a forward of the first stage with such a value. For a gradient,
            it is a backward or a reduction of the last stage with such a value.
        hint: A suggestion for correcting the input.
        step: Number of the training step, from 1.
        process: The process that runs this instruction; 0 if no such instruction was found.
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
        self.step: int = step
        self.process: int = process
