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
from schedir.ir.isa.instructions import ADDS, ROWS, Instr, Value, producers
from schedir.ir.program import Stream
from schedir.runtime.autograd.node_hook_detection import observe
from schedir.runtime.autograd.split_backward import DeferredGradients
from schedir.runtime.parameters.gradient_buffers import Copies, GradientBuffers
from schedir.runtime.parameters.weight_versions import WeightVersions
from schedir.transports.transport import Work

BUCKET: Final = 32 * 2**20  # bytes: enough for a link's rate; the last, which is exposed, is short

# Where a backward begins: the last stage's loss, or where an output came from.
Root = Tensor | GradientEdge

_REDUCE: Final = producers(Value.GRAD)
# What knows of the sum of gradients before it is reduced.
_OF_SUMS: Final = tuple(
    row.op for row in ROWS if Value.WGRAD in {*row.needs, *row.gives} - {*row.frees}
)


def last_to_add(stream: Stream) -> dict[Instr, Instr]:
    """Of each reduction, by the last instruction that adds to what it reduces.

    Not of one that something else reads or changes before it is reduced.
    """
    found: dict[Instr, Instr] = {}
    last: dict[int, Instr] = {}
    for i in stream:
        if i.op in _OF_SUMS:
            last[i.stage] = i
        elif i.op in _REDUCE and i.stage in last and (adds := last.pop(i.stage)).op in ADDS:
            found[adds] = i
    return found


class GradientReduction:
    """The reduction of a stage's gradient in an update.

    `start` starts it for a buffer, by number, and returns what is under way.  Only the last
    instruction that adds to the gradient may call `under_backward` or `under_tape`; `end` starts
    what is left, and returns all that is under way.

    Autograd is done with a parameter when the node runs that adds to its gradient, which it does
    once in a backward, after all uses, also where they have given it nothing.  Parameters that a
    backward does not meet are done with when it ends.  Where a backward runs within it, as of what
    is checkpointed with use_reentrant=True, or modules have hooks, more may be added: there all
    are done with when it ends.  What else torch adds to a bucket that has started is seen by `end`.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        start: Callable[[int], list[Work]],
        versions: WeightVersions | None = None,
    ) -> None:
        self.gradients, self.start_one = gradients, start
        self.copies: Copies = versions.copies if versions is not None else lambda p: ()
        number = {p: k for k, p in enumerate(gradients.parameters)}
        first = [min(number[p] for p, _ in views) for views in gradients.views]
        self.order = sorted(range(len(first)), key=first.__getitem__, reverse=True)
        self.bucket_of = {
            id(grad): k for k, views in enumerate(gradients.views) for _, grad in views
        }
        self._forget()

    def _forget(self) -> None:
        """Nothing is final, and nothing has started."""
        self.missing = [{id(grad) for _, grad in views} for views in self.gradients.views]
        self.started: list[tuple[int, int]] = []  # buckets in order, and their versions then
        self.works: list[Work] = []

    @contextmanager
    def under_backward(self, module: nn.Module, roots: Sequence[Root]) -> Iterator[None]:
        """Within this runs the last backward of the module that adds to the gradient."""
        early = bool(roots) and not _may_add_late(module, roots)
        device = next((flat.device for flat in self.gradients.flat), torch.device("cpu"))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # On the nodes, not on the parameters: those with hooks of their own are not split.
        hooks = [
            observe(get_gradient_edge(p).node, partial(self._met, id(p.grad), stream))
            for p in module.parameters()
            if early and p.requires_grad and id(p.grad) in self.bucket_of
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._start_rest()

    def _met(self, grad: int, stream: Any, *gradients: object) -> None:
        """Autograd is done with a parameter, perhaps on another stream than that of the step."""
        if stream is not None and (here := torch.cuda.current_stream(stream.device)) != stream:
            stream.wait_stream(here)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            self._final(grad)

    def under_tape(self, tape: DeferredGradients) -> None:
        """Run the last tape that adds to the gradient; what it does not have is final."""
        for k in self.order:
            self.gradients.collect(k, self.copies)
        later = {id(weight.grad) for weight in tape.weights()}
        self._final(*self.bucket_of.keys() - later)
        tape.run(lambda weight: self._final(id(weight.grad)))
        self._start_rest()

    def _final(self, *grads: int) -> None:
        """Nothing adds to these gradients any more: start what is complete, in order."""
        for grad in self.bucket_of.keys() & grads:
            self.missing[self.bucket_of[grad]].discard(grad)
        while len(self.started) < len(self.order) and not self._missing():
            self._start()

    def _missing(self) -> set[int]:
        """The gradients of the next bucket that are not final."""
        return self.missing[self.order[len(self.started)]]

    def _start(self) -> None:
        """Start the next bucket."""
        k = self.order[len(self.started)]
        self.gradients.collect(k, self.copies)
        self.works += self.start_one(k)
        self.started.append((k, self.gradients.flat[k]._version))

    def _start_rest(self) -> None:
        """Start every bucket that has not."""
        while len(self.started) < len(self.order):
            self._start()

    def end(self) -> list[Work]:
        """Start every bucket that has not, and return what is under way.

        Raises ModelError if a bucket was added to since it started.
        """
        self._start_rest()
        self._expect_whole()
        works = self.works
        self._forget()
        return works

    def _expect_whole(self) -> None:
        """Raise ModelError if a bucket was added to since it started."""
        for k, version in self.started:
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


def _may_add_late(module: nn.Module, roots: Sequence[Root]) -> bool:
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
