"""Torch's split backward, and full backwards where it would lose gradients.

torch takes the weights' half from what lies between weights and inputs.  A weight from which no way
leads to an output past an input, as in a stage behind frozen ones, or of a table that is handed on,
is in none of its groups, and gets no gradient, nor a word; nor does one that is no parameter of the
stage, as of a loss that is trained.  And it detaches what backwards begin with in place, which
cannot be done with views.

Both halves run the nodes where weights and inputs join. A `torch.autograd.Function` there may count
its calls, add to a gradient of its own, or write to its arguments. Then only a full backward is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.distributed.pipelining import _backward as theirs


def loses(stage: Any, ends: Sequence[object], mb: int) -> bool:
    """Return whether the halves of torch's split backward would be wrong for a microbatch.

    They are wrong if they leave out a weight that is used, or a path from it to an output, if they
    count a path twice, or if they call a `torch.autograd.Function` twice.

    Args:
        stage: A stage of torch, after its forward.
        ends: The tensors that the backward begins with: outputs, or a loss.
        mb: The microbatch.
    """
    taken, roots = _nodes(stage.fwd_cache[mb][1]), _nodes(ends)
    weights = _nodes([p for p in stage.submod.parameters() if p.requires_grad])
    ways = theirs.construct_reverse_graph(roots)
    if any(type(node).__name__.endswith("CheckpointFunctionBackward") for node in (*ways, *roots)):
        return True  # a reentrant checkpoint refuses torch.autograd.grad
    used = {node for node in ways if hasattr(node, "variable")} - {*taken}
    groups = theirs.get_param_groups(taken, weights, ways)  # adds unused weights to `ways`
    found = [node for group in groups for node in group["params"]]
    if used - {*found} or len(found) > len({*found}):
        return True
    twice = [node for group in groups for node in _in_both(group, ways)]
    if len(twice) > len({*twice}) or any(isinstance(node, BackwardCFunction) for node in twice):
        return True  # the half of one group frees saved tensors that other groups need
    return any(_passes(group, ways, {*roots}) for group in groups)


def _in_both(group: Any, ways: Any) -> set[Any]:
    """Return the nodes of a group of weights that both halves run.

    These are the nodes where the weights join tensors that depend on inputs. If there are several,
    both halves also run the nodes between two of them.
    """
    joins: set[Any] = group["intermediates"]
    if len(joins) < 2:
        return joins
    above = _reached(joins, lambda node: ways.get(node, ()))
    below = _reached(joins, lambda node: [child for child, _ in node.next_functions])
    return joins | (above & below)


def _reached(nodes: set[Any], further: Callable[[Any], Any]) -> set[Any]:
    """Return all nodes that `further` reaches from `nodes` in one or more steps."""
    seen: set[Any] = set()
    left = [*nodes]
    while left:
        new = {node for node in further(left.pop()) if node is not None} - seen
        seen |= new
        left += new
    return seen


def _passes(group: Any, ways: Any, roots: set[Any]) -> bool:
    """Whether a way leads from weights to an output past what their half is taken from."""
    seen = set(group["params"])
    left = [*seen]
    while left:
        node = left.pop()
        if node in roots:
            return True
        further = {*ways.get(node, ())} - seen - group["intermediates"]
        seen |= further
        left += further
    return False


def _nodes(tensors: Sequence[object]) -> list[Any]:
    """Where gradients of tensors come to in the graph."""
    own = (t for t in tensors if isinstance(t, Tensor) and t.requires_grad)
    return [node for t in own if (node := theirs._get_grad_fn_or_grad_acc(t)) is not None]


def detachable(end: Any) -> Any:
    """What a backward begins with, as a tensor that can be detached in place and is no input: the
    same memory where it is a view or was handed on."""
    plain = type(end) in (Tensor, nn.Parameter)
    again = plain and (end._is_view() or (end.is_leaf and end.requires_grad))
    return _MemoryAlias.apply(end) if again else end  # type: ignore[no-untyped-call]


class _MemoryAlias(Function):
    """The same memory in a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def whole_at_i() -> Callable[[], None]:
    """A stage's `dw_builder`: with one, torch takes the whole backward at I; this does nothing at
    W."""
    return lambda: None
