"""Print and parse the text form of a Program, flat or folded.

    schedir 1
    program one_f_one_b
    ranks 2  microbatches 8  stages_per_rank 1  placement loop
    tp 1  dp 1  tied_weights no  clip_grad_norm no

    rank 0
      F 0.0
      7 x  F 0.1+; B 0.0+
      B 0.7

`1.0+` is stage 1, microbatch 0, one more each turn (`+4` four more, `-` one less); `&` joins
instructions that are issued together; `#` begins a comment.  Where slots are shared, each rank
says how many it has: `rank 0  act_in 2  act_out 2  grad_in 1  grad_out 1`.  `tied_weights yes` is
said of first and last stage, of any others that share weights `tied_weights 0=2,1=3`.  `skips
0=3,1=2` says that a second value leads from stage 0 to stage 3, and one from 1 to 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from schedir.errors import ParseError, ShapeError, require_type
from schedir.ir.input_trust import RAISED, most_of_a_file
from schedir.ir.isa.instructions import BETWEEN_NEIGHBOURS, BY_TEXT, ROWS, Scope
from schedir.ir.pipeline.field_schema import Field
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.program import HEADER, JOINED, OP, OWN, STAGE, Program, SlotCounts, Stream, Words
from schedir.retired_names import BUFFERS, INSTRUCTIONS, NAMES, RETIRED, current_value

FORMAT = 1
_KEYS = {f.name: f for f in HEADER}
_SPARE = 1000  # instructions beyond what the shape has room for

# ---------------------------------------------------------------- program to text


def to_text(program: Program, folded: bool = True) -> str:
    """The text of a program; folded, repeated runs of a Stream are one line each.

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
    require_type(program, Program, "schedir.compile(schedule, shape)")
    lines = [f"schedir {FORMAT}", f"program {program.name}", *_header_lines(program)]
    period = 8 * program.shape.stages if folded else 0
    for rank, stream in enumerate(program.streams):
        has = program.slots[rank].said() if rank < len(program.slots) else {}
        lines += ["", "  ".join([f"rank {rank}", *(f"{kind} {n}" for kind, n in has.items())])]
        lines += [f"  {line}" for line in _lines(stream.words, period)]
    return "\n".join(lines) + "\n"


def _header_lines(program: Program) -> Iterator[str]:
    """A line of the fields that all texts have, then one of those that few have, and again."""
    for (_, always), fields in groupby(HEADER, lambda f: (f.of_plan, f.always)):
        shown = [f for f in fields if always or not _KEYS[f.beside or f.name].is_default(program)]
        line = "  ".join(f.show(program) for f in shown)
        if "optimizer_steps" in [f.name for f in shown]:
            line += (
                f"  # microbatch k is of update k // {program.shape.per_update} = u, on weights "
                "after max(u - weight_delay, 0)"
            )
        if line:
            yield line


def _lines(words: Words, period: int) -> Iterator[str]:
    for times, body, steps in _fold(words, period):
        parts: list[str] = []
        for word, step in zip(body.tolist(), steps.tolist(), strict=True):
            one = _instr(word, step)
            if word & JOINED and parts:
                parts[-1] += f" & {one}"
            else:
                parts.append(one)
        text = "; ".join(parts)
        yield text if times == 1 else f"{times} x  {text}"


def _instr(word: int, step: int) -> str:
    row, mb = ROWS[word >> OP & 0xFF], word & 0xFFFFFFFF
    where = [] if row.per is Scope.RANK else [str(word >> STAGE & 0xFFFF)]
    if row.per is Scope.MICROBATCH or mb or step:  # update 0 is left out
        sign = "" if not step else "+" if step > 0 else "-"
        size = "" if abs(step) <= 1 else str(abs(step))
        where.append(f"{mb}{sign}{size}")
    return f"{row.text} {'.'.join(where)}".rstrip()


