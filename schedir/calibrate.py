"""Calibrate: from a measured run, the costs that predict it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.costs import FIELD, Cost, Costs
from schedir.idleness import Cause, idleness
from schedir.ops import COMPUTE, GATHERS, SENDS, TRANSFERS, Opcode
from schedir.program import Program
from schedir.timeline import Timeline

Floats = NDArray[np.float64]

SPLIT: Final = (Opcode.BackwardInput, Opcode.BackwardWeight)


def calibrate(measured: Timeline) -> Costs:
    """The mean time of each instruction: per stage for F, B, I, W and pairs, one for others.

    The host's time before an instruction of the compute lane, when all that it waits for is
    there (`Cause.HOST`), is counted with it.  Of messages, and of gathers, only those count
    that their receiver waited for, if there are any: others are seen to have arrived when the
    receiver looks.

    Instructions that the program, or a stage of it, does not have cost nothing.  A prediction
    from these costs does the measured work without any waiting that the program does not ask for.
    """
    spans, stages = measured.spans, range(measured.program.plan.stages)
    idle = idleness(measured)
    took = spans["end"] - spans["start"]
    host = idle[idle["cause"] == Cause.HOST]
    np.add.at(took, host["awaits"], host["end"] - host["start"])
    second = measured.second_of_pair
    paired = second | np.append(second[1:], False)
    costs: dict[str, Cost] = {}
    for name in dict.fromkeys(FIELD.values()):
        ops = [op for op, field in FIELD.items() if field == name]
        here = np.isin(spans["op"], ops)
        if not here.any():
            costs[name] = 0.0
        elif ops[0] in COMPUTE:
            of = [here & (spans["stage"] == s) for s in stages]
            costs[name] = tuple(_mean(took[w & ~paired]) or _part(name, took[w]) for w in of)
        elif ops[0] in SENDS:
            costs[name] = _awaited(measured, idle, took, TRANSFERS)
        elif ops[0] in GATHERS:
            costs[name] = _awaited(measured, idle, took, GATHERS)
        else:
            costs[name] = _mean(took[here])
    if second.any():
        ahead = paired & (spans["op"] == Opcode.Forward)
        costs["FB"] = tuple(_mean(took[ahead & (spans["stage"] == s)]) for s in stages)
    return Costs(**costs)


def _mean(times: Floats) -> float:
    return float(times.mean()) if len(times) else 0.0


def _part(name: str, pairs: Floats) -> float:
    """What F and B take on a stage where they are never alone: a pair's third, and the rest."""
    return _mean(pairs) * (1 / 3 if name == "F" else 2 / 3)


def _awaited(
    measured: Timeline, idle: NDArray[Any], took: Floats, ops: tuple[Opcode, ...]
) -> float:
    """The median of those of `ops` that somebody waited for; if there are none, the least."""
    waited = np.unique(idle["awaits"][idle["cause"] == Cause.MESSAGE])
    waited = waited[np.isin(measured.spans["op"][waited], ops)]
    if len(waited):
        return float(np.median(took[waited]))
    return float(took[np.isin(measured.spans["op"], ops)].min())


def completed(costs: Costs, program: Program) -> Costs:
    """Costs of a run with those of backwards that it does not have: a whole one is I + W, and
    of a whole one I and W are half each.
    """
    table = costs.table(program.plan.stages)
    whole, first, late = (table[op] for op in (Opcode.Backward, *SPLIT))
    if Opcode.BackwardInput not in program.ops:
        half = tuple((whole / 2).tolist())
        return replace(costs, I=half, W=half, B=tuple(whole.tolist()))
    if Opcode.Backward not in program.ops:
        costs = replace(costs, B=tuple((first + late).tolist()))
    return costs


def told(costs: Costs) -> str:
    """Costs as the option --costs takes them.

    >>> told(Costs(F=(1.5, 2.0), B=3.0, I=1.0, W=2.0, send=0.25)).split(",step")[0]
    'F=1.5:2,I=1,W=2,B=3,send=0.25'
    """
    values = {f.name: getattr(costs, f.name) for f in fields(costs)}
    return ",".join(
        f"{name}={':'.join(f'{cost:.6g}' for cost in np.atleast_1d(value))}"
        for name, value in values.items()
        if value is not None
    )
