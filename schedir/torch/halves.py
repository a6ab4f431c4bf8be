"""Backwards in halves, as torch does them: where it would lose gradients, they are whole.

torch takes the weights' half from what lies between weights and inputs.  A weight from which no way
leads to an output past an input, as in a stage behind frozen ones, or of a table that is handed on,
is in none of its groups, and gets no gradient, nor a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import _backward as theirs


def loses(stage: Any, output: object, mb: int) -> bool:
    """Whether halves of torch's backward of a stage would leave out a weight that is used, as the
    forward of a microbatch has shown."""
    if stage.is_first:
        return False  # its backward is whole, at W
    outputs = output if isinstance(output, tuple | list) else (output,)
    roots = _nodes(outputs)
    taken = _nodes(stage.fwd_cache[mb][1])
    weights = _nodes([p for p in stage.submod.parameters() if p.requires_grad])
    ways = theirs.construct_reverse_graph(roots)
    used = {node for node in weights if node in ways}
    found: set[Any] = set()
    for group in theirs.get_param_groups(taken, weights, ways):
        found |= group["params"]
    return bool(used - found)


def _nodes(tensors: Sequence[object]) -> list[Any]:
    """Where gradients of tensors come to in the graph."""
    own = (t for t in tensors if isinstance(t, Tensor) and t.requires_grad)
    return [node for t in own if (node := theirs._get_grad_fn_or_grad_acc(t)) is not None]


def whole_at_i() -> Callable[[], None]:
    """A stage's `dw_builder`: with one, torch takes the whole backward at I; this does nothing at
    W."""
    return lambda: None
