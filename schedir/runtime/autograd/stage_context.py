"""Wrap calls of a stage's module: set its weights and random numbers, and check for writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Instr
from schedir.runtime.autograd.module_buffer_checks import add_buffer_checks
from schedir.runtime.autograd.random_streams import FORWARD
from schedir.runtime.model_checks.tensor_fingerprint import (
    compute_checksums,
    get_local_shard,
    get_versions,
    get_write_traces,
)
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.runtime.program_state import ProgramState
from schedir.runtime.services.stage_weight_versions import find_weight_versions

# ---------------------------------------------------------------- writes to weights

# A stage must not write to a trained weight that has copies: the write would not reach the copies.
#
# `torch.nn.functional.embedding(..., max_norm=...)` and `weight.clamp_()` write in place, and
# `weight.data = other` replaces the memory. Weights of stage replicas and tied weights have copies.


def add_weight_checks(
    state: ProgramState, i: Instr, is_forward: bool, run: Callable[[], None]
) -> Callable[[], None]:
    """Wrap `run` with a check that it writes to no trained weight that has copies.

    The check covers the stage's first call for each opcode and mode (training or evaluation). On a
    CPU the check also finds writes to `weight.data`.

    Args:
        state: The state of the rank.
        i: The instruction that `run` executes.
        is_forward: True for a forward, False for a backward.
        run: A function that runs the module of the instruction's stage.

    Returns:
        A function that raises ModelError if the check fails, or `run` if no trained weight of the
        stage has copies.
    """
    stage, replica_count = state.stages[i.stage], state.shape.placement_rows
    tied_ids = {id(p) for p in state.resources.ties.list_local_copies(i.stage)}
    has_replicas, on_cpu = replica_count > 1, state.device.type == "cpu"
    if (
        not state.program.has_backward
        or i.stage < state.program.frozen_stages
        or not (has_replicas or tied_ids)
    ):
        return run

    def list_weights() -> dict[str, Tensor]:
        named_parameters = stage.module.named_parameters()
        return {
            name: p
            for name, p in named_parameters
            if p.requires_grad and (has_replicas or id(p) in tied_ids)
        }

    def run_checked() -> None:
        mode = (i.op, stage.module.training)
        if state.is_evaluating or mode in stage.checked_weight_modes:
            run()
            return
        old_weights = list_weights()
        # With ZeRO level 3 the memory of weights may be freed. Then `ShardedParameters` compares
        # the values of these weights.
        is_readable = stage.sharded_parameters.keeps_full_weights
        compared_values = (
            [get_local_shard(p.detach()) for p in old_weights.values()]
            if on_cpu and is_readable
            else []
        )
        old_traces = get_write_traces([*old_weights.values()])
        old_checksums = compute_checksums(compared_values)
        run()
        stage.checked_weight_modes.add(mode)
        new_parameters = dict(stage.module.named_parameters())
        new_traces = get_write_traces([*old_weights.values()])
        new_checksums = compute_checksums(compared_values)
        for k, (name, p) in enumerate(old_weights.items()):
            has_same_sum = not compared_values or old_checksums[k] == new_checksums[k]
            if new_parameters.get(name) is p and old_traces[k] == new_traces[k] and has_same_sum:
                continue
            pass_name = "forward" if is_forward else "backward"
            copies = (
                f"in its {replica_count} stage replicas"
                if has_replicas
                else "in the stages that share it"
            )
            raise ModelError(
                f"stage {i.stage} writes to its weight {name} in a {pass_name}: the write would "
                f"not reach the copies {copies}",
                hint="write to weights between steps (for an embedding, set max_norm=None)",
            )

    return run_checked


# ---------------------------------------------------------------- weights and random numbers


def wrap_stage_run(
    state: ProgramState, i: Instr, purpose: int, run: Callable[[], None]
) -> Callable[[], None]:
    """Wrap `run`: set random numbers and weights for the microbatch, and check for writes.

    Args:
        state: The state of the rank.
        i: The instruction that `run` executes. A backward may recompute its forward in `run`.
        purpose: The purpose of the random numbers, a constant of `runtime.autograd.random_streams`.
        run: A function that runs the module of the instruction's stage.

    Returns:
        A function that raises ModelError if a check fails.
    """
    versions = find_weight_versions(state, i.stage)
    if purpose == FORWARD and versions is not None:
        run = partial(_run_checking_gradients, state.stages[i.stage].gradients, i.stage, run)
        run = partial(
            _run_checking_parameters,
            versions,
            int(state.shape.weight_version(i.stage, i.mb)),
            run,
        )
    run = add_weight_checks(state, i, purpose == FORWARD, run)
    run_checked = add_buffer_checks(state, i, purpose == FORWARD, run)
    run_seeded = state.random_streams.make_seeded(purpose, i.stage, i.mb, run_checked)
    return bind_weight_version(state, i, run_seeded)


def _run_checking_gradients(
    gradients: GradientBuffers, stage: int, run: Callable[[], None]
) -> None:
    """Run a forward, and raise ModelError if it adds to gradients.

    In a program with several updates, the gradient buffers may still have gradients of an earlier
    update.
    """
    before = get_versions(gradients.flat)
    run()
    if get_versions(gradients.flat) != before:
        raise ModelError(
            f"stage {stage} calls backward() in its forward, but the program has several updates, "
            "and the gradient could be added to another update",
            hint="add the auxiliary loss to the loss, or compile a program with one update",
        )


def _run_checking_parameters(
    versions: WeightVersions, version: int, run: Callable[[], None]
) -> None:
    """Run a forward. In the first step, raise ModelError if a parameter was replaced."""
    run()
    if versions.compares_values:
        versions.require_in_place(version)


def bind_weight_version(
    state: ProgramState, i: Instr, run: Callable[[], None]
) -> Callable[[], None]:
    """Wrap `run` so that the module first gets the weight version of the microbatch.

    If the stage has no weight versions, but shares a Parameter with another stage of the process,
    the module gets a substitute for this Parameter.

    Args:
        state: The state of the rank.
        i: The instruction that `run` executes.
        run: The function to call after the weights are set.

    Returns:
        A function, or `run` if the stage has neither weight versions nor substitutes.
    """
    stage, versions = state.stages[i.stage], find_weight_versions(state, i.stage)
    if versions is not None:
        use: Callable[[], None] = partial(
            versions.use, int(state.shape.weight_version(i.stage, i.mb))
        )
    elif stage.local_ties.substitutions:
        use = stage.local_ties.install_substitutes
    else:
        return run

    def use_and_run() -> None:
        use()
        run()

    return use_and_run
