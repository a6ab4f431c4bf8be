"""Post-validation: step before the gradient norm is known, and redo the step if it was wrong.

The post-validation of Qi et al. (arXiv 2401.10241, section 4): a rank steps as if the norm of all
gradients were finite and not above the limit, and the norm follows.  In the next step, when this
comes to its own update, every rank knows whether that was right.  If not, all have run that step on
wrong weights: each puts back what its update has changed, makes it with the norm, and then all run
the step again.  What the paper computes back (its appendix C) is put back from copies here, since
an optimizer that divides cannot be undone to the bit.

An update that was made again is a sign of more to come: the next one is made when its norm is
there, at the end of its step, and so on until one had not to be clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.runtime.autograd.random_streams import RandomStreams
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.mixed_precision import (
    LossScale,
    OptimizerLike,
    has_hooks,
    innermost,
    is_known,
    is_torchs,
)
from schedir.runtime.parameters.unvalidated_update_guard import UnvalidatedUpdateGuard, tables_of
from schedir.runtime.recording.async_scalars import AsyncScalarBuffer, AsyncScalars
from schedir.transports.transport import Work

Judged = tuple[Tensor, Tensor]  # whether a norm is finite, and what gradients are multiplied by


class OptimisticStep:
    """The updates of a rank, of which at most one is made and not validated.

    `step`, `follow` and `hear` are for the handlers: they make an update, or not yet; say that its
    norm is on its way; and wait for the norm of the update before it.  `ended` ends a step, and
    says whether that must be run again, which is so on all ranks or on none.  `update` is what
    makes an update as `judged` says; `judge` judges the sum of the squares of all gradients;
    `put_back` lets all that a step in vain has changed be as it was, but weights and optimizer.

    `held` is set while steps are run that are undone: nothing of them is left to validate.
    """

    def __init__(
        self,
        gradients: Sequence[GradientBuffers],
        modules: Sequence[nn.Module],
        optimizer: OptimizerLike | None,
        loss_scale: LossScale | None,
        draws: RandomStreams,
        device: torch.device,
        debug: bool = False,
    ) -> None:
        self.debug = debug  # the host may look at what is computed, wherever that is
        self.gradients, self.modules, self.optimizer = gradients, modules, optimizer
        self.loss_scale, self.draws, self.device = loss_scale, draws, device
        self.judge: Callable[[Tensor], Judged] = lambda total: (total.isfinite(), total)
        self.update: Callable[[], None] = lambda: None
        self.put_back: Callable[[], None] = lambda: None
        one = torch.ones((), dtype=torch.float64, device=device)
        self.unclipped = one
        self.judged: Judged = one > 0, one
        self.copies: dict[Tensor, Tensor] = {}  # memory for what was there before an update
        self.made: _UnvalidatedUpdate | None = None  # the update that is not validated
        self.norm: _Norm | None = None  # of the step that runs, or of the last one
        self.again = self.waits = self.held = False
        self.repeated = 0  # steps that were run again
        self.guard: UnvalidatedUpdateGuard | None = None
        self.readings = AsyncScalarBuffer(device, 1, 2)
        self.beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    # ------------------------------------------------------------ within a step

    def hear(self) -> None:
        """Wait for the norm of the update before; if that was wrong, this step is in vain."""
        if self.made is not None:
            self.again = not self.right()
            if not self.again:
                self.made = None

    def step(self, own: Tensor) -> None:
        """Make an update, given the sum of squares of the rank's own gradients: unless the step is
        in vain, or the one before was wrong, so that this one waits for its norm."""
        if self.again or (self.waits and not self.held):
            return
        self.made = self._keep()
        finite, shrink = self.judge(own)  # what is too much by itself is more with that of others
        self.judged = finite & (shrink == 1.0), self.unclipped
        self.update()

    def follow(self, total: Tensor, work: Work) -> None:
        """The sum of squares is on its way over all ranks."""
        self.norm = _Norm(total, work, self.readings, self.beside)

    # ------------------------------------------------------------ between steps

    def begin(self) -> bool:
        """Begin a step; returns whether it may have to be run again: one is made before it is known
        that the update before it was right.

        Raises ModelError if somebody has written to what was not validated, or lets something
        else step.
        """
        require_torchs(self.optimizer)
        self.lift()
        return self.made is not None

    def fail(self, *, begun: bool) -> None:
        """After an error in a step that was `begun` weights are those before the update that is not
        validated, and never will be; in one that was not, all is as it was."""
        if self.made is None:
            return
        if not begun:
            self.guard = self.guard or self._guard()
            return
        with torch.no_grad():
            self._put_back()
        self.made = None

    def ended(self) -> bool:
        """End a step: whether it must be run again."""
        norm = self.norm
        assert norm is not None, "every step has a norm"
        if self.held:
            norm.read()
            self.made = None
        elif self.again:
            norm.read()  # of a step in vain
            self._redo()
            self.put_back()
            self.draws.step -= 1
            self.again = False
            self.repeated += 1
            return True
        elif self.waits:
            self.made = _UnvalidatedUpdate([], {}, norm)
            self.waits = not self.right()
            self.make()
            self.made = None
        else:
            assert self.made is not None
            self.made.norm = norm
            self.guard = self._guard()
        return False

    def settle(self) -> None:
        """Validate the last update, and make it again if it was wrong."""
        right = self.made is None or self.right()  # who never knows lets nobody look
        self.lift()
        if right:
            self.made = None
        else:
            self._redo()

    def right(self) -> bool:
        """Whether the update that is not validated was right: waits for its norm."""
        assert self.made is not None and self.made.norm is not None
        total = self.made.norm.read()
        finite, shrink = self.judge(torch.tensor(total, dtype=torch.float64))
        return bool(finite & (shrink == 1.0))

    def last_norm(self) -> Tensor:
        """The norm of the last step's gradients before clipping, when it is there."""
        if self.norm is None:
            return torch.zeros_like(self.unclipped)
        self.norm.read()
        return self.norm.total.sqrt()

    def lift(self) -> None:
        """Let everybody look again.  Raises ModelError if somebody has written to what an update
        changes: weights, the optimizer's state, or which parameters it steps."""
        if self.guard is not None:
            self.guard.lift()
            self.guard = None

    def _guard(self) -> UnvalidatedUpdateGuard:
        looks = self.debug or self.device.type == "cpu"
        return UnvalidatedUpdateGuard(self.modules, self.optimizer, self.loss_scale, looks=looks)

    # ------------------------------------------------------------ to go back

    def _keep(self) -> _UnvalidatedUpdate:
        """Copies of all that an update changes, and of the gradients that it is made of."""
        tables = tables_of(self.optimizer)
        held = dict.fromkeys(self._changed())
        self.copies = {t: self.copies[t] if t in self.copies else torch.empty_like(t) for t in held}
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for t in held:
            alike.setdefault((t.device, t.dtype), []).append(t)
        with torch.no_grad():
            for some in alike.values():  # which are then copied at once
                torch._foreach_copy_([self.copies[t] for t in some], some)
        return _UnvalidatedUpdate([(table, dict(table)) for table in tables], self.copies)

    def _changed(self) -> Iterator[Tensor]:
        """What an update changes, and the gradients."""
        for gradients in self.gradients:
            yield from gradients.flat
        if self.loss_scale is not None:
            yield from (self.loss_scale.value, self.loss_scale.good)
        yield from getattr(self.optimizer, "parameters", ())  # rounded from others
        for leaf in tree_leaves(tables_of(self.optimizer)):
            if isinstance(leaf, Tensor):
                yield leaf

    def _redo(self) -> None:
        """Put back what the update has changed, and make it as its norm says.

        Options that somebody has set since then, as a learning rate, are for the next one.
        """
        made, inner = self.made, innermost(self.optimizer)
        assert made is not None
        groups = [] if inner is None else inner.param_groups
        later = [(group, dict(group)) for group in groups]
        options = [{**group, "params": ()} for group in groups]
        numbers = [(t, t.clone()) for t in tree_leaves(options) if isinstance(t, Tensor)]
        with torch.no_grad():
            self._put_back()
            self.make()
            _put_back(later)
            for t, now in numbers:
                t.copy_(now)
        self.made, self.waits = None, True

    def _put_back(self) -> None:
        """Let all that the update has changed be as it was before."""
        assert self.made is not None
        _put_back(self.made.tables)
        for t, before in self.made.copies.items():
            t.copy_(before)

    def make(self) -> None:
        """Make the update as its norm says; torch's own optimizers draw no random numbers."""
        assert self.made is not None and self.made.norm is not None
        self.judged = self.judge(self.made.norm.total)
        for gradients in self.gradients:
            gradients.bind()  # an optimizer's zero_grad may have unbound them
        with self.draws.kept():
            self.update()


