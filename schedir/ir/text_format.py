"""Print and parse the text form of a Program.

    schedir 1
    program one_f_one_b
    ranks 2  microbatches 8  stages_per_rank 1  placement loop
    tp 1  dp 1  tied_weights no  clip_grad_norm no

    rank 0
      F 0.0
      7 x  F 0.1+; B 0.0+
      B 0.7

- `F 1.0` is the forward of stage 1, microbatch 0.
- `7 x` repeats a line.  In `1.0+`, the number of the microbatch grows by one at each repetition;
  `+4` adds four, and `-` subtracts one.
- `&` joins instructions that are issued together.
- `#` begins a comment.
- If slots are shared, the line of each rank lists its numbers of slots:
  `rank 0  act_in 2  act_out 2  grad_in 1  grad_out 1`.
- `tied_weights yes` means that the first and the last stage share weights. `tied_weights 0=2,1=3`
  lists other stages that share weights.
- `skips 0=5,1=4` means that a skip connection leads from stage 0 to stage 5, and another skip
  connection from stage 1 to stage 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.errors import OTHER_VERSION_HINT, ParseError, ShapeError, require_type
from schedir.ir.input_trust import RAISE_LIMIT_HINT, get_max_file_instructions
from schedir.ir.isa.instructions import INSTRUCTIONS, NEIGHBOR_VALUES, OPCODE_BY_TEXT, Scope
from schedir.ir.pipeline.field_schema import Field
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.program import (
    HEADER_FIELDS,
    JOINED_BIT,
    OP_SHIFT,
    STAGE_SHIFT,
    UNSHARED_SLOTS,
    Program,
    SlotCounts,
    Stream,
    Words,
)
from schedir.retired_names import (
    RENAMED_BUFFERS,
    RENAMED_FIELDS,
    RENAMED_INSTRUCTIONS,
    RETIRED_HINTS,
    get_current_value,
    suggest_instruction,
)

FORMAT_VERSION = 1
_FIELD_BY_NAME = {f.name: f for f in HEADER_FIELDS}
# A text may contain four times as many instructions as a program of its shape can have, plus this
# number.
_EXTRA_INSTRUCTIONS = 1000

# ---------------------------------------------------------------- program to text


def to_text(program: Program, folded: bool = True) -> str:
    """Return the text form of a program.

    Args:
        program: The program.
        folded: True prints repeated instructions of a Stream as one line, and False prints each
            instruction.

    Raises:
        UsageError: `program` is not a Program.

    Example:
        >>> from schedir import PipelineShape, compile, schedules, to_text
        >>> print(to_text(compile(schedules.gpipe, PipelineShape(ranks=1, microbatches=8))), end="")
        schedir 1
        program gpipe
        ranks 1  microbatches 8  stages_per_rank 1  placement loop
        tp 1  dp 1  tied_weights no  clip_grad_norm no
        <BLANKLINE>
        rank 0
          8 x  F 0.0+
          8 x  B 0.0+
          reduce_grads 0
          step
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    lines = [f"schedir {FORMAT_VERSION}", f"program {program.name}", *_format_header(program)]
    period = 8 * program.shape.stages if folded else 0
    for rank, stream in enumerate(program.streams):
        slots = program.slots[rank].specified() if rank < len(program.slots) else {}
        lines += ["", "  ".join([f"rank {rank}", *(f"{kind} {n}" for kind, n in slots.items())])]
        lines += [f"  {line}" for line in _format_stream(stream.words, period)]
    return "\n".join(lines) + "\n"


def _format_header(program: Program) -> Iterator[str]:
    """Yield the lines of the header.

    Fields that every text has are on other lines than fields that only some texts have.
    """
    for (_, is_always_shown), fields in groupby(
        HEADER_FIELDS, lambda f: (f.is_shape_field, f.is_always_shown)
    ):
        shown_fields = [
            f
            for f in fields
            if is_always_shown or not _FIELD_BY_NAME[f.shown_with or f.name].is_default(program)
        ]
        line = "  ".join(f.to_text(program) for f in shown_fields)
        if "optimizer_steps" in [f.name for f in shown_fields]:
            line += (
                "  # microbatch k is in update u = k // "
                f"{program.shape.microbatches_per_update}, and uses the weights after max(u - "
                "weight_delay, 0) updates"
            )
        if line:
            yield line


def _format_stream(words: Words, period: int) -> Iterator[str]:
    for times, body, steps in _fold_repeats(words, period):
        parts: list[str] = []
        for word, step in zip(body.tolist(), steps.tolist(), strict=True):
            instr_text = _format_instruction(word, step)
            if word & JOINED_BIT and parts:
                parts[-1] += f" & {instr_text}"
            else:
                parts.append(instr_text)
        text = "; ".join(parts)
        yield text if times == 1 else f"{times} x  {text}"


