"""Handlers of the gradient norm.

`update_checks` takes the root of the sum of squares, and clips the gradients. See
`handler_registry` for the arguments and the result of a handler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from schedir.ir.isa.instructions import Instr, Opcode
from schedir.runtime.parameters.buckets import ShardSpec, is_expert
from schedir.runtime.parameters.gradient_buffers import (
    GradientBuffers,
    compute_sum_of_squares,
    is_tp_sharded,
)
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.runtime.services.update_checks import UpdateChecks
from schedir.transports.collectives import GroupKey


def reduce_norm(state: ProgramState, i: Instr) -> Call:
    """Return the call of ReduceNorm: sum the squares of gradients over the ranks of the model."""
    start, reductions = state.transport.start_collective, state.service(PendingReductions)
    compute_squares = make_local_squared_norm(state)
    checks = state.service(UpdateChecks)

    def run() -> None:
        squared_norm = checks.squared_norms[i.mb] = compute_squares()
        reductions.works.append(start("all_reduce", "model", squared_norm, squared_norm))

    return Call(reductions.wait, run)


def make_local_squared_norm(state: ProgramState) -> Callable[[], Tensor]:
    """Return a function that computes the sum of squares of the rank's gradients.

    At every ZeRO level, the function divides each gradient into one shard per replica. It first
    adds the squares within each shard. Then, for each replica k, it adds the sums of the k-th
    shards of all gradients. Last, it adds the sums of all replicas. So the order of additions does
    not depend on the ZeRO level. With expert parallelism the function also adds the squares of the
    experts on other replicas.

    Args:
        state: The state of the rank.

    Returns:
        A function that returns a 0-dim float64 tensor.
    """
    counted_parameters = [
        (stage.gradients, p)
        for s, stage in state.stages.items()
        for p in stage.gradients.parameters
        # If several ranks have the full parameter, only one of them counts it.
        if state.shape.first_rank_per_stage[s] == state.rank
        and (is_tp_sharded(p) or state.transport.tp_rank == 0)
        and not any(
            p is w.local_copies.get(s) and s > w.stages[0] for w in state.resources.ties.weights
        )
    ]

    start, spec = state.transport.start_collective, state.resources.shard_spec

    def make_sum(
        counted_parameters: list[tuple[GradientBuffers, nn.Parameter]],
        spec: ShardSpec,
        group: GroupKey,
    ) -> Callable[[], Tensor]:
        shard_views = [
            [gradients.shard_views[p][k] for gradients, p in counted_parameters]
            for k in range(len(spec.shard_indices))
        ]

        def compute() -> Tensor:
            zero = partial(torch.zeros, (), dtype=torch.float64, device=state.device)
            sums = [
                zero() if (sum_ := compute_sum_of_squares(views)) is None else sum_
                for views in shard_views
            ]
            shard_sums = torch.stack(sums)
            if len(shard_views) < spec.replicas:
                shard_sums = shard_sums.new_empty(spec.replicas)
                start("all_gather", group, shard_sums, torch.stack(sums)).wait()
            return shard_sums.sum()

        return compute

    expert_parameters = [
        (gradients, p)
        for gradients, p in counted_parameters
        if state.program.ep > 1 and is_expert(p)
    ]
    if not expert_parameters:
        return make_sum(counted_parameters, spec, "dp")
    common_parameters = [(gradients, p) for gradients, p in counted_parameters if not is_expert(p)]
    compute_common = make_sum(common_parameters, spec, "dp")
    expert_spec = spec.for_tensor(expert_parameters[0][1])
    compute_experts = make_sum(expert_parameters, expert_spec, "expert_dp")

    def compute() -> Tensor:
        common_squares = compute_common()
        expert_squares = compute_experts()
        start("all_reduce", "ep", expert_squares, expert_squares).wait()
        return common_squares + expert_squares

    return compute


HANDLERS: Final = {Opcode.ReduceNorm: reduce_norm}
