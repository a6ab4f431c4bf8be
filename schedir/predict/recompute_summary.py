"""Describe in words which forwards are recomputed, offloaded or spilled to the disk."""

from __future__ import annotations

from schedir.ir.isa.instructions import RECOMPUTE, Opcode
from schedir.ir.program import Program
from schedir.passes.memory.offload_placement import DISK_TRIP, HOST_TRIP


def describe_recompute(program: Program) -> str:
    """Describe which forwards a program recomputes.

    Args:
        program: The program.

    Returns:
        The text; an empty string if the program recomputes nothing.

    Example:
        >>> from schedir import PipelineShape, compile, schedules
        >>> describe_recompute(compile(schedules.one_f_one_b, PipelineShape(4, 8),
        ...     recompute="0,1.0,1.1,1.2,1.5"))
        '12 of 32 forwards: all of stage 0, mb 0-2 and 5 of stage 1'
    """
    return _describe_op_forwards(program, RECOMPUTE)


def describe_forwards(program: Program) -> str:
    """Describe which forwards are recomputed, offloaded to the host, and spilled to the disk.

    Args:
        program: The program.

    Returns:
        One line for each of these three groups. The line of an empty group is left out.
    """
    op_by_text = {
        "recomputed": RECOMPUTE,
        "offloaded": HOST_TRIP.offload_op,
        "spilled": DISK_TRIP.offload_op,
    }
    lines = {name: _describe_op_forwards(program, op) for name, op in op_by_text.items()}
    return "".join(
        f"{name}: {forwards_text}\n" for name, forwards_text in lines.items() if forwards_text
    )


def _describe_op_forwards(program: Program, op: Opcode) -> str:
    """Describe for which stages and microbatches a program has instructions with an opcode."""
    found: dict[int, list[int]] = {}
    for stream in program.streams:
        for i in stream:
            if i.op is op:
                found.setdefault(i.stage, []).append(i.mb)
    if not found:
        return ""
    microbatches = program.shape.microbatches
    range_texts = [
        ("all" if len(mbs) == microbatches else f"mb {_format_ranges(sorted(mbs))}")
        + f" of stage {stage}"
        for stage, mbs in sorted(found.items())
    ]
    number = sum(map(len, found.values()))
    return f"{number} of {program.shape.stages * microbatches} forwards: {', '.join(range_texts)}"


def _format_ranges(numbers: list[int]) -> str:
    """Format ascending numbers, with consecutive numbers as a range, such as `0-2 and 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    *range_texts, last_text = [
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    ]
    return f"{', '.join(range_texts)} and {last_text}" if range_texts else last_text