def _fold(words: Words, period: int) -> Iterator[tuple[int, Words, Words]]:
    """Cut into runs: (times, the first turn, how its microbatches step).

    Greedy: at each place the run that saves most, the shorter turn if two save the same.
    """
    head, mb = words >> STAGE, words & 0xFFFFFFFF
    joined = (words & JOINED) != 0
    i, n = 0, len(words)
    while i < n:
        best, turn = 1, 1
        while i + turn < n and joined[i + turn]:
            turn += 1
        saved = 0
        ahead = head[i + 1 : i + 1 + period]
        turns = np.flatnonzero(ahead == head[i]) + 1
        turns = turns[i + 2 * turns <= n]
        for part in (1, 2, 3, 5, 7):  # most differ somewhere
            look = i + (turns - 1) // part
            turns = turns[head[look] == head[look + turns]]
        for k in turns.tolist():
            if i + 2 * k < n and joined[i + k]:
                continue
            times = _turns(head, mb, i, k)
            if times > 1 and i + times * k < n and joined[i + times * k]:
                times -= 1
            if (times - 1) * k > saved:
                best, turn, saved = times, k, (times - 1) * k
        body = words[i : i + turn]
        steps = mb[i + turn : i + 2 * turn] - mb[i : i + turn] if best > 1 else np.zeros_like(body)
        yield best, body, steps
        i += best * turn


def _turns(head: Words, mb: Words, i: int, k: int) -> int:
    """How often the k instructions from i on repeat, their microbatches stepping evenly."""
    if not np.array_equal(head[i : i + k], head[i + k : i + 2 * k]):
        return 1
    step = mb[i + k : i + 2 * k] - mb[i : i + k]
    turns, look = 2, 2
    while True:
        at = i + turns * k
        look = min(look * 2, (len(head) - at) // k)
        if look <= 0:
            return turns
        here, before = slice(at, at + look * k), slice(at - k, at + (look - 1) * k)
        same = (head[here] == head[before]).reshape(look, k)
        same &= (mb[here] - mb[before]).reshape(look, k) == step
        good = same.all(1)
        if not good.all():
            return turns + int(good.argmin())
        turns += look


# ---------------------------------------------------------------- text to program


class _Line(NamedTuple):
    """A line of the text without its comment, for errors that show where."""

    number: int
    text: str

    def error(self, fact: str, at: int = 0, hint: str = "") -> ParseError:
        return ParseError(fact, line=self.number, column=at + 1, text=self.text, hint=hint)


_NAME = re.compile(r"\s*(program)\b\s*(.*)")
_PAIR = re.compile(r"\s*(\S+)(?:\s+(\S+))?")
# Slots are said of the kinds that there are, in their order; of neighbours' of all or none.
_ALWAYS = SlotCounts._fields[: len(BETWEEN_NEIGHBOURS)]
_MORE = SlotCounts._fields[len(BETWEEN_NEIGHBOURS) :]
_SLOTS = "".join(rf"\s+{kind}\s+(\d{{1,9}})" for kind in _ALWAYS)
_SLOTS = rf"(?:{_SLOTS})?" + "".join(rf"(?:\s+{kind}\s+(\d{{1,9}}))?" for kind in _MORE)
_RANK = re.compile(rf"rank\s+(\d{{1,9}}){_SLOTS}\s*$", re.ASCII)
_TIMES = re.compile(r"\s*(\d{1,9})\s+x\s", re.ASCII)
_INSTR = re.compile(
    r"\s*([A-Za-z_]\w*)(?:\s+(\d{1,10})(?:\.(\d{1,10}))?([+-]\d{0,9})?)?\s*$", re.ASCII
)
_Found = dict[str, tuple[Any, _Line, int]]  # by key, its value and where that stands


def from_text(text: str, most: int | None = None) -> Program:
    """Return the Program of a text.

    The program may have at most `most` instructions after its repetitions are unfolded. The default
    is 10^7, or the limit that `input_limits` sets.

    Raises ParseError with line and column where the text does not follow the grammar, or its
    shape cannot be; whether the program is right is for `check` to say.

    >>> from schedir import PipelineShape, compile, from_text, schedules, to_text
    >>> program = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4))
    >>> from_text(to_text(program)) == program
    True
    >>> from_text(to_text(program).replace("send_act", "sendact"))
    Traceback (most recent call last):
        ...
    schedir.errors.ParseError: line 7, column 16: no instruction 'sendact 0.0+'
        4 x  F 0.0+; sendact 0.0+
                     ^
      hint: did you mean 'send_act'?
    """
    require_type(text, str, 'Path("mine.sched").read_text()')
    lines = [
        _Line(number, kept)
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1)
        if (kept := line.split("#")[0].rstrip())
    ]
    if not lines or lines[0].text.split()[:1] != ["schedir"]:
        first = lines[0] if lines else _Line(1, "")
        raise first.error(f"a program begins with 'schedir {FORMAT}'")
    if lines[0].text.split()[1:] != [str(FORMAT)]:
        raise lines[0].error(f"this reads format {FORMAT}, not {lines[0].text[8:]!r}", 8)
    begin = next((k for k, line in enumerate(lines) if line.text.startswith("rank ")), len(lines))
    found = _header(lines[1:begin], lines[0])
    header = {key: value for key, (value, _, _) in found.items()}
    name = header.pop("program")
    try:
        shape = PipelineShape(
            **{f.name: header.pop(f.name) for f in SHAPE_FIELDS if f.name in header}
        )
        shape.require_room(most_of_a_file())
        traits = {name: _KEYS[name].kind.settle(name, said, shape) for name, said in header.items()}
    except ShapeError as error:
        raise _at_field(error, found, "ranks") from None
    room = 4 * shape.room + _SPARE  # what is a little wrong is best said of the whole
    hint = RAISED if most is None and room > most_of_a_file() else ""
    most = min(most_of_a_file() if most is None else most, room)
    streams, slots = _streams(lines[begin:], shape.ranks, lines[-1], most, hint)
    try:
        return Program(name, shape, streams, **traits, slots=slots)
    except ShapeError as error:
        raise _at_field(error, found, "program") from None


