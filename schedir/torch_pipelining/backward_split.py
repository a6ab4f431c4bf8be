"""Detect where torch's split backward would be wrong, and run a full backward instead.

In the autograd graph, weights and inputs have paths to the outputs. A join node is the first node
that a path of a weight shares with a path of an input. torch's BackwardWeight starts at the join
nodes. It silently computes no gradient for two kinds of weights:

- Weights without a join node. For example, a stage after frozen stages gets inputs without a
  gradient, so its weights have no join nodes. A weight that the stage returns as an output has no
  join node either.
- Weights that are not parameters of the stage, such as a parameter of the loss.

torch also detaches, in place, the tensors that a backward begins with. This fails for views.

Both halves of a split backward, I and W, run the join nodes. A `torch.autograd.Function` at a join
node may count its calls, add to a gradient, or write to its arguments. Such a function must run
only once, so only a full backward is right.
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
    """Return whether torch's split backward would be wrong for a microbatch.

    A split backward is wrong if it leaves out a weight that is used, or a path from a weight to an
    output. It is also wrong if it counts a path twice, or calls a `torch.autograd.Function` twice.

    Args:
        stage: A stage of torch, after its forward.
        backward_inputs: The tensors that the backward begins with: outputs, or a loss.
        mb: The microbatch.
    """
    inputs = _gradient_nodes(stage.fwd_cache[mb][1])
    roots = _gradient_nodes(backward_inputs)
    weights = _gradient_nodes([p for p in stage.submod.parameters() if p.requires_grad])
    reverse_graph = theirs.construct_reverse_graph(roots)
    if _has_reentrant_checkpoint((*reverse_graph, *roots)):
        return True
    used_weights = {node for node in reverse_graph if hasattr(node, "variable")} - {*inputs}
    # This call adds unused weights to `reverse_graph`, so `used_weights` is computed first.
    groups = theirs.get_param_groups(inputs, weights, reverse_graph)
    grouped_weights = [node for group in groups for node in group["params"]]
    if used_weights - {*grouped_weights} or len(grouped_weights) > len({*grouped_weights}):
        return True
    repeated_nodes = [
        node for group in groups for node in _nodes_in_both_halves(group, reverse_graph)
    ]
    if len(repeated_nodes) > len({*repeated_nodes}) or any(
        isinstance(node, BackwardCFunction) for node in repeated_nodes
    ):
        return True  # the W of one group would free saved tensors that other groups need
    return any(_bypasses_group(group, reverse_graph, {*roots}) for group in groups)


def _has_reentrant_checkpoint(nodes: Sequence[Any]) -> bool:
    """Return whether any node is a reentrant checkpoint, which refuses `torch.autograd.grad`."""
    return any(type(node).__name__.endswith("CheckpointFunctionBackward") for node in nodes)


def compute_input_gradients(
    stage: Any,
    run: Callable[..., Any],
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    *gradients: Any,
) -> tuple[Any, ...]:
    """Return the gradients of a stage's inputs, from which torch infers the shapes of messages.

    torch's method uses `torch.autograd.grad`, which reentrant checkpoints refuse. For such
    checkpoints, this function runs a full backward instead.

    Args:
        stage: A stage of torch.
        run: The method of torch that this function replaces.
        outputs: The outputs of the stage, or its loss.
        inputs: The inputs of the stage.
        *gradients: The gradients of the outputs.
    """
    roots = _gradient_nodes(outputs)
    if not _has_reentrant_checkpoint((*theirs.construct_reverse_graph(roots), *roots)):
        input_gradients: tuple[Any, ...] = run(outputs, inputs, *gradients)
        return input_gradients
    torch.autograd.backward(outputs, *gradients)
    return tuple(x.grad if isinstance(x, Tensor) else None for x in inputs)


def _nodes_in_both_halves(group: Any, reverse_graph: Any) -> set[Any]:
    """Return the nodes that run in both halves of the split backward of a group of weights.

    These are the join nodes of the group. If there are several join nodes, both halves also run the
    nodes between two of them.
    """
    join_nodes: set[Any] = group["intermediates"]
    if len(join_nodes) < 2:
        return join_nodes
    above = _reachable_nodes(join_nodes, lambda node: reverse_graph.get(node, ()))
    below = _reachable_nodes(join_nodes, lambda node: [child for child, _ in node.next_functions])
    return join_nodes | (above & below)


def _reachable_nodes(nodes: set[Any], get_neighbours: Callable[[Any], Any]) -> set[Any]:
    """Return all nodes that `get_neighbours` reaches from `nodes` in one or more steps."""
    visited: set[Any] = set()
    pending = [*nodes]
    while pending:
        new_nodes = {node for node in get_neighbours(pending.pop()) if node is not None} - visited
        visited |= new_nodes
        pending += new_nodes
    return visited


def _bypasses_group(group: Any, reverse_graph: Any, roots: set[Any]) -> bool:
    """Return whether weights have a path to an output that avoids their group's join nodes."""
    visited = set(group["params"])
    pending = [*visited]
    while pending:
        node = pending.pop()
        if node in roots:
            return True
        new_nodes = {*reverse_graph.get(node, ())} - visited - group["intermediates"]
        visited |= new_nodes
        pending += new_nodes
    return False


def _gradient_nodes(tensors: Sequence[object]) -> list[Any]:
    """Return the autograd nodes that receive the gradients of tensors."""
    with_gradient = (t for t in tensors if isinstance(t, Tensor) and t.requires_grad)
    return [node for t in with_gradient if (node := theirs._get_grad_fn_or_grad_acc(t)) is not None]


def make_detachable(tensor: Any) -> Any:
    """Return an output or a loss as a tensor that torch can detach in place.

    Args:
        tensor: An output or a loss.

    Returns:
        A new tensor in the same memory, if `tensor` is a view or an input that the stage returns.
        Otherwise `tensor`.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    needs_alias = is_plain and (tensor._is_view() or (tensor.is_leaf and tensor.requires_grad))
    return _MemoryAlias.apply(tensor) if needs_alias else tensor  # type: ignore[no-untyped-call]


class _MemoryAlias(Function):
    """Returns a new tensor that has the memory of its input and is not a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def full_backward_dw_builder() -> Callable[[], None]:
    """Return a function that does nothing.

    The `dw_builder` of a stage can be set to this function. torch then runs the full backward at I,
    and the returned function at W.
    """
    return lambda: None
