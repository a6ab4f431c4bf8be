"""Reduce the gradient of a stage over replicas, beginning under the last backward.

Each buffer of `GradientBuffers` is a bucket.  It is scaled, and its all-reduce started, as soon as
nothing of the update adds to any of its parameters any more.  Buckets start in one order, that in
which a backward ends them if parameters are used in theirs: replicas must meet in one order,
whatever each does in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedir.errors import ModelError
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, INSTRUCTIONS, Instr, Value, find_producers
from schedir.ir.program import Stream
from schedir.runtime.autograd.node_hook_detection import register_observer
from schedir.runtime.autograd.split_backward import DeferredGradients
from schedir.runtime.parameters.gradient_buffers import CopyLookup, GradientBuffers
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.transports.transport import Work

BUCKET_BYTES: Final = (
    32 * 2**20
)  # bytes: enough for a link's rate; the last, which is exposed, is short

# Where a backward begins: the last stage's loss, or where an output came from.
BackwardRoot = Tensor | GradientEdge

_REDUCTION_OPS: Final = find_producers(Value.GRAD)
# What knows of the sum of gradients before it is reduced.
_GRAD_SUM_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if Value.WGRAD in {*row.needs, *row.gives} - {*row.frees}
)


def find_last_accumulations(stream: Stream) -> dict[Instr, Instr]:
    """Of each reduction, by the last instruction that adds to what it reduces.

    Not of one that something else reads or changes before it is reduced.
    """
    found: dict[Instr, Instr] = {}
    last: dict[int, Instr] = {}
    for i in stream:
        if i.op in _GRAD_SUM_OPS:
            last[i.stage] = i
        elif (
            i.op in _REDUCTION_OPS
            and i.stage in last
            and (adds := last.pop(i.stage)).op in GRAD_ADDING_OPS
        ):
            found[adds] = i
    return found


class GradientReduction:
    """The reduction of a stage's gradient in an update.

    `start_bucket` starts it for a buffer, by number, and returns what is under way.  Only the last
    instruction that adds to the gradient may call `overlap_backward` or `overlap_deferred_wgrad`;
    `end` starts what is left, and returns all that is under way.

    Autograd is done with a parameter when the node runs that adds to its gradient, which it does
    once in a backward, after all uses, also where they have given it nothing.  Parameters that a
    backward does not meet are done with when it ends.  Where a backward runs within it, as of what
    is checkpointed with use_reentrant=True, or modules have hooks, more may be added: there all
    are done with when it ends.  What else torch adds to a bucket that has started is seen by `end`.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        start_bucket: Callable[[int], list[Work]],
        versions: WeightVersions | None = None,
    ) -> None:
        self.gradients, self.start_bucket = gradients, start_bucket
        self.find_copies: CopyLookup = (
            versions.list_copies if versions is not None else lambda p: ()
        )
        number = {p: k for k, p in enumerate(gradients.parameters)}
        first = [min(number[p] for p, _ in views) for views in gradients.views]
        self.bucket_order = sorted(range(len(first)), key=first.__getitem__, reverse=True)
        self.bucket_by_grad = {
            id(grad): k for k, views in enumerate(gradients.views) for _, grad in views
        }
        self._reset()

    def _reset(self) -> None:
        """Nothing is final, and nothing has started."""
        self.pending_grads = [{id(grad) for _, grad in views} for views in self.gradients.views]
        self.started_buckets: list[
            tuple[int, int]
        ] = []  # buckets in order, and their versions then
        self.works: list[Work] = []

    @contextmanager
    def overlap_backward(self, module: nn.Module, roots: Sequence[BackwardRoot]) -> Iterator[None]:
        """Within this runs the last backward of the module that adds to the gradient."""
        early = bool(roots) and not _may_add_late(module, roots)
        device = next((flat.device for flat in self.gradients.flat), torch.device("cpu"))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # On the nodes, not on the parameters: those with hooks of their own are not split.
        hooks = [
            register_observer(
                get_gradient_edge(p).node, partial(self._on_grad_accumulated, id(p.grad), stream)
            )
            for p in module.parameters()
            if early and p.requires_grad and id(p.grad) in self.bucket_by_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._start_remaining()

    def _on_grad_accumulated(self, grad: int, stream: Any, *gradients: object) -> None:
        """Autograd is done with a parameter, perhaps on another stream than that of the step."""
        if stream is not None and (here := torch.cuda.current_stream(stream.device)) != stream:
            stream.wait_stream(here)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            self._mark_final(grad)

    def overlap_deferred_wgrad(self, deferred_wgrad: DeferredGradients) -> None:
        """Run the last tape that adds to the gradient; what it does not have is final."""
        for k in self.bucket_order:
            self.gradients.collect(k, self.find_copies)
        later = {id(weight.grad) for weight in deferred_wgrad.list_weights()}
        self._mark_final(*self.bucket_by_grad.keys() - later)
        deferred_wgrad.run(lambda weight: self._mark_final(id(weight.grad)))
        self._start_remaining()

    def _mark_final(self, *grads: int) -> None:
        """Nothing adds to these gradients any more: start what is complete, in order."""
        for grad in self.bucket_by_grad.keys() & grads:
            self.pending_grads[self.bucket_by_grad[grad]].discard(grad)
        while len(self.started_buckets) < len(self.bucket_order) and not self._get_pending_grads():
            self._start_next_bucket()

    def _get_pending_grads(self) -> set[int]:
        """The gradients of the next bucket that are not final."""
        return self.pending_grads[self.bucket_order[len(self.started_buckets)]]

    def _start_next_bucket(self) -> None:
        """Start the next bucket."""
        k = self.bucket_order[len(self.started_buckets)]
        self.gradients.collect(k, self.find_copies)
        self.works += self.start_bucket(k)
        self.started_buckets.append((k, self.gradients.flat[k]._version))

    def _start_remaining(self) -> None:
        """Start every bucket that has not."""
        while len(self.started_buckets) < len(self.bucket_order):
            self._start_next_bucket()

    def end(self) -> list[Work]:
        """Start every bucket that has not, and return what is under way.

        Raises ModelError if a bucket was added to since it started.
        """
        self._start_remaining()
        self._require_unwritten()
        works = self.works
        self._reset()
        return works

    def _require_unwritten(self) -> None:
        """Raise ModelError if a bucket was added to since it started."""
        for k, version in self.started_buckets:
            in_place = all(p.grad is view for p, view in self.gradients.views[k])
            if not in_place or self.gradients.flat[k]._version != version:
                names = [self.gradients.names[p] for p, _ in self.gradients.views[k]]
                which = f"one of {names[0]} to {names[-1]}" if names[1:] else names[0]
                raise ModelError(
                    f"the gradient of {which} was written to after autograd was done with it, when "
                    "its sum over replicas was under way",
                    hint="no hook of a tensor may write to a gradient; and where a Function runs a "
                    "backward of its own, no weight is used both in it and outside of it",
                )


def _may_add_late(module: nn.Module, roots: Sequence[BackwardRoot]) -> bool:
    """Whether a backward may add to gradients that autograd is done with.

    A hook of a module may write to any; and what a checkpoint with use_reentrant=True recomputes
    has a backward of its own, with weights that may be used outside of it, too.
    """
    if any(owner._backward_hooks or owner._backward_pre_hooks for owner in module.modules()):
        return True
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen = {None, *nodes}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":  # of torch, and those made of it
            return True
        following = {node for node, _ in node.next_functions} - seen
        nodes += following
        seen |= following
    return False