def _at_field(error: ShapeError, found: _Found, otherwise: str) -> ParseError:
    """A refusal of the header's values, at the first of the fields that it speaks of."""
    key = next((name for name in error.fields if name in found), otherwise)
    _, line, at = found[key]
    return line.error(error.fact, at, error.hint)


def _header(lines: list[_Line], first: _Line) -> _Found:
    """What the header gives: the value of each key, and where that stands."""
    found: _Found = {}
    for line in lines:
        name = _NAME.match(line.text)
        for pair in [name] if name else _PAIR.finditer(line.text):
            key, value = pair.groups()
            if key not in _KEYS and NAMES.get(key) in _KEYS:  # a file may be older than the name
                key = NAMES[key]
            if key not in (*_KEYS, "program"):
                near = get_close_matches(key, [*_KEYS, "program", "rank"], 1)
                hint = RETIRED.get(key, f"did you mean {near[0]!r}?" if near else "")
                raise line.error(f"no key {key!r}", pair.start(1), hint)
            if key in found:
                raise line.error(f"{key} is given twice", pair.start(1))
            if not value:
                raise line.error(f"{key} has no value", pair.start(1))
            if key == "program" and not name:  # whose name is the rest of a line
                raise line.error("program begins a line of its own", pair.start(1))
            at = pair.start(2)
            found[key] = (value if name else _value(line, at, _KEYS[key], value), line, at)
    for key in ("program", *(f.name for f in HEADER if f.required)):
        if key not in found:
            raise (lines[-1] if lines else first).error(f"the header gives no {key!r}")
    return found


def _value(line: _Line, at: int, field: Field, text: str) -> object:
    try:
        return field.kind.read(current_value(field.name, text))
    except ValueError:
        if re.fullmatch(r"[+-]?[0-9]{19,}", text):
            raise line.error(f"{field.name} has too many digits: {text[:18]}...", at) from None
        raise line.error(f"{field.name} {field.kind.takes}, not {text!r}", at) from None