def _format_instruction(word: int, step: int) -> str:
    row, mb = INSTRUCTIONS[word >> OP_SHIFT & 0xFF], word & 0xFFFFFFFF
    numbers = [] if row.scope is Scope.RANK else [str(word >> STAGE_SHIFT & 0xFFFF)]
    if row.scope is Scope.MICROBATCH or mb or step:  # update 0 is not printed
        sign = "" if not step else "+" if step > 0 else "-"
        magnitude = "" if abs(step) <= 1 else str(abs(step))
        numbers.append(f"{mb}{sign}{magnitude}")
    return f"{row.text} {'.'.join(numbers)}".rstrip()


def _fold_repeats(words: Words, period: int) -> Iterator[tuple[int, Words, Words]]:
    """Split a Stream into runs of repeated instructions.

    The search is greedy: at each position it takes the run that removes the most instructions from
    the text.  Among equally good runs, it takes the one with the fewest instructions per
    repetition.

    Yields:
        The number of repetitions, the words of the first repetition, and the number that each
        repetition adds to the microbatch of each word.
    """
    head, mb = words >> STAGE_SHIFT, words & 0xFFFFFFFF
    joined = (words & JOINED_BIT) != 0
    i, n = 0, len(words)
    while i < n:
        best_times, length = 1, 1
        while i + length < n and joined[i + length]:
            length += 1
        saved = 0
        next_heads = head[i + 1 : i + 1 + period]
        lengths = np.flatnonzero(next_heads == head[i]) + 1
        lengths = lengths[i + 2 * lengths <= n]
        for part in (1, 2, 3, 5, 7):  # a cheap test that removes most candidates
            index = i + (lengths - 1) // part
            lengths = lengths[head[index] == head[index + lengths]]
        for k in lengths.tolist():
            if i + 2 * k < n and joined[i + k]:
                continue
            times = _count_repeats(head, mb, i, k)
            if times > 1 and i + times * k < n and joined[i + times * k]:
                times -= 1
            if (times - 1) * k > saved:
                best_times, length, saved = times, k, (times - 1) * k
        body = words[i : i + length]
        steps = (
            mb[i + length : i + 2 * length] - mb[i : i + length]
            if best_times > 1
            else np.zeros_like(body)
        )
        yield best_times, body, steps
        i += best_times * length


