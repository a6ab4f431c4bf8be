"""Reduce, sum and scale the gradients of a step of torch's runtime, once each.

What was there before the step, as of the step before where gradients are accumulated, is put aside
and added at the end: else torch divides it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.runtime.parameters.tied_parameters import TiedWeight

SavedGradients = Mapping[nn.Parameter, Tensor]
BUCKET_BYTES = 25 << 20  # bytes that are reduced at once, as DDP has it


def list_parameters(stages: Iterable[Any]) -> list[nn.Parameter]:
    """The trained parameters of stages, each once: two stages may have one."""
    found = (p for stage in stages for p in stage.submod.parameters() if p.requires_grad)
    return [*dict.fromkeys(found)]


@contextmanager
def set_gradients_aside(stages: Sequence[Any]) -> Iterator[None]:
    """Within this, gradients begin with nothing; after it those of before are added."""
    shared = _find_bucket_views(stages)
    there = {p: p.grad for p in list_parameters(stages) if p.grad is not None}
    before = {p: grad.clone() if p in shared else grad for p, grad in there.items()}
    for p in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before.items():
            if p.grad is not None and p in shared:
                p.grad.add_(grad)
                continue
            if p.grad is not None:
                grad.add_(p.grad)
            p.grad = grad


def _find_bucket_views(stages: Iterable[Any]) -> set[nn.Parameter]:
    """Parameters whose gradients may be views of a DDP's buckets, into which it writes again."""
    return {
        p
        for stage in stages
        for module in stage.submod.modules()
        if getattr(module, "gradient_as_bucket_view", False)
        for p in module.parameters()
    }


@torch.no_grad()
def scale_gradients(stages: Sequence[Any], divisor: int) -> None:
    """Divide the gradients of all parameters, each once."""
    for p in list_parameters(stages):
        if p.grad is not None:
            p.grad.div_(divisor)


# ------------------------------------------------------------ over replicas


@torch.no_grad()
def average_over_replicas(ddp: Any) -> None:
    """The mean of each gradient over the replicas of a stage, as its DDP would take it: of a
    parameter that has a gradient on some of them, others count as zeros.

    Parameters are added in their order, in buckets of one type; all replicas call this.
    """
    group, left_out = ddp.process_group, ddp.parameters_to_ignore
    trained = ((name, p) for name, p in ddp.module.named_parameters() if p.requires_grad)
    own = [p for name, p in trained if name not in left_out]
    if not own:
        return
    has = torch.tensor([p.grad is not None for p in own], dtype=torch.int32, device=own[0].device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    used = [p for p, some in zip(own, has.tolist(), strict=True) if some]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _make_buckets([p.grad for p in used if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        flat.div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        at = 0
        for grad in bucket:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()


def _make_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in their order, those of one type together up to BUCKET bytes."""
    kinds: dict[object, list[Tensor]] = {}
    for grad in gradients:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for kind in kinds.values():
        bucket: list[Tensor] = []
        for grad in kind:
            if bucket and sum(g.nbytes for g in bucket) + grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket


# ------------------------------------------------------------ over copies of one weight


@torch.no_grad()
def sum_tied_gradients(weights: Sequence[TiedWeight], rank_of: Sequence[int], group: Any) -> None:
    """Add up the gradients of the copies of each tied weight, in the order of stages, into all.

    Ranks that hold copies send each other theirs, so that each adds them up itself: all get the
    same bits.  Every rank that has a copy calls this, with the weights in the same order.
    """
    rank = dist.get_rank(group)
    messages: list[dist.P2POp] = []
    rows: list[dict[int, Tensor]] = []
    for weight in weights:
        seen: set[nn.Parameter] = set()
        own = {s: _contiguous_gradient(p, seen) for s, p in weight.local_copies.items()}
        like = next(iter(own.values()))
        row = {s: own[s] if s in own else torch.empty_like(like) for s in weight.stages}
        peers = sorted({rank_of[s] for s in weight.stages} - {rank})
        for s, gradient in row.items():
            if s in own:
                messages += [_make_p2p_op(dist.isend, gradient, peer, group) for peer in peers]
            else:
                messages.append(_make_p2p_op(dist.irecv, gradient, rank_of[s], group))
        rows.append(row)
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    for weight, row in zip(weights, rows, strict=True):
        first, *others = weight.stages
        total = row[first].clone()
        for s in others:
            total += row[s]
        for p in dict.fromkeys(weight.local_copies.values()):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            _to_local(p.grad).copy_(total)


def _make_p2p_op(op: Any, tensor: Tensor, peer: int, group: Any) -> dist.P2POp:
    return dist.P2POp(op, tensor, group=group, group_peer=peer)


def _contiguous_gradient(p: nn.Parameter, seen: set[nn.Parameter]) -> Tensor:
    """A copy's gradient, contiguous; zeros where nothing has used it, and where another stage of
    the rank has the same Parameter, whose gradient is of both."""
    there = p.grad is not None and p not in seen
    seen.add(p)
    return _to_local(p.grad if there and p.grad is not None else torch.zeros_like(p)).contiguous()


def _to_local(tensor: Tensor) -> Tensor:
    """A rank's shard of a tensor that is cut up, or a tensor that is not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