def _streams(
    lines: list[_Line], ranks: int, last: _Line, most: int, hint: str
) -> tuple[tuple[Stream, ...], tuple[SlotCounts, ...]]:
    streams: list[list[Words]] = []
    slots: list[SlotCounts] = []
    left = most
    for line in lines:
        if not line.text[0].isspace():
            text = re.sub(r"[a-z_]+", lambda kind: BUFFERS.get(kind[0], kind[0]), line.text)
            found = _RANK.match(text)
            if not found:
                form = "  ".join(["rank N", *(f"{kind} N" for kind in _ALWAYS)])
                raise line.error(
                    f"expected 'rank N' or {form!r}, or an instruction indented under one"
                )
            if int(found[1]) != len(streams):
                raise line.error(f"expected rank {len(streams)}, not {found[1]}", found.start(1))
            if len(streams) == ranks:
                raise line.error(f"the header says {ranks} ranks", found.start(1))
            told = SlotCounts(*(OWN if n is None else int(n) for n in found.groups()[1:]))
            if streams and (told == SlotCounts.unsaid()) is (len(slots) > 0):
                raise line.error("slots are said of all ranks or of none", found.end(1))
            if told != SlotCounts.unsaid():
                slots.append(told)
            streams.append([])
        else:
            streams[-1].append(_unfold(line, left, most, hint))
            left -= len(streams[-1][-1])
    if len(streams) != ranks:
        raise last.error(f"the header says {ranks} ranks, but there are {len(streams)}")
    empty = np.empty(0, np.int64)
    return tuple(Stream(np.concatenate([empty, *parts])) for parts in streams), tuple(slots)


def _unfold(line: _Line, left: int, most: int, hint: str) -> Words:
    found = _TIMES.match(line.text)
    times, at = (int(found[1]), found.end()) if found else (1, 0)
    if times < 1:
        raise line.error("a line is repeated at least once", found.start(1) if found else 0)
    turn, steps = list[int](), list[int]()
    for part in re.finditer(r"([;&]?)([^;&]*)", line.text[at:]):
        if not part[0]:
            continue
        if (ahead := part[1] and not turn) or not part[2].strip():
            missing = part.start() if ahead else part.end()
            raise line.error("an instruction is missing here", at + missing)
        word, step = _read(line, at + part.start(2), part[2])
        if part[1] == "&":
            word |= JOINED
        turn.append(word)
        steps.append(step)
    if times * len(turn) > left:
        fact = f"the program unfolds to more than the {most} instructions that it may have"
        raise line.error(fact, hint=hint)
    for word, step in zip(turn, steps, strict=True):
        end = (word & 0xFFFFFFFF) + step * (times - 1)
        if not 0 <= end < 2**32:
            raise line.error(f"microbatches run to {end}")
    words = np.array(turn, np.int64) + np.arange(times)[:, None] * np.array(steps, np.int64)
    return words.reshape(-1)


def _read(line: _Line, at: int, part: str) -> tuple[int, int]:
    """One instruction: its word and how its microbatch steps."""
    at += len(part) - len(part.lstrip())
    found = _INSTR.match(part)
    name = INSTRUCTIONS.get(found[1], found[1]) if found else part.strip()  # of an older file, too
    if not found or name not in BY_TEXT:
        near = get_close_matches(name, list(BY_TEXT), 1)
        raise line.error(
            f"no instruction {part.strip()!r}", at, f"did you mean {near[0]!r}?" if near else ""
        )
    op = BY_TEXT[name]
    per = ROWS[op].per
    numbers = [int(n) for n in found.group(2, 3) if n is not None]
    full = 1 if per is Scope.RANK else 2
    least = full - (per is not Scope.MICROBATCH and not found[4])  # update 0 is left out
    if not least <= len(numbers) <= full:
        want = f"{name} {per.value}".strip()
        raise line.error(f"{name} is written {want!r}, not {part.strip()!r}", at)
    stage, mb = [0] * (per is Scope.RANK) + numbers + [0] * (full - len(numbers))
    if stage > 0xFFFF or mb > 0xFFFFFFFF:
        raise line.error(f"{part.strip()!r} is out of every range", at)
    sign = found[4] or ""
    step = 0 if not sign else int(sign[1:] or 1) * (1 if sign[0] == "+" else -1)
    return int(op) << OP | stage << STAGE | mb, step
