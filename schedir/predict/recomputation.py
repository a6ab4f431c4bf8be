"""Recomputation: what it takes and spares, in each of its forms; each claim from simulating it.

A forward is run again as an instruction, R, which may run while a gradient is on its way; or within
its backward, as torch.utils.checkpoint does, which then takes longer by as much.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedir.compiler.again import compute_of
from schedir.errors import in_bytes
from schedir.ir.costs import FIELD, Costs
from schedir.ir.ops import BACKWARD, BACKWARD_INPUT, FORWARD, RECOMPUTE, Opcode
from schedir.ir.per_stage import from_grid
from schedir.ir.program import JOINED, Program, Stream
from schedir.passes.moves import DISK, HOST
from schedir.predict.calibrate import calibrate, completed
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.predict.what_if import LARGE, Lowering


class Forms(NamedTuple):
    """Runs of one schedule in which the same `number` forwards `of` so many are run `again` as R,
    or `within` their backwards, or all that they save is `kept`."""

    again: Timeline
    within: Timeline
    kept: Timeline
    number: int
    of: int


def recomputed(program: Program) -> str:
    """What a program recomputes, in words; nothing where that is nothing.

    >>> from schedir import Plan, compile, schedules
    >>> recomputed(compile(schedules.one_f_one_b, Plan(4, 8), recompute="0,1.0,1.1,1.2,1.5"))
    '12 of 32 forwards: of stage 0 all, of stage 1 0-2 and 5'
    """
    return _of_forwards(program, RECOMPUTE)


def of_forwards(program: Program) -> str:
    """Of which forwards something is done with what they save, a line for each: what is recomputed,
    what is offloaded, and what of that is spilled; nothing where that is nothing."""
    done = {"recomputed": RECOMPUTE, "offloaded": HOST.there, "spilled": DISK.there}
    told = {name: _of_forwards(program, op) for name, op in done.items()}
    return "".join(f"{name}: {which}\n" for name, which in told.items() if which)


def _of_forwards(program: Program, op: Opcode) -> str:
    found: dict[int, list[int]] = {}
    for stream in program.streams:
        for i in stream:
            if i.op is op:
                found.setdefault(i.stage, []).append(i.mb)
    if not found:
        return ""
    many = program.plan.microbatches
    each = [
        f"of stage {stage} {'all' if len(own) == many else _runs(sorted(own))}"
        for stage, own in sorted(found.items())
    ]
    number = sum(map(len, found.values()))
    return f"{number} of {program.plan.stages * many} forwards: {', '.join(each)}"


def _runs(numbers: list[int]) -> str:
    """Numbers, those that follow each other as one run."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    *most, last = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{', '.join(most)} and {last}" if most else last


def forms(timeline: Timeline, costs: Costs | None = None) -> Forms | None:
    """The forms of a run's schedule, lowered as it was: with R for what it recomputes, or for all,
    if that is nothing and the sizes are known of what R spares.

    `costs` are those of a prediction; without, they are read off the run.  None where there is
    nothing to say: of programs without a backward, with nothing that R could spare, or whose
    pairs have a cost of their own; and of very large ones.
    """
    program = timeline.program
    has = RECOMPUTE in program.ops
    if not (has or timeline.sizes) or not program.trains or len(program) > LARGE:
        return None
    costs = completed(costs or calibrate(timeline), program)
    if costs.FB is not None:  # of a pair it is not known what its backward takes
        return None
    draft = compute_of(program)
    lowering, plain = Lowering(program, timeline.model), without(draft)
    kept = lowering.of(plain, costs, recompute=None)
    again = lowering.of(draft, costs, recompute=None if has else "all")
    count = int((again.op == RECOMPUTE).sum())
    runs = [
        simulate(each, price, model=timeline.model, blocks=timeline.blocks, sizes=timeline.sizes)
        for each, price in ((again, costs), (kept, _within(again, costs)), (kept, costs))
    ]
    if not count:
        return None
    one, two, three = (replace(run, unit=timeline.unit) for run in runs)
    return Forms(one, two, three, count, int((again.op == FORWARD).sum()))


def _within(program: Program, costs: Costs) -> Costs:
    """Costs of backwards that begin with what the R of a program does."""
    plan = program.plan
    more = np.zeros((plan.stages, plan.microbatches))
    for stream in program.streams:
        own = stream.op == RECOMPUTE
        more[stream.stage[own], stream.mb[own]] = 1
    more *= costs.of(RECOMPUTE, plan)
    longer = {FIELD[op]: from_grid(costs.of(op, plan) + more) for op in (BACKWARD, BACKWARD_INPUT)}
    return replace(costs, **longer)


def format_forms(found: Forms, *, has: bool) -> str:
    """What forms take, and which is better; `has` says that the program recomputes already."""
    again, within, kept, number, of = found
    unit = kept.unit and f" {kept.unit}"
    less = 1 - again.span / within.span if within.span else 0.0
    better = f"R is {less:.1%} shorter here" if less > 0 else f"which is {-less:.1%} shorter here"
    line = (
        f"{number} of {of} forwards {'are' if has else 'could be'} run again: "
        f"{again.span:.4g}{unit} as R, {within.span:.4g}{unit} within backwards "
        f"({better if abs(less) > 1e-9 else 'no matter which, here'}), {kept.span:.4g}{unit} if not"
    )
    if kept.sizes is not None:
        most, all_of = (in_bytes(float(run.peak_memory.max())) for run in (again, kept))
        line += f"; a rank holds {most}, and {all_of} if not"
    return line


def without(draft: Program) -> Program:
    """A draft without its R; what ran together with one runs alone."""
    streams = []
    for stream in draft.streams:
        gone, words = stream.op == RECOMPUTE, stream.words.copy()
        words[1:][gone[:-1]] &= ~JOINED
        streams.append(Stream(words[~gone]))
    return replace(draft, streams=tuple(streams))
