"""Edit programs by hand, and export them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from schedir.commands.studio.state import format_file_name
from schedir.errors import UsageError
from schedir.io import torch_csv
from schedir.io.program_request import Request
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS
from schedir.ir.program import JOINED_BIT, WORD_DTYPE, Program, Stream, Words
from schedir.ir.text_format import to_text
from schedir.schedules.schedule_expansion import expand_schedule

_PYTHON: Final = '''\
"""The schedule {name} for {ranks} ranks and {microbatches} microbatches.

{command}
"""

from schedir import {letters}, concat{imports}

LETTERS = {{{table}}}
# The compute of each rank: a letter, the local stage and the microbatch. & runs two together.
ORDER = [
{order}
]


def {function}(rank, ranks, microbatches):
    return concat(parse(word) for word in ORDER[rank].split())


def parse(word):
    if "&" in word:
        return overlapped_pair(*map(parse, word.split("&")))
    local_stage, microbatch = word[1:].split(".")
    return LETTERS[word[0]][int(local_stage)].at(int(microbatch))
'''


def find_draft(request: Request) -> Program:
    """Return the draft of a request, or its lowered program if the source is a lowered program.

    Args:
        request: The request.

    Raises:
        SchedirError: The schedule cannot be expanded.
    """
    loaded = request.source.schedule_or_program
    if isinstance(loaded, Program):
        return loaded
    return replace(expand_schedule(loaded, request.shape), **request.traits)


def move_instruction(request: Request, rank: int, index: int, before: int) -> Program:
    """Return a program in which an instruction has another position on its rank.

    A compute instruction is moved in the draft, if there is a draft, so that lowering adapts the
    messages. Any other instruction is moved in the lowered program.

    Args:
        request: The request of the program.
        rank: The rank.
        index: The index of the instruction in the stream of the lowered program.
        before: The instruction is moved before the instruction at this index. The number of
            instructions in the stream means the end of the stream.

    Raises:
        UsageError: There is no such instruction, or it cannot be moved.
    """
    shown, base = request.program, find_draft(request)
    if not 0 <= rank < shown.shape.ranks or not (
        0 <= index < len(shown.streams[rank]) >= before >= 0
    ):
        raise UsageError(
            f"cannot move instruction #{index} of rank {rank} to place #{before}: there is no such "
            "rank, instruction or place"
        )
    words = shown.streams[rank].words
    if not base.is_draft or words.view(WORD_DTYPE)["op"][index] not in COMPUTE_OPS:
        base = shown
    else:
        index, before = _find_in_draft(words, base.streams[rank].words, index, before)
    moved = Stream(_move_word(base.streams[rank].words, index, before))
    streams = (*base.streams[:rank], moved, *base.streams[rank + 1 :])
    slots = () if base.is_draft else base.slots
    return replace(base, streams=streams, slots=slots, message_order={})


def _find_in_draft(words: Words, draft: Words, index: int, before: int) -> tuple[int, int]:
    """Convert two indices of a lowered stream into indices of the stream of the draft."""
    draft_index = {word: k for k, word in enumerate((draft & ~JOINED_BIT).tolist())}
    lowered = (words & ~JOINED_BIT).tolist()
    if lowered[index] not in draft_index:
        raise UsageError(
            f"{Stream(words)[index]} cannot be moved: the schedule does not contain this "
            "instruction, because an option of the lowering added it or divided its stage",
        )
    following = (draft_index[word] for word in lowered[before:] if word in draft_index)
    return draft_index[lowered[index]], next(following, len(draft))


def _move_word(words: Words, index: int, before: int) -> Words:
    """Return the encoded instructions, with the one at `index` moved before the one at `before`.

    If the moved instruction ran together with a neighbour, the two then run separately.
    """
    words = words.copy()
    if before < len(words) and words[before] & JOINED_BIT and before != index:
        before -= 1
    if index + 1 < len(words):
        words[index + 1] &= ~JOINED_BIT
    words[index] &= ~JOINED_BIT
    word = words[index]
    other_words = np.delete(words, index)
    return np.insert(other_words, before - (before > index), word)


def export_program(request: Request, file_format: str) -> tuple[str, str]:
    """Return the name and the text of a file with the program of a request.

    Args:
        request: The request of the program.
        file_format: "sched" for the text form, "python" for a schedule function, "csv" for the
            CSV of `torch.distributed.pipelining`, or "call" for the calls of schedir that compile
            and simulate the program.

    Raises:
        SchedirError: The format is unknown, or the program cannot be written in this format.
    """
    name = request.program.name
    if file_format == "sched":
        return format_file_name(name, "sched"), to_text(request.program)
    if file_format == "csv":
        return format_file_name(name, "csv"), torch_csv.to_csv(request.program)
    if file_format == "python":
        return format_file_name(name, "py"), format_python(request.program, find_draft(request))
    if file_format == "call":
        return format_file_name(name, "py"), format_call(request)
    raise UsageError(
        f"no format {file_format!r}", hint="the formats are sched, python, csv and call"
    )


def format_python(program: Program, draft: Program) -> str:
    """Return Python code of a schedule function with the compute instructions of a program.

    Args:
        program: The lowered program.
        draft: The draft of the program, or the lowered program itself.
    """
    shape, ops = draft.shape, set[int]()
    order = []
    for rank, stream in enumerate(draft.streams):
        stages = list(shape.stages_on_rank[rank])
        words = list[str]()
        columns = stream.words.view(WORD_DTYPE)
        rows = zip(*(columns[name].tolist() for name in ("op", "stage", "mb")), strict=True)
        for (op, stage, mb), joined in zip(rows, stream.joined.tolist(), strict=True):
            if op in COMPUTE_OPS:
                ops.add(op)
                word = f"{INSTRUCTIONS[op].text}{stages.index(stage)}.{mb}"
                words.append(f"{words.pop()}&{word}" if joined and words else word)
        order.append(f'    "{" ".join(words)}",')
    letters = [INSTRUCTIONS[op].text for op in sorted(ops)]
    name = program.name if program.name.isidentifier() else "schedule"
    placement = f', placement="{shape.placement}"' * (shape.placement != "loop")
    return _PYTHON.format(
        name=name,
        ranks=shape.ranks,
        microbatches=shape.microbatches,
        command=f"schedir.compile({name}, ranks={shape.ranks}, microbatches={shape.microbatches}, "
        f"stages_per_rank={shape.stages_per_rank}{placement})",
        letters=", ".join(letters),
        imports=", overlapped_pair" * any("&" in line for line in order),
        table=", ".join(f'"{letter}": {letter}' for letter in letters),
        order="\n".join(order),
        function=name,
    )


def format_call(request: Request) -> str:
    """Return Python code that compiles and simulates the program of a request.

    Args:
        request: The request of a schedule, or of a program from a file or from code.

    Raises:
        UsageError: The request has a run from a file, which has no Python code.
    """
    if request.source_timeline is not None:
        raise UsageError(
            "a measured run has no Python code",
            hint=f"schedir.load_timeline({str(request.source)!r}) reads it",
        )
    loaded = request.source.schedule_or_program
    compile_options: dict[str, Any] = dict(request.specified)
    compile_options |= {name: True for name in ("overlap",) if getattr(request, name)}
    compile_options |= request.compile_options
    for name in ("buffer_sharing", "memory_limit", "progress_model"):
        if (value := getattr(request, name)) is not None:
            compile_options[name] = value
    values = {"costs": request.specified_costs, "sizes": request.timeline.sizes}
    shared = {name: _format_fields(value) for name, value in values.items() if value is not None}
    lines = ["import schedir", "", *(f"{name} = schedir.{text}" for name, text in shared.items())]
    if not isinstance(loaded, Program):
        name, source = repr(str(request.source)), ""
        compile_options = dict(request.defaults) | compile_options
        if "(" in name:  # Options in brackets are arguments of the schedule function.
            function, _, bracket = str(request.source).partition("(")
            lines.insert(1, "from functools import partial")
            name = f"partial(schedir.schedules.{function.strip()}, {bracket}"
    else:
        source = format_python(request.program, find_draft(request)) + "\n\n"
        name = source.split("\ndef ")[1].partition("(")[0]
        shape = loaded.shape
        compile_options |= {"ranks": shape.ranks, "microbatches": shape.microbatches}
        compile_options |= {"stages_per_rank": shape.stages_per_rank}
        compile_options |= {"placement": shape.placement} if shape.placement != "loop" else {}
    options = [f"{key}={value!r}" for key, value in compile_options.items()]
    options += [f"{key}={key}" for key in shared]
    model = [f"progress_model={request.progress_model!r}"] * (request.progress_model is not None)
    names = ["costs"] * ("costs" in shared) + ["sizes=sizes"] * ("sizes" in shared) + model
    lines += [
        f"program = schedir.compile({', '.join([name, *options])})",
        f"timeline = schedir.simulate({', '.join(['program', *names])})",
        "print(timeline)",
        "",
    ]
    return source + "\n".join(lines)


def _format_fields(value: Costs | Sizes) -> str:
    """Return Python code that creates `value`, with the fields that are not the default."""
    field_values = {f.name: getattr(value, f.name) for f in fields(value)}
    words = [
        f"{f.name}={field_values[f.name]!r}"
        for f in fields(value)
        if field_values[f.name] != f.default
    ]
    return f"{type(value).__name__}({', '.join(words)})"
