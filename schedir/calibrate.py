"""Calibrate: from a measured run, the costs that predict it."""

from __future__ import annotations

import numpy as np

from schedir.costs import FIELD, Cost, Costs
from schedir.ops import COMPUTE, SENDS
from schedir.timeline import Timeline


def calibrate(measured: Timeline) -> Costs:
    """The mean time of each instruction: per stage for F, B, I and W, one number for others.

    Instructions that the program, or a stage of it, does not have cost nothing.  A prediction
    from these costs does the measured work without any waiting that the program does not ask for.
    """
    spans, stages = measured.spans, range(measured.program.plan.stages)
    took = spans["end"] - spans["start"]
    costs: dict[str, Cost] = {}
    for name in dict.fromkeys(FIELD.values()):
        ops = [op for op, field in FIELD.items() if field == name]
        here = np.isin(spans["op"], ops)
        if not here.any():
            costs[name] = 0.0
        elif ops[0] in COMPUTE:
            each = (took[here & (spans["stage"] == s)] for s in stages)
            costs[name] = tuple(float(t.mean()) if len(t) else 0.0 for t in each)
        elif ops[0] in SENDS:
            # A message is seen to have arrived when its receiver looks: most look longer.
            costs[name] = float(took[here].min())
        else:
            costs[name] = float(took[here].mean())
    return Costs(**costs)