def _count_repeats(head: Words, mb: Words, i: int, k: int) -> int:
    """Return how often the k instructions from index i on are repeated without a gap.

    From one repetition to the next, the microbatch number of each of the k instructions must change
    by a constant.
    """
    if not np.array_equal(head[i : i + k], head[i + k : i + 2 * k]):
        return 1
    step = mb[i + k : i + 2 * k] - mb[i : i + k]
    times, count = 2, 2
    while True:
        end = i + times * k
        count = min(count * 2, (len(head) - end) // k)
        if count <= 0:
            return times
        current = slice(end, end + count * k)
        previous = slice(end - k, end + (count - 1) * k)
        is_equal = (head[current] == head[previous]).reshape(count, k)
        is_equal &= (mb[current] - mb[previous]).reshape(count, k) == step
        is_repeat = is_equal.all(1)
        if not is_repeat.all():
            return times + int(is_repeat.argmin())
        times += count


# ---------------------------------------------------------------- text to program


class _Line(NamedTuple):
    """A line of the text without its comment, for errors with a line and a column."""

    number: int
    text: str

    def make_error(self, fact: str, column: int = 0, hint: str = "") -> ParseError:
        return ParseError(fact, line=self.number, column=column + 1, text=self.text, hint=hint)


_NAME_PATTERN = re.compile(r"\s*(program)\b\s*(.*)")
_PAIR_PATTERN = re.compile(r"\s*(\S+)(?:\s+(\S+))?")
# The line of a rank lists its numbers of slots in the order of `SlotCounts`.  For values between
# neighbouring stages, it lists either all numbers or none.
_NEIGHBOR_SLOTS = SlotCounts._fields[: len(NEIGHBOR_VALUES)]
_OPTIONAL_SLOTS = SlotCounts._fields[len(NEIGHBOR_VALUES) :]
_SLOTS_PATTERN = "".join(rf"\s+{kind}\s+(\d{{1,9}})" for kind in _NEIGHBOR_SLOTS)
_SLOTS_PATTERN = rf"(?:{_SLOTS_PATTERN})?" + "".join(
    rf"(?:\s+{kind}\s+(\d{{1,9}}))?" for kind in _OPTIONAL_SLOTS
)
_RANK_PATTERN = re.compile(rf"rank\s+(\d{{1,9}}){_SLOTS_PATTERN}\s*$", re.ASCII)
_REPEAT_PATTERN = re.compile(r"\s*(\d{1,9})\s+x\s", re.ASCII)
_INSTRUCTION_PATTERN = re.compile(
    r"\s*([A-Za-z_]\w*)(?:\s+(\d{1,10})(?:\.(\d{1,10}))?([+-]\d{0,9})?)?\s*$", re.ASCII
)
# Other notations of an instruction, such as F0.1, F 0,1, F(0, 1), and 0F1 of torch.
_OTHER_NOTATIONS = (
    re.compile(
        r"(?P<name>[A-Za-z_]+)[\s(\[]*(?P<stage>\d{1,10})[\s.,:)\]\[(]+(?P<mb>\d{1,10})[)\]]?"
        r"(?P<step>([+-]\d*)?)",
        re.ASCII,
    ),
    re.compile(
        r"(?P<stage>\d{1,10})(?P<name>[FBIW])(?P<mb>\d{1,10})(?P<step>([+-]\d*)?)", re.ASCII
    ),
)
_HeaderValues = dict[str, tuple[Any, _Line, int]]  # name of a field -> (value, line, column)


def from_text(text: str, max_instructions: int | None = None) -> Program:
    """Parse the text form of a program.

    This function does not check whether the program is correct.  Call `schedir.check` for that.

    Args:
        text: The text form of a program, as `to_text` returns it.
        max_instructions: The largest number of instructions that the program may have after its
            repetitions are expanded.  The default is 10^7, or the limit that `input_limits` sets.

    Raises:
        ParseError: The text does not follow the grammar, its shape or attributes are not allowed,
            or it has too many instructions.  The error has the line and the column.
        UsageError: `text` is not a string.

    Example:
        >>> from schedir import PipelineShape, compile, from_text, schedules, to_text
        >>> program = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4))
        >>> from_text(to_text(program)) == program
        True
        >>> from_text(to_text(program).replace("send_act", "sendact"))
        Traceback (most recent call last):
            ...
        schedir.errors.ParseError: line 7, column 16: there is no instruction 'sendact 0.0+'
            4 x  F 0.0+; sendact 0.0+
                         ^
          hint: did you mean 'send_act'?
    """
    require_type(text, "text", str, 'Path("mine.sched").read_text()')
    lines = [
        _Line(number, content)
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1)
        if (content := line.split("#")[0].rstrip())
    ]
    if not lines or lines[0].text.split()[:1] != ["schedir"]:
        first_line = lines[0] if lines else _Line(1, "")
        hint = ""
        if len(lines) == 1 and first_line.text.endswith(".sched"):
            hint = f"from_text takes the text of a file: Path({first_line.text!r}).read_text()"
        elif re.match(r"\d+[A-Z_]+\d*,", first_line.text):
            hint = "schedir.torch_csv.from_csv(text) reads a CSV of torch"
        fact = f"a program must begin with 'schedir {FORMAT_VERSION}'"
        raise first_line.make_error(fact, hint=hint)
    if lines[0].text.split()[1:] != [str(FORMAT_VERSION)]:
        raise lines[0].make_error(
            f"the format must be {FORMAT_VERSION}, not {lines[0].text[8:]!r}", 8,
            OTHER_VERSION_HINT if lines[0].text[8:].isdecimal()
            else f"the first line must be 'schedir {FORMAT_VERSION}'",
        )  # fmt: skip
    begin = next((k for k, line in enumerate(lines) if line.text.startswith("rank ")), len(lines))
    header_values = _parse_header(lines[1:begin], lines[0])
    header = {key: value for key, (value, _, _) in header_values.items()}
    name = header.pop("program")
    try:
        shape = PipelineShape(
            **{f.name: header.pop(f.name) for f in SHAPE_FIELDS if f.name in header}
        )
        shape.require_instruction_limit(get_max_file_instructions())
        attributes = {
            name: _FIELD_BY_NAME[name].field_type.resolve(name, header_value, shape)
            for name, header_value in header.items()
        }
    except ShapeError as error:
        raise _locate_error(error, header_values, "ranks") from None
    # A text with slightly too many instructions is parsed.  `check` then raises a better error.
    shape_limit = 4 * shape.max_instructions + _EXTRA_INSTRUCTIONS
    file_limit = get_max_file_instructions()
    hint = RAISE_LIMIT_HINT if max_instructions is None and shape_limit > file_limit else ""
    max_instructions = min(
        file_limit if max_instructions is None else max_instructions, shape_limit
    )
    try:
        streams, slots = _parse_streams(
            lines[begin:], shape.ranks, lines[-1], max_instructions, hint
        )
    except ParseError as error:
        if error.line == lines[-1].number and not text.endswith("\n"):
            cut_off = "the file may be cut off: its last line has no line break"
            error.hint = "; or ".join(filter(None, (error.hint, cut_off)))
        raise
    try:
        return Program(name, shape, streams, **attributes, slots=slots)
    except ShapeError as error:
        raise _locate_error(error, header_values, "program") from None


