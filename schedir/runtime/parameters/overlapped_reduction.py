"""Reduce the gradient of a stage over replicas, overlapped with the last backward.

Each buffer of `GradientBuffers` is a bucket. A bucket is scaled and its reduction starts when the
gradients of all its parameters are final. All replicas must start the buckets in the same order, so
this order is fixed. It is the order in which a backward completes buckets if the forward uses
parameters in the order of the module.
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

# The root of a backward: the loss of the last stage, or the gradient edge of an output.
BackwardRoot = Tensor | GradientEdge

_REDUCTION_OPS: Final = find_producers(Value.GRAD)
# Instructions that use the gradient sum of a stage before its reduction.
_GRAD_SUM_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if Value.WGRAD in {*row.needs, *row.gives} - {*row.frees}
)


def find_last_accumulations(stream: Stream) -> dict[Instr, Instr]:
    """Find the reductions that can overlap with the last instruction that adds to their gradient.

    A reduction cannot overlap if another instruction reads or changes the gradient between the two.

    Args:
        stream: The stream of a rank.

    Returns:
        The last instruction that adds to a gradient -> the reduction of this gradient.
    """
    reductions: dict[Instr, Instr] = {}
    last_by_stage: dict[int, Instr] = {}
    for i in stream:
        if i.op in _GRAD_SUM_OPS:
            last_by_stage[i.stage] = i
        elif (
            i.op in _REDUCTION_OPS
            and i.stage in last_by_stage
            and (accumulation := last_by_stage.pop(i.stage)).op in GRAD_ADDING_OPS
        ):
            reductions[accumulation] = i
    return reductions


class GradientReduction:
    """The reduction of a stage's gradients in an update.

    Only the last instruction that adds to the gradients may call `overlap_backward` or
    `overlap_deferred_wgrad`. `end` starts the remaining buckets.

    In a backward, the node that accumulates a parameter's gradient runs once, after all uses of the
    parameter. Then the gradient is final. Gradients of parameters that the backward does not reach
    are final when the backward ends.

    In two cases a gradient may still change later. The first is a backward within the backward,
    such as a checkpoint with use_reentrant=True. The second is a module with backward hooks. In
    both cases all gradients are final only when the backward ends. `end` detects any other write to
    a bucket after the start of its reduction.

    Args:
        gradients: The gradient buffers of the stage.
        start_bucket: Starts the reduction of the bucket with a given index, and returns its Works.
        versions: The weight versions of the stage, if the program has several updates.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        start_bucket: Callable[[int], list[Work]],
        versions: WeightVersions | None = None,
    ) -> None:
        self.gradients = gradients
        self.start_bucket = start_bucket
        self.find_copies: CopyLookup = (
            versions.list_copies if versions is not None else lambda p: ()
        )
        parameter_index = {p: k for k, p in enumerate(gradients.parameters)}
        first_parameters = [min(parameter_index[p] for p, _ in views) for views in gradients.views]
        self.bucket_order = sorted(
            range(len(first_parameters)), key=first_parameters.__getitem__, reverse=True
        )
        self.bucket_by_grad = {
            id(grad): k for k, views in enumerate(gradients.views) for _, grad in views
        }
        self._reset()

    def _reset(self) -> None:
        """Mark all gradients as not final and all buckets as not started."""
        self.pending_grads = [{id(grad) for _, grad in views} for views in self.gradients.views]
        # For each started bucket, its index and the version counter of its buffer at the start.
        self.started_buckets: list[tuple[int, int]] = []
        self.works: list[Work] = []

    @contextmanager
    def overlap_backward(self, module: nn.Module, roots: Sequence[BackwardRoot]) -> Iterator[None]:
        """Start buckets during the last backward of the stage, which runs within this context.

        Args:
            module: The stage.
            roots: The roots of the backward.
        """
        may_start_early = bool(roots) and not _may_add_late(module, roots)
        device = next((flat.device for flat in self.gradients.flat), torch.device("cpu"))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # Hooks are on autograd nodes, because a hook on a weight would disable its split backward.
        hooks = [
            register_observer(
                get_gradient_edge(p).node, partial(self._on_grad_accumulated, id(p.grad), stream)
            )
            for p in module.parameters()
            if may_start_early and p.requires_grad and id(p.grad) in self.bucket_by_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._start_remaining()

    def _on_grad_accumulated(self, grad: int, stream: Any, *gradients: object) -> None:
        """Mark a gradient as final. Autograd may call this method on another stream.

        So the stream of the step first waits for that stream, and then starts complete buckets.
        """
        if stream is not None:
            current_stream = torch.cuda.current_stream(stream.device)
            if current_stream != stream:
                stream.wait_stream(current_stream)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            self._mark_final(grad)

    def overlap_deferred_wgrad(self, deferred_wgrad: DeferredGradients) -> None:
        """Compute the last deferred weight gradients of the stage, and start complete buckets.

        Gradients of weights without a deferred gradient are already final.

        Args:
            deferred_wgrad: The deferred weight gradients.
        """
        for k in self.bucket_order:
            self.gradients.collect(k, self.find_copies)
        deferred_grads = {id(weight.grad) for weight in deferred_wgrad.list_weights()}
        self._mark_final(*self.bucket_by_grad.keys() - deferred_grads)
        deferred_wgrad.run(lambda weight: self._mark_final(id(weight.grad)))
        self._start_remaining()

    def _mark_final(self, *grads: int) -> None:
        """Mark gradients as final, and start the buckets that are complete, in order."""
        for grad in self.bucket_by_grad.keys() & grads:
            self.pending_grads[self.bucket_by_grad[grad]].discard(grad)
        while len(self.started_buckets) < len(self.bucket_order) and not self._get_pending_grads():
            self._start_next_bucket()

    def _get_pending_grads(self) -> set[int]:
        """Return the ids of the gradients in the next bucket that are not final yet."""
        return self.pending_grads[self.bucket_order[len(self.started_buckets)]]

    def _start_next_bucket(self) -> None:
        k = self.bucket_order[len(self.started_buckets)]
        self.gradients.collect(k, self.find_copies)
        self.works += self.start_bucket(k)
        self.started_buckets.append((k, self.gradients.flat[k]._version))

    def _start_remaining(self) -> None:
        while len(self.started_buckets) < len(self.bucket_order):
            self._start_next_bucket()

    def end(self) -> list[Work]:
        """Start the remaining buckets, and return the Works of all buckets.

        Raises:
            ModelError: A gradient was written to after the reduction of its bucket had started.
        """
        self._start_remaining()
        self._require_unwritten()
        works = self.works
        self._reset()
        return works

    def _require_unwritten(self) -> None:
        """Raise ModelError if a bucket was written to after its reduction had started."""
        for k, version in self.started_buckets:
            is_in_place = all(p.grad is view for p, view in self.gradients.views[k])
            if not is_in_place or self.gradients.flat[k]._version != version:
                names = [self.gradients.names[p] for p, _ in self.gradients.views[k]]
                weight_names = f"one of {names[0]} to {names[-1]}" if names[1:] else names[0]
                raise ModelError(
                    f"the gradient of {weight_names} was written to after autograd had computed "
                    "it, while replicas summed it",
                    hint="do not write to a gradient in a tensor hook; if an autograd.Function "
                    "runs another backward in its backward, use its weights only in this Function",
                )


def _may_add_late(module: nn.Module, roots: Sequence[BackwardRoot]) -> bool:
    """Return whether a backward may add to gradients after autograd has accumulated them.

    A backward hook of a module may write to any gradient. A checkpoint with use_reentrant=True runs
    a nested backward, and its weights may also be used outside of the checkpoint.
    """
    if any(owner._backward_hooks or owner._backward_pre_hooks for owner in module.modules()):
        return True
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    visited = {None, *nodes}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        # torch's checkpoint and its subclasses have this name.
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        next_nodes = {node for node, _ in node.next_functions} - visited
        nodes += next_nodes
        visited |= next_nodes
    return False
