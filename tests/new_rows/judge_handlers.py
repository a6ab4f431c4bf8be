"""Judge: sum the number of gradients that are not finite over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.services.pending_reductions import PendingReductions

VERDICTS: list[Tensor] = []  # of each rank, for `run_checks.py`


def judge(state: ProgramState, i: Instr) -> Call:
    """Return the call of Judge: count the rank's gradients that are not finite, and sum."""
    verdict = torch.ones(1)
    VERDICTS.append(verdict)
    reductions = state.service(PendingReductions)

    def run() -> None:
        flats = [flat for stage in state.stages.values() for flat in stage.gradients.flat]
        count = sum(int((~flat.isfinite()).sum()) for flat in flats)
        # A reduce-scatter of one copy for each rank gives each rank the sum.
        copies = torch.full((state.shape.ranks,), float(count))
        work = state.transport.start_collective("reduce_scatter", "model", verdict, copies)
        reductions.works.append(work)

    return Call(reductions.wait, run)


HANDLERS = {Opcode.Judge: judge}