def _locate_error(error: ShapeError, header_values: _HeaderValues, default_key: str) -> ParseError:
    """Convert a ShapeError to a ParseError at the first header field that caused the error."""
    key = next((name for name in error.fields if name in header_values), default_key)
    _, line, column = header_values[key]
    return line.make_error(error.fact, column, error.hint)


def _parse_header(lines: list[_Line], first_line: _Line) -> _HeaderValues:
    """Return the fields of the header: name -> (value, line, column)."""
    header_values: _HeaderValues = {}
    for line in lines:
        name_match = _NAME_PATTERN.match(line.text)
        for pair in [name_match] if name_match else _PAIR_PATTERN.finditer(line.text):
            key, value = pair.groups()
            # An older file may have the old name of a field.
            if key not in _FIELD_BY_NAME and RENAMED_FIELDS.get(key) in _FIELD_BY_NAME:
                key = RENAMED_FIELDS[key]
            if key not in (*_FIELD_BY_NAME, "program"):
                close_matches = get_close_matches(key, [*_FIELD_BY_NAME, "program", "rank"], 1)
                guess = f"did you mean {close_matches[0]!r}?" if close_matches else ""
                hint = RETIRED_HINTS.get(key, guess)
                raise line.make_error(f"there is no field {key!r}", pair.start(1), hint)
            if key in header_values:
                raise line.make_error(f"{key} is given twice", pair.start(1))
            if not value:
                raise line.make_error(f"{key} has no value", pair.start(1))
            # A name may contain spaces.  So the name ends at the end of its line.
            if key == "program" and not name_match:
                raise line.make_error("program must be the first field of its line", pair.start(1))
            column = pair.start(2)
            header_values[key] = (
                value if name_match else _parse_value(line, column, _FIELD_BY_NAME[key], value),
                line,
                column,
            )
    for key in ("program", *(f.name for f in HEADER_FIELDS if f.is_required)):
        if key not in header_values:
            raise (lines[-1] if lines else first_line).make_error(f"the header has no {key!r}")
    return header_values


def _parse_value(line: _Line, column: int, field: Field, text: str) -> object:
    try:
        return field.field_type.from_text(get_current_value(field.name, text))
    except ValueError:
        if re.fullmatch(r"[+-]?[0-9]{19,}", text):
            raise line.make_error(
                f"{field.name} has too many digits: {text[:18]}...", column
            ) from None
        raise line.make_error(
            f"{field.name} {field.field_type.requirement}, not {text!r}", column
        ) from None


def _parse_streams(
    lines: list[_Line], ranks: int, last_line: _Line, max_instructions: int, hint: str
) -> tuple[tuple[Stream, ...], tuple[SlotCounts, ...]]:
    streams: list[list[Words]] = []
    slots: list[SlotCounts] = []
    remaining = max_instructions
    for line in lines:
        if not line.text[0].isspace():
            text = re.sub(r"[a-z_]+", lambda kind: RENAMED_BUFFERS.get(kind[0], kind[0]), line.text)
            match = _RANK_PATTERN.match(text)
            if not match:
                form = "  ".join(["rank N", *(f"{kind} N" for kind in _NEIGHBOR_SLOTS)])
                raise line.make_error(
                    f"expected 'rank N' or {form!r}, or an instruction indented under one"
                )
            if int(match[1]) != len(streams):
                raise line.make_error(
                    f"expected rank {len(streams)}, not {match[1]}", match.start(1)
                )
            if len(streams) == ranks:
                raise line.make_error(f"the header has ranks {ranks}", match.start(1))
            counts = SlotCounts(
                *(UNSHARED_SLOTS if n is None else int(n) for n in match.groups()[1:])
            )
            if streams and (counts == SlotCounts.unspecified()) is (len(slots) > 0):
                raise line.make_error("either all ranks or no ranks must have slots", match.end(1))
            if counts != SlotCounts.unspecified():
                slots.append(counts)
            streams.append([])
        else:
            streams[-1].append(_parse_line(line, remaining, max_instructions, hint))
            remaining -= len(streams[-1][-1])
    if (count := len(streams)) != ranks:
        fact = f"the header has ranks {ranks}, but the text has {count}"
        section_hint = f"add the line 'rank {count}' and its instructions" * (count < ranks)
        raise last_line.make_error(fact, hint=section_hint)
    empty = np.empty(0, np.int64)
    return tuple(Stream(np.concatenate([empty, *parts])) for parts in streams), tuple(slots)


