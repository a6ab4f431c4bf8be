"""Wrap the run of a stage's module: set weights and random numbers, and check what it writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Instr
from schedir.runtime.autograd.module_buffers import buffers_checked
from schedir.runtime.autograd.random_streams import FORWARD
from schedir.runtime.model_checks.tensor_fingerprint import (
    local_of,
    sums_of,
    traces_of,
    versions_of,
)
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.runtime.rank_state import State

# ---------------------------------------------------------------- writes to weights

# Refuse a stage that writes to a trained weight that has copies.
#
# `torch.nn.functional.embedding(..., max_norm=...)` and `weight.clamp_()` write in place, and
# `weight.data = other` replaces the memory. Other holders of the stage, and stages with a tied
# weight, have copies of the weight. The write would not reach these copies.


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
    stage, holders = state.stages[i.stage], state.shape.rows
    tied = {id(weight.own[i.stage]) for weight in state.tied if i.stage in weight.own}
    copied, on_cpu = holders > 1, state.device.type == "cpu"
    if not state.trains or i.stage < state.program.frozen_stages or not (copied or tied):
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


# ---------------------------------------------------------------- weights and random numbers


def around(state: State, i: Instr, purpose: int, run: Callable[[], None]) -> Callable[[], None]:
    """Return `run` with the random numbers and the weights of its microbatch, and with checks.

    Args:
        state: The state of the rank.
        i: The instruction that `run` executes, also if a backward recomputes its forward.
        purpose: What random numbers are for, one of the constants of `runtime.random`.
        run: A function that runs the module of the instruction's stage.
    """
    if purpose == FORWARD and i.stage in state.versions:
        run = partial(_without_gradients, state.stages[i.stage].gradients, i.stage, run)
        run = partial(
            _in_place, state.versions[i.stage], int(state.shape.version(i.stage, i.mb)), run
        )
    run = weight_writes_checked(state, i, purpose == FORWARD, run)
    checked = buffers_checked(state, i, purpose == FORWARD, run)
    seeded = state.draws.seeded(purpose, i.stage, i.mb, checked)
    return on_version(state, i, seeded)


def _without_gradients(gradients: GradientBuffers, stage: int, run: Callable[[], None]) -> None:
    """Run a forward; raise ModelError if it adds to gradients.

    In a program of several updates a forward may run while the sum has gradients of an update
    before its own.
    """
    before = versions_of(gradients.flat)
    run()
    if versions_of(gradients.flat) != before:
        raise ModelError(
            f"stage {stage} calls backward() in its forward, and in a program of several updates "
            "the gradient may be added to that of another update",
            hint="add the auxiliary loss to the loss, or compile a program of one update",
        )


def _in_place(versions: WeightVersions, version: int, run: Callable[[], None]) -> None:
    """Run a forward. In the first step, raise ModelError if it replaced a Parameter."""
    run()
    if versions.by_value:
        versions.require_in_place(version)


def on_version(state: State, i: Instr, run: Callable[[], None]) -> Callable[[], None]:
    """Return `run` with the version of the weights that its microbatch uses.

    A stage that shares a Parameter with other ranks uses its own copy.
    """
    stage, versions = state.stages[i.stage], state.versions.get(i.stage)
    if versions is not None:
        use: Callable[[], None] = partial(versions.use, int(state.shape.version(i.stage, i.mb)))
    elif stage.own is not None:
        use = stage.own.use
    else:
        return run

    def on() -> None:
        use()
        run()

    return on
