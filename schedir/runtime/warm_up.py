"""Run a warm-up step, and undo its effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError
from schedir.runtime.autograd.module_buffers import remembered, restored
from schedir.runtime.model_checks.tensor_fingerprint import same_bits, traces_of
from schedir.runtime.parameters.mixed_precision import innermost, is_gated, is_known
from schedir.runtime.rank_state import State
from schedir.runtime.step_inputs import Microbatches, StepInputs

# Steps before the first.  One makes an optimizer's state, where activations have left memory; the
# next finds room for these beside it, and one more for what then lies in pieces.
WARM: Final = 3


def warm_up(state: State, step: Callable[..., object], batch: StepInputs) -> None:
    """Run as many steps, each on a copy of a batch, and undo them."""
    with undone(state):
        for _ in range(WARM):
            step(*copied(batch))
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


@contextmanager
def undone(state: State) -> Iterator[None]:
    """What steps change is after this context what it was, in the same memory.

    That is weights, which a forward may write to, and of which the host keeps a copy meanwhile;
    buffers, of a loss that is a module, too; the loss scale; torch's generators; and the gradients
    that Parameters have which are the optimizer's or the loss's alone.

    An optimizer that the device can hold back is launched, and held back: what it has it keeps,
    and state that it makes at its first step is there.  Any other of torch's own steps, and the
    host keeps a copy of its state, too.  One that is not torch's, or has hooks on its step, is left
    out: it may change what nobody else knows of.
    """
    inner: Any = innermost(state.optimizer)
    steps = is_known(state.optimizer) and not is_gated(state.optimizer)
    modules = [stage.module for stage in state.stages.values()]
    own = {p for module in modules for p in module.parameters() if p.requires_grad}
    if isinstance(state.loss, nn.Module):
        modules.append(state.loss)
    gradients = [(p, p.grad) for p in others_of(state)]
    kept: list[object] = [*own, *(gradient for _, gradient in gradients)]
    stepped = state.held.stepped
    if state.loss_scale is not None:
        kept += [state.loss_scale.value, state.loss_scale.good]
    if steps:
        kept += [*inner.param_groups, *inner.state.values()]
    tensors = dict.fromkeys(t for t in tree_leaves(kept) if isinstance(t, Tensor))
    was = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
    rank, step, might = state.held, state.draws.step, state.held.may_step  # within another
    rank.may_step = might and steps
    held = state.ahead is not None and state.ahead.held
    if state.ahead is not None:
        state.ahead.held = True
    try:
        with ExitStack() as changed:
            for module in modules:
                changed.enter_context(restored(module, state.device))
            if steps:
                changed.enter_context(_with_its_tables(inner))
            yield
    finally:
        rank.may_step, state.draws.step = might, step
        rank.stepped = stepped
        if state.ahead is not None:
            state.ahead.held = held
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for t, before in was:
                t.copy_(before)


class RecordedState:
    """A step that may be in vain: `put_back` lets all be as before it, but weights and optimizer.

    That is buffers of modules, and of a loss that is one; Parameters that no optimizer steps, and a
    forward writes to; gradients that are not the stages';
    torch's generators, where no seed decides what is drawn; and what is in `batch`, which is the
    one given, and notes what somebody looks at.
    """

    def __init__(self, state: State, batch: StepInputs, unstepped: UnsteppedParameters) -> None:
        modules = [stage.module for stage in state.stages.values()]
        if isinstance(state.loss, nn.Module):
            modules.append(state.loss)
        self.backs = [remembered(module) for module in modules]
        self.backs.append(unstepped.remembered())
        self.gradients = [(p, p.grad, _clone(p.grad)) for p in others_of(state)]
        generators = state.draws.generators if state.draws.seed is None else ()
        self.generators = [(generator, generator.get_state()) for generator in generators]
        self.looks = [
            ProbedMicrobatches(each) for each in (batch.inputs, batch.targets, batch.keywords)
        ]
        inputs, targets, keywords = self.looks
        self.batch = batch._replace(inputs=inputs, targets=targets, keywords=keywords)

    @torch.no_grad()
    def put_back(self) -> None:
        """Let all be as it was."""
        for back in self.backs:
            back()
        for generator, drawn in self.generators:
            generator.set_state(drawn)
        given = [one for looks in self.looks for one in reversed(looks.gradients)]
        for p, gradient, before in (*self.gradients, *given):
            p.grad = gradient
            if gradient is not None and before is not None:
                gradient.copy_(before)
        for looks in self.looks:
            for t, version, before in reversed(looks.values):
                if t._version != version:
                    t.copy_(before)


class UnsteppedParameters:
    """Parameters that a rank's optimizer does not step.  A forward may write to them as to buffers,
    as to a mean of others, but most are written to by nobody, and may be many.

    The first step that may be in vain has copies of all, in the host's memory; each that follows
    has copies of those that were written to.
    """

    def __init__(self, state: State) -> None:
        inner = innermost(state.optimizer)
        stepped = {p for group in getattr(inner, "param_groups", ()) for p in group["params"]}
        stepped.update(getattr(state.optimizer, "parameters", ()))
        modules = [(f"of stage {s}", stage.module) for s, stage in state.stages.items()]
        if isinstance(state.loss, nn.Module):
            modules.append(("of the loss", state.loss))
        self.names = {
            p: f"{name} {whose}"
            for whose, module in modules
            for name, p in module.named_parameters()
            if p not in stepped
        }
        self.first: dict[Tensor, Tensor] = {}
        self.written: set[Tensor] | None = None

    def remembered(self) -> Callable[[], None]:
        """What puts them back as they are now.

        That raises ModelError for one that has been written to, and has no copy.
        """
        if self.first:
            self.written = {
                p for p, was in self.first.items() if not same_bits(p.detach().cpu(), was)
            }
            self.first = {}
        if self.written is None:
            copies = self.first = {p: p.detach().to("cpu", copy=True) for p in self.names}
        else:
            copies = {p: p.detach().clone() for p in self.written}
        was = [
            (p, p.data, trace)
            for p, trace in zip(self.names, traces_of([*self.names]), strict=True)
        ]

        def put_back() -> None:
            for p, data, trace in was:
                if p in copies:
                    p.data = data
                    p.copy_(copies[p])
                elif traces_of([p]) != [trace]:
                    raise ModelError(
                        f"a forward writes to {self.names[p]}, which no optimizer steps and the "
                        "first steps left alone, and must be run again (norm_check 'after_step')",
                        hint="let it be a buffer, or compile(..., norm_check='before_step')",
                    )

        return put_back


class ProbedMicrobatches(Sequence[Any]):
    """Microbatches of which is noted what there was when somebody looked at one.

    Raises ModelError for a tensor that somebody's graph has made: a backward through it, which
    there may be another one of, would not be theirs alone.
    """

    def __init__(self, of: Microbatches) -> None:
        self.of = of
        self.values: list[tuple[Tensor, int, Tensor]] = []
        self.gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, mb: Any) -> Any:
        found = self.of[mb]
        for t in tree_leaves(found):
            if isinstance(t, Tensor):
                self._note(t)
        return found

    def _note(self, t: Tensor) -> None:
        leaf = self.of if isinstance(self.of, Tensor) else t
        if t.requires_grad and not leaf.is_leaf:
            raise ModelError(
                "what a step is given was made with a gradient, and the step may have to be run "
                "again (norm_check 'after_step')",
                hint="x.detach(), or compile(..., norm_check='before_step')",
            )
        if t.requires_grad:
            self.gradients.append((leaf, leaf.grad, _clone(leaf.grad)))
        if not t.is_inference():  # which nobody writes to
            self.values.append((t, t._version, t.detach().clone()))


def _clone(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def others_of(state: State) -> set[nn.Parameter]:
    """Parameters that are the optimizer's or the loss's alone: nobody zeroes their gradients."""
    own = {p for stage in state.stages.values() for p in stage.module.parameters()}
    groups = getattr(innermost(state.optimizer), "param_groups", ())
    others = {p for group in groups for p in group["params"]}
    if isinstance(state.loss, nn.Module):
        others |= {*state.loss.parameters()} - own
    return others - own.union(getattr(state.optimizer, "main", ()))


def copied(batch: StepInputs) -> StepInputs:
    """A batch of which each look gives a copy, as a loss may write to its target, and inputs may
    have a `grad`."""
    inputs, targets, keywords = map(ProbedCopies, (batch.inputs, batch.targets, batch.keywords))
    return batch._replace(inputs=inputs, targets=targets, keywords=keywords)


class ProbedCopies(Sequence[Any]):
    """Microbatches of which each look gives a copy."""

    def __init__(self, of: Microbatches) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, mb: Any) -> Any:
        return tree_map_only(Tensor, _copy, self.of[mb])


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@contextmanager
def _with_its_tables(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """After this context an optimizer's state and its groups hold what they held before."""
    tables: list[dict[Any, Any]] = [
        optimizer.state, *optimizer.state.values(), *optimizer.param_groups,
    ]  # fmt: skip
    was = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, was, strict=True):
            table.clear()
            table.update(before)