def _parse_line(line: _Line, remaining: int, max_instructions: int, hint: str) -> Words:
    match = _REPEAT_PATTERN.match(line.text)
    times, start = (int(match[1]), match.end()) if match else (1, 0)
    if times < 1:
        raise line.make_error(
            "the number of repetitions must be at least 1", match.start(1) if match else 0
        )
    body, steps = list[int](), list[int]()
    for part in re.finditer(r"([;&]?)([^;&]*)", line.text[start:]):
        if not part[0]:
            continue
        if (is_first_missing := part[1] and not body) or not part[2].strip():
            missing = part.start() if is_first_missing else part.end()
            raise line.make_error("an instruction is missing here", start + missing)
        word, step = _parse_instruction(line, start + part.start(2), part[2])
        if part[1] == "&":
            word |= JOINED_BIT
        body.append(word)
        steps.append(step)
    if times * len(body) > remaining:
        fact = f"the program has more instructions than the limit of {max_instructions}"
        raise line.make_error(fact, hint=hint)
    for word, step in zip(body, steps, strict=True):
        end = (word & 0xFFFFFFFF) + step * (times - 1)
        if not 0 <= end < 2**32:
            raise line.make_error(f"microbatch {end} is out of range")
    words = np.array(body, np.int64) + np.arange(times)[:, None] * np.array(steps, np.int64)
    return words.reshape(-1)


# A longer text of a file is not repeated in a hint.
_MAX_HINTED_CHARACTERS: Final = 60


def _suggest_notation(part: str) -> str:
    """Return a hint if `part` is an instruction in another notation, such as F0.1 or 2x F 0.1."""
    repeated = re.match(r"(\d{1,9}) *[x*] *(?=\w)", part)
    if repeated and len(part) <= _MAX_HINTED_CHARACTERS:
        return f"did you mean '{repeated[1]} x  {part[repeated.end() :]}'?"
    for pattern in _OTHER_NOTATIONS:
        match = pattern.fullmatch(part)
        if match and match["name"] in OPCODE_BY_TEXT:
            return "did you mean '{name} {stage}.{mb}{step}'?".format(**match.groupdict())
    return ""


def _parse_instruction(line: _Line, column: int, part: str) -> tuple[int, int]:
    """Return an instruction's word, and the number that each repetition adds to its microbatch."""
    column += len(part) - len(part.lstrip())
    match = _INSTRUCTION_PATTERN.match(part)
    # An older file may have the old name of an instruction.
    name = RENAMED_INSTRUCTIONS.get(match[1], match[1]) if match else part.strip()
    if not match or name not in OPCODE_BY_TEXT:
        close_name = suggest_instruction(name, OPCODE_BY_TEXT)
        hint = f"did you mean {close_name!r}?" if close_name else ""
        if sum(word in OPCODE_BY_TEXT for word in part.split()) > 1:
            hint = "put ; between two instructions"
        hint = _suggest_notation(part.strip()) or hint
        raise line.make_error(f"there is no instruction {part.strip()!r}", column, hint)
    op = OPCODE_BY_TEXT[name]
    scope = INSTRUCTIONS[op].scope
    numbers = [int(n) for n in match.group(2, 3) if n is not None]
    max_numbers = 1 if scope is Scope.RANK else 2
    # The text may omit update 0.
    min_numbers = max_numbers - (scope is not Scope.MICROBATCH and not match[4])
    if not min_numbers <= len(numbers) <= max_numbers:
        usage = f"{name} {scope.value}".strip()
        raise line.make_error(f"{name} must be written {usage!r}, not {part.strip()!r}", column)
    stage, mb = [0] * (scope is Scope.RANK) + numbers + [0] * (max_numbers - len(numbers))
    if stage > 0xFFFF or mb > 0xFFFFFFFF:
        raise line.make_error(f"a number of {part.strip()!r} is too large", column)
    sign = match[4] or ""
    step = 0 if not sign else int(sign[1:] or 1) * (1 if sign[0] == "+" else -1)
    return int(op) << OP_SHIFT | stage << STAGE_SHIFT | mb, step
