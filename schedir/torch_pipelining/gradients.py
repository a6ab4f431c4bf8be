"""Reduce, sum and scale the gradients of a step of torch's runtime, once per step.

If gradients are accumulated over steps, the gradients of earlier steps are set aside and added at
the end. Otherwise a step would divide the gradients of earlier steps again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.runtime.model_checks.tensor_fingerprint import get_local_shard
from schedir.runtime.parameters.tied_parameters import TiedWeight

BUCKET_BYTES = 25 << 20  # the largest size of an all-reduce of several gradients, as in DDP


def list_parameters(stages: Iterable[Any]) -> list[nn.Parameter]:
    """Return the trained parameters of stages, each once even if two stages share it.

    Args:
        stages: Stages of torch.
    """
    trained = (p for stage in stages for p in stage.submod.parameters() if p.requires_grad)
    return [*dict.fromkeys(trained)]


@contextmanager
def set_gradients_aside(stages: Sequence[Any]) -> Iterator[None]:
    """Remove the gradients of stages in this context, and add them again when it ends.

    Args:
        stages: Stages of torch.
    """
    bucket_views = _find_bucket_views(stages)
    gradients = {p: p.grad for p in list_parameters(stages) if p.grad is not None}
    saved_grads = {p: grad.clone() if p in bucket_views else grad for p, grad in gradients.items()}
    for p in saved_grads:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in saved_grads.items():
            if p.grad is not None and p in bucket_views:
                p.grad.add_(grad)
                continue
            if p.grad is not None:
                grad.add_(p.grad)
            p.grad = grad


def _find_bucket_views(stages: Iterable[Any]) -> set[nn.Parameter]:
    """Return the parameters whose gradients may be views of DDP's buckets.

    DDP writes to its buckets again, so these gradients must be copied.
    """
    return {
        p
        for stage in stages
        for module in stage.submod.modules()
        if getattr(module, "gradient_as_bucket_view", False)
        for p in module.parameters()
    }


@torch.no_grad()
def scale_gradients(stages: Sequence[Any], divisor: int) -> None:
    """Divide the gradients of all trained parameters, each once.

    Args:
        stages: Stages of torch.
        divisor: The divisor.
    """
    for p in list_parameters(stages):
        if p.grad is not None:
            p.grad.div_(divisor)


# ------------------------------------------------------------ over replicas


@torch.no_grad()
def average_over_replicas(ddp: Any) -> None:
    """Average each gradient over the replicas of a stage, as its DDP would.

    If only some replicas have a gradient of a parameter, the missing gradients count as zeros.
    Gradients with the same dtype and device are reduced in buckets, in the order of the module's
    parameters. All replicas must call this.

    Args:
        ddp: The DistributedDataParallel module of the stage.
    """
    group, ignored_names = ddp.process_group, ddp.parameters_to_ignore
    named_parameters = ((name, p) for name, p in ddp.module.named_parameters() if p.requires_grad)
    parameters = [p for name, p in named_parameters if name not in ignored_names]
    if not parameters:
        return
    has_gradient = torch.tensor(
        [p.grad is not None for p in parameters],
        dtype=torch.int32,
        device=parameters[0].device,
    )
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    used_params = [
        p for p, is_used in zip(parameters, has_gradient.tolist(), strict=True) if is_used
    ]
    for p in used_params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _make_buckets([p.grad for p in used_params if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        flat.div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        offset = 0
        for grad in bucket:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()


def _make_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients in buckets of one dtype and device, with up to `BUCKET_BYTES` bytes.

    A bucket of a single gradient may be larger.
    """
    gradients_by_kind: dict[object, list[Tensor]] = {}
    for grad in gradients:
        gradients_by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for same_kind in gradients_by_kind.values():
        bucket: list[Tensor] = []
        for grad in same_kind:
            if bucket and sum(g.nbytes for g in bucket) + grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket


# ------------------------------------------------------------ over copies of one weight


@torch.no_grad()
def sum_tied_gradients(weights: Sequence[TiedWeight], rank_of: Sequence[int], group: Any) -> None:
    """Sum the gradients of the copies of each tied weight, and write the sum to all copies.

    Ranks exchange the gradients of their copies, and each rank adds these gradients in the order of
    stages. So all ranks get the same bits. Every rank with a copy must call this, with the weights
    in the same order.

    Args:
        weights: The tied weights that have copies on this rank.
        rank_of: The rank of each stage.
        group: The process group of the pipeline.
    """
    rank, make_message = dist.get_rank(group), partial(dist.P2POp, group=group)
    messages: list[dist.P2POp] = []
    rows: list[dict[int, Tensor]] = []
    for weight in weights:
        visited: set[nn.Parameter] = set()
        local_grads = {s: _contiguous_gradient(p, visited) for s, p in weight.local_copies.items()}
        template = next(iter(local_grads.values()))
        row = {
            s: local_grads[s] if s in local_grads else torch.empty_like(template)
            for s in weight.stages
        }
        peers = sorted({rank_of[s] for s in weight.stages} - {rank})
        for s, gradient in row.items():
            if s in local_grads:
                messages += [make_message(dist.isend, gradient, group_peer=peer) for peer in peers]
            else:
                messages.append(make_message(dist.irecv, gradient, group_peer=rank_of[s]))
        rows.append(row)
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    for weight, row in zip(weights, rows, strict=True):
        first_stage, *other_stages = weight.stages
        total = row[first_stage].clone()
        for s in other_stages:
            total += row[s]
        for p in dict.fromkeys(weight.local_copies.values()):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            get_local_shard(p.grad).copy_(total)


def _contiguous_gradient(p: nn.Parameter, visited: set[nn.Parameter]) -> Tensor:
    """Return the gradient of a copy of a tied weight, as a contiguous tensor.

    Return zeros if the copy has no gradient, or if its Parameter is in `visited`. Two stages of a
    rank may share one Parameter, whose gradient must be counted once.
    """
    has_gradient = p.grad is not None and p not in visited
    visited.add(p)
    return get_local_shard(
        p.grad if has_gradient and p.grad is not None else torch.zeros_like(p)
    ).contiguous()
