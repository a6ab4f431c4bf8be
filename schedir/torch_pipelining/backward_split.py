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


def split_loses_gradients(stage: Any, backward_inputs: Sequence[object], mb: int) -> bool:
    """Return whether the halves of torch's split backward would be wrong for a microbatch.

    They are wrong if they leave out a weight that is used, or a path from it to an output, if they
    count a path twice, or if they call a `torch.autograd.Function` twice.

    Args:
        stage: A stage of torch, after its forward.
        backward_inputs: The tensors that the backward begins with: outputs, or a loss.
        mb: The microbatch.
    """
    taken, roots = _gradient_nodes(stage.fwd_cache[mb][1]), _gradient_nodes(backward_inputs)
    weights = _gradient_nodes([p for p in stage.submod.parameters() if p.requires_grad])
    ways = theirs.construct_reverse_graph(roots)
    if any(type(node).__name__.endswith("CheckpointFunctionBackward") for node in (*ways, *roots)):
        return True  # a reentrant checkpoint refuses torch.autograd.grad
    used = {node for node in ways if hasattr(node, "variable")} - {*taken}
    groups = theirs.get_param_groups(taken, weights, ways)  # adds unused weights to `reverse_graph`
    found = [node for group in groups for node in group["params"]]
    if used - {*found} or len(found) > len({*found}):
        return True
    twice = [node for group in groups for node in _nodes_in_both_halves(group, ways)]
    if len(twice) > len({*twice}) or any(isinstance(node, BackwardCFunction) for node in twice):
        return True  # the half of one group frees saved tensors that other groups need
    return any(_bypasses_group(group, ways, {*roots}) for group in groups)


def _nodes_in_both_halves(group: Any, reverse_graph: Any) -> set[Any]:
    """Return the nodes of a group of weights that both halves run.

    These are the nodes where the weights join tensors that depend on inputs. If there are several,
    both halves also run the nodes between two of them.
    """
    joins: set[Any] = group["intermediates"]
    if len(joins) < 2:
        return joins
    above = _reachable_nodes(joins, lambda node: reverse_graph.get(node, ()))
    below = _reachable_nodes(joins, lambda node: [child for child, _ in node.next_functions])
    return joins | (above & below)


def _reachable_nodes(nodes: set[Any], get_neighbours: Callable[[Any], Any]) -> set[Any]:
    """Return all nodes that `get_neighbours` reaches from `nodes` in one or more steps."""
    seen: set[Any] = set()
    left = [*nodes]
    while left:
        new = {node for node in get_neighbours(left.pop()) if node is not None} - seen
        seen |= new
        left += new
    return seen


def _bypasses_group(group: Any, reverse_graph: Any, roots: set[Any]) -> bool:
    """Whether a way leads from weights to an output past what their half is taken from."""
    seen = set(group["params"])
    left = [*seen]
    while left:
        node = left.pop()
        if node in roots:
            return True
        further = {*reverse_graph.get(node, ())} - seen - group["intermediates"]
        seen |= further
        left += further
    return False


def _gradient_nodes(tensors: Sequence[object]) -> list[Any]:
    """Where gradients of tensors come to in the graph."""
    own = (t for t in tensors if isinstance(t, Tensor) and t.requires_grad)
    return [node for t in own if (node := theirs._get_grad_fn_or_grad_acc(t)) is not None]


def make_detachable(tensor: Any) -> Any:
    """What a backward begins with, as a tensor that can be detached in place and is no input: the
    same memory where it is a view or was handed on."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    again = plain and (tensor._is_view() or (tensor.is_leaf and tensor.requires_grad))
    return _MemoryAlias.apply(tensor) if again else tensor  # type: ignore[no-untyped-call]


class _MemoryAlias(Function):
    """The same memory in a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        same = torch.empty(0, dtype=x.dtype, device=x.device)
        return same.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def full_backward_dw_builder() -> Callable[[], None]:
    """A stage's `dw_builder`: with one, torch takes the whole backward at I; this does nothing at
    W."""
    return lambda: None
