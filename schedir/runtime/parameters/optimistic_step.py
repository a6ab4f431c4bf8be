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
    has_known_effects,
    has_step_hooks,
    is_torch_optimizer,
    unwrap_optimizer,
)
from schedir.runtime.parameters.unvalidated_update_guard import (
    UnvalidatedUpdateGuard,
    list_optimizer_tables,
)
from schedir.runtime.recording.async_scalars import AsyncScalarBuffer, AsyncScalars
from schedir.transports.transport import Work

NormVerdict = tuple[
    Tensor, Tensor
]  # whether a norm is finite, and what gradients are multiplied by


class OptimisticStep:
    """The updates of a rank, of which at most one is made and not validated.

    `step`, `track_norm` and `wait_for_previous_norm` are for the handlers: they make an update, or
    not yet; say that its norm is on its way; and wait for the norm of the update before it.
    `end_step` ends a step, and says whether that must be run again, which is so on all ranks or on
    none.  `apply_update` is what makes an update as `verdict` says; `judge_norm` judges the sum of
    the squares of all gradients;
    `restore_step_state` lets all that a step in vain has changed be as it was, but weights and
    optimizer.

    `is_warm_up` is set while steps are run that are undone: nothing of them is left to validate.
    """

    def __init__(
        self,
        gradients: Sequence[GradientBuffers],
        modules: Sequence[nn.Module],
        optimizer: OptimizerLike | None,
        loss_scale: LossScale | None,
        random_streams: RandomStreams,
        device: torch.device,
        debug: bool = False,
    ) -> None:
        self.debug = debug  # the host may look at what is computed, wherever that is
        self.gradients, self.modules, self.optimizer = gradients, modules, optimizer
        self.loss_scale, self.random_streams, self.device = loss_scale, random_streams, device
        self.judge_norm: Callable[[Tensor], NormVerdict] = lambda total: (total.isfinite(), total)
        self.apply_update: Callable[[], None] = lambda: None
        self.restore_step_state: Callable[[], None] = lambda: None
        one = torch.ones((), dtype=torch.float64, device=device)
        self.unit_factor = one
        self.verdict: NormVerdict = one > 0, one
        self.saved_copies: dict[Tensor, Tensor] = {}  # memory for what was there before an update
        self.pending_update: _UnvalidatedUpdate | None = None  # the update that is not validated
        self.norm: _Norm | None = None  # of the step that runs, or of the last one
        self.must_repeat = self.waits_for_norm = self.is_warm_up = False
        self.repeated_steps = 0  # steps that were run again
        self.guard: UnvalidatedUpdateGuard | None = None
        self.scalar_buffer = AsyncScalarBuffer(device, 1, 2)
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    # ------------------------------------------------------------ within a step

    def wait_for_previous_norm(self) -> None:
        """Wait for the norm of the update before; if that was wrong, this step is in vain."""
        if self.pending_update is not None:
            self.must_repeat = not self.is_update_valid()
            if not self.must_repeat:
                self.pending_update = None

    def step(self, local_sum_of_squares: Tensor) -> None:
        """Make an update, given the sum of squares of the rank's own gradients: unless the step is
        in vain, or the one before was wrong, so that this one waits for its norm."""
        if self.must_repeat or (self.waits_for_norm and not self.is_warm_up):
            return
        self.pending_update = self._save_state()
        finite, shrink = self.judge_norm(
            local_sum_of_squares
        )  # what is too much by itself is more with that of others
        self.verdict = finite & (shrink == 1.0), self.unit_factor
        self.apply_update()

    def track_norm(self, sum_of_squares: Tensor, work: Work) -> None:
        """The sum of squares is on its way over all ranks."""
        self.norm = _Norm(sum_of_squares, work, self.scalar_buffer, self.side_stream)

    # ------------------------------------------------------------ between steps

    def begin_step(self) -> bool:
        """Begin a step; returns whether it may have to be run again: one is made before it is known
        that the update before it was right.

        Raises ModelError if somebody has written to what was not validated, or lets something
        else step.
        """
        require_known_optimizer(self.optimizer)
        self.lift_guard()
        return self.pending_update is not None

    def fail(self, *, has_begun: bool) -> None:
        """After an error in a step that was `has_begun` weights are those before the update that is
        not validated, and never will be; in one that was not, all is as it was."""
        if self.pending_update is None:
            return
        if not has_begun:
            self.guard = self.guard or self._make_guard()
            return
        with torch.no_grad():
            self._undo_update()
        self.pending_update = None

    def end_step(self) -> bool:
        """End a step: whether it must be run again."""
        norm = self.norm
        assert norm is not None, "every step has a norm"
        if self.is_warm_up:
            norm.read()
            self.pending_update = None
        elif self.must_repeat:
            norm.read()  # of a step in vain
            self._redo_update()
            self.restore_step_state()
            self.random_streams.step -= 1
            self.must_repeat = False
            self.repeated_steps += 1
            return True
        elif self.waits_for_norm:
            self.pending_update = _UnvalidatedUpdate([], {}, norm)
            self.waits_for_norm = not self.is_update_valid()
            self.update_by_norm()
            self.pending_update = None
        else:
            assert self.pending_update is not None
            self.pending_update.norm = norm
            self.guard = self._make_guard()
        return False

    def finish_validation(self) -> None:
        """Validate the last update, and make it again if it was wrong."""
        right = (
            self.pending_update is None or self.is_update_valid()
        )  # who never knows lets nobody look
        self.lift_guard()
        if right:
            self.pending_update = None
        else:
            self._redo_update()

    def is_update_valid(self) -> bool:
        """Whether the update that is not validated was right: waits for its norm."""
        assert self.pending_update is not None and self.pending_update.norm is not None
        total = self.pending_update.norm.read()
        finite, shrink = self.judge_norm(torch.tensor(total, dtype=torch.float64))
        return bool(finite & (shrink == 1.0))

    def get_last_norm(self) -> Tensor:
        """The norm of the last step's gradients before clipping, when it is there."""
        if self.norm is None:
            return torch.zeros_like(self.unit_factor)
        self.norm.read()
        return self.norm.sum_of_squares.sqrt()

    def lift_guard(self) -> None:
        """Let everybody look again.  Raises ModelError if somebody has written to what an update
        changes: weights, the optimizer's state, or which parameters it steps."""
        if self.guard is not None:
            self.guard.lift()
            self.guard = None

    def _make_guard(self) -> UnvalidatedUpdateGuard:
        looks = self.debug or self.device.type == "cpu"
        return UnvalidatedUpdateGuard(
            self.modules, self.optimizer, self.loss_scale, compares_values=looks
        )

    # ------------------------------------------------------------ to go back

    def _save_state(self) -> _UnvalidatedUpdate:
        """Copies of all that an update changes, and of the gradients that it is made of."""
        tables = list_optimizer_tables(self.optimizer)
        held = dict.fromkeys(self._list_changed_tensors())
        self.saved_copies = {
            t: self.saved_copies[t] if t in self.saved_copies else torch.empty_like(t) for t in held
        }
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for t in held:
            alike.setdefault((t.device, t.dtype), []).append(t)
        with torch.no_grad():
            for some in alike.values():  # which are then copied at once
                torch._foreach_copy_([self.saved_copies[t] for t in some], some)
        return _UnvalidatedUpdate([(table, dict(table)) for table in tables], self.saved_copies)

    def _list_changed_tensors(self) -> Iterator[Tensor]:
        """What an update changes, and the gradients."""
        for gradients in self.gradients:
            yield from gradients.flat
        if self.loss_scale is not None:
            yield from (self.loss_scale.value, self.loss_scale.good_steps)
        yield from getattr(self.optimizer, "parameters", ())  # rounded from others
        for leaf in tree_leaves(list_optimizer_tables(self.optimizer)):
            if isinstance(leaf, Tensor):
                yield leaf

    def _redo_update(self) -> None:
        """Put back what the update has changed, and make it as its norm says.

        Options that somebody has set since then, as a learning rate, are for the next one.
        """
        made, inner = self.pending_update, unwrap_optimizer(self.optimizer)
        assert made is not None
        groups = [] if inner is None else inner.param_groups
        later = [(group, dict(group)) for group in groups]
        options = [{**group, "params": ()} for group in groups]
        numbers = [(t, t.clone()) for t in tree_leaves(options) if isinstance(t, Tensor)]
        with torch.no_grad():
            self._undo_update()
            self.update_by_norm()
            _restore_tables(later)
            for t, now in numbers:
                t.copy_(now)
        self.pending_update, self.waits_for_norm = None, True

    def _undo_update(self) -> None:
        """Let all that the update has changed be as it was before."""
        assert self.pending_update is not None
        _restore_tables(self.pending_update.tables)
        for t, before in self.pending_update.copies.items():
            t.copy_(before)

    def update_by_norm(self) -> None:
        """Make the update as its norm says; torch's own optimizers draw no random numbers."""
        assert self.pending_update is not None and self.pending_update.norm is not None
        self.verdict = self.judge_norm(self.pending_update.norm.sum_of_squares)
        for gradients in self.gradients:
            gradients.bind_gradients()  # an optimizer's zero_grad may have unbound them
        with self.random_streams.preserve_generators():
            self.apply_update()


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
        sum_of_squares: Tensor,
        work: Work,
        scalar_buffer: AsyncScalarBuffer,
        side_stream: torch.cuda.Stream | None,
    ) -> None:
        self.sum_of_squares, self.work, self.host_value = sum_of_squares, work, 0.0
        self.scalar_copy: AsyncScalars | None = None
        self.is_read = False
        if side_stream is not None:
            with torch.cuda.stream(side_stream):
                work.wait()
                self.scalar_copy = scalar_buffer.copy(sum_of_squares.view(1))

    def read(self) -> float:
        """The number, on the host, when it is there."""
        if not self.is_read:
            if self.scalar_copy is None:
                self.work.wait()
                self.host_value = self.sum_of_squares.item()
            else:
                (self.host_value,) = self.scalar_copy.read()
            self.is_read = True
        return self.host_value


def _restore_tables(tables: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, before in tables:
        table.clear()
        table.update(before)


def require_known_optimizer(optimizer: OptimizerLike | None, program: str = "") -> None:
    """Raise ModelError for an optimizer of which nobody knows all that its step changes."""
    inner = unwrap_optimizer(optimizer)
    if inner is None or has_known_effects(optimizer):
        return
    what = "has hooks on its step" if has_step_hooks(inner) else "is none of torch's own"
    name = type(
        optimizer if is_torch_optimizer(inner) and not has_step_hooks(inner) else inner
    ).__name__
    raise ModelError(
        "an update may be made again (norm_check 'after_step'), and the optimizer, "
        f"{name}, {what}: nobody knows what else its step changes",
        program=program,
        hint="compile(..., norm_check='before_step')",
    )
