"""Weight writes: refuse a stage that writes to a trained weight that has copies.

`torch.nn.functional.embedding(..., max_norm=...)` and `weight.clamp_()` write in place, and
`weight.data = other` replaces the memory.  Other holders of the stage, and stages with a tied
weight, have copies of the weight.  The write would not reach these copies.
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
    """Return `run` with a check that its first call writes to no trained weight that has copies.

    The check covers the first call of each kind of instruction in training mode, and the first in
    evaluation mode.  On a CPU it also finds writes to `weight.data`.  The returned function raises
    ModelError if the check fails.

    Args:
        state: The state of the rank.
        i: The instruction that `run` executes.
        forward: Whether `run` is a forward. Otherwise it is a backward.
        run: A function that runs the module of the instruction's stage.
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
        kind = (i.op, stage.module.training)
        if state.looks or kind in stage.weights_checked:
            run()
            return
        before = weights()
        # With ZeRO level 3 the memory of weights may be freed.  `Parts` compares their numbers.
        readable = stage.weights is None or stage.weights.stays
        by_value = [local_of(p.detach()) for p in before.values()] if on_cpu and readable else []
        traces, sums = traces_of([*before.values()]), sums_of(by_value)
        run()
        stage.weights_checked.add(kind)
        after = dict(stage.module.named_parameters())
        traces_now, sums_now = traces_of([*before.values()]), sums_of(by_value)
        for k, (name, p) in enumerate(before.items()):
            same_sum = not by_value or sums[k] == sums_now[k]
            if after.get(name) is p and traces[k] == traces_now[k] and same_sum:
                continue
            pass_ = "forward" if forward else "backward"
            copies = f"of its {holders} holders" if copied else "of the stages that share it"
            raise ModelError(
                f"stage {i.stage} writes to its weight {name} in a {pass_}: the write would not "
                f"reach the copies {copies}",
                hint="write to weights between steps (an embedding: max_norm=None)",
            )

    return checked