class _UnvalidatedUpdate:
    """An update that is made: what was there before, and its norm when that is on its way."""

    def __init__(
        self,
        tables: Sequence[tuple[dict[Any, Any], dict[Any, Any]]],
        copies: dict[Tensor, Tensor],
        norm: _Norm | None = None,
    ) -> None:
        self.tables, self.copies, self.norm = tables, copies, norm


class _Norm:
    """The sum of squares of all gradients, on its way: 0-dim float64.

    On a GPU it goes on to the host beside what computes, so that to read it waits for nothing else.
    """

    def __init__(
        self,
        total: Tensor,
        work: Work,
        readings: AsyncScalarBuffer,
        beside: torch.cuda.Stream | None,
    ) -> None:
        self.total, self.work, self.number = total, work, 0.0
        self.reading: AsyncScalars | None = None
        self.known = False
        if beside is not None:
            with torch.cuda.stream(beside):
                work.wait()
                self.reading = readings.copy(total.view(1))

    def read(self) -> float:
        """The number, on the host, when it is there."""
        if not self.known:
            if self.reading is None:
                self.work.wait()
                self.number = self.total.item()
            else:
                (self.number,) = self.reading.read()
            self.known = True
        return self.number


def _put_back(tables: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, before in tables:
        table.clear()
        table.update(before)


def require_torchs(optimizer: OptimizerLike | None, program: str = "") -> None:
    """Raise ModelError for an optimizer of which nobody knows all that its step changes."""
    inner = innermost(optimizer)
    if inner is None or is_known(optimizer):
        return
    what = "has hooks on its step" if has_hooks(inner) else "is none of torch's own"
    name = type(optimizer if is_torchs(inner) and not has_hooks(inner) else inner).__name__
    raise ModelError(
        "an update may be made again (norm_check 'after_step'), and the optimizer, "
        f"{name}, {what}: nobody knows what else its step changes",
        program=program,
        hint="compile(..., norm_check='before_step')",
    )
