"""Weight writes: refuse a stage that writes to a trained weight of which there are copies.

`torch.nn.functional.embedding(..., max_norm=...)` and `weight.clamp_()` write in place, and
`weight.data = other` replaces the memory.  Copies of the weight, as those of another holder of the
stage or of a tied weight, would not have what was written.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.ops import Instr
from schedir.runtime.bits import local_of, sums_of, traces_of
from schedir.runtime.rank import State


def weight_writes_checked(
    state: State, i: Instr, forward: bool, run: Callable[[], None]
) -> Callable[[], None]:
    """Return `run`, which runs a stage `forward` or backward, with a check of its first call.

    The check raises ModelError if the call writes to a trained weight that has copies.  On a CPU,
    where the host may read numbers, it also finds writes to `weight.data`.  Of each kind of
    instruction the first call in training mode is checked, and the first in evaluation mode.
    """
    stage, holders = state.stages[i.stage], state.plan.rows
    tied = {id(weight.own[i.stage]) for weight in state.tied if i.stage in weight.own}
    copied, on_cpu = holders > 1, state.device.type == "cpu"
    if not state.trains or i.stage < state.program.frozen or not (copied or tied):
        return run

    def weights() -> dict[str, Tensor]:
        named = stage.module.named_parameters()
        return {name: p for name, p in named if p.requires_grad and (copied or id(p) in tied)}

    def checked() -> None:
        look = (i.op, stage.module.training)
        if state.looks or look in stage.weights_checked:
            run()
            return
        before = weights()
        # With ZeRO 3 the memory of weights may be freed, and `Parts` compares their numbers.
        readable = stage.weights is None or stage.weights.stays
        by_value = [local_of(p.detach()) for p in before.values()] if on_cpu and readable else []
        traces, sums = traces_of([*before.values()]), sums_of(by_value)
        run()
        stage.weights_checked.add(look)
        after = dict(stage.module.named_parameters())
        traces_now, sums_now = traces_of([*before.values()]), sums_of(by_value)
        for k, (name, p) in enumerate(before.items()):
            same_sum = not by_value or sums[k] == sums_now[k]
            if after.get(name) is p and traces[k] == traces_now[k] and same_sum:
                continue
            pass_ = "forward" if forward else "backward"
            why = f"its {holders} holders have copies" if copied else "it is tied to other stages"
            raise ModelError(
                f"stage {i.stage} writes to its weight {name} in a {pass_}, and {why}, which would "
                "not have what is written",
                hint="write to weights between steps (an embedding: max_norm=None)",
            )

    return checked
