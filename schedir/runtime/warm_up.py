"""Run a warm-up step, and undo its effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError
from schedir.runtime.autograd.module_buffers import make_buffer_restorer, preserve_buffers
from schedir.runtime.model_checks.tensor_fingerprint import get_write_traces, has_same_bits
from schedir.runtime.parameters.mixed_precision import (
    has_gated_step,
    has_known_effects,
    unwrap_optimizer,
)
from schedir.runtime.rank_state import State
from schedir.runtime.step_inputs import Microbatches, StepInputs

# Steps before the first.  One makes an optimizer's state, where activations have left memory; the
# next finds room for these beside it, and one more for what then lies in pieces.
WARM_UP_STEPS: Final = 3


def warm_up(state: State, step: Callable[..., object], batch: StepInputs) -> None:
    """Run as many steps, each on a copy of a batch, and undo them."""
    with undo_steps(state):
        for _ in range(WARM_UP_STEPS):
            step(*copy_on_access(batch))
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


@contextmanager
def undo_steps(state: State) -> Iterator[None]:
    """What steps change is after this context what it was, in the same memory.

    That is weights, which a forward may write to, and of which the host keeps a copy meanwhile;
    buffers, of a loss that is a module, too; the loss scale; torch's generators; and the gradients
    that Parameters have which are the optimizer's or the loss's alone.

    An optimizer that the device can hold back is launched, and held back: what it has it keeps,
    and state that it makes at its first step is there.  Any other of torch's own steps, and the
    host keeps a copy of its state, too.  One that is not torch's, or has hooks on its step, is left
    out: it may change what nobody else knows of.
    """
    inner: Any = unwrap_optimizer(state.optimizer)
    steps = has_known_effects(state.optimizer) and not has_gated_step(state.optimizer)
    modules = [stage.module for stage in state.stages.values()]
    own = {p for module in modules for p in module.parameters() if p.requires_grad}
    if isinstance(state.loss, nn.Module):
        modules.append(state.loss)
    gradients = [(p, p.grad) for p in find_unmanaged_parameters(state)]
    kept: list[object] = [*own, *(gradient for _, gradient in gradients)]
    stepped = state.resources.get_last_update_result
    if state.loss_scale is not None:
        kept += [state.loss_scale.value, state.loss_scale.good_steps]
    if steps:
        kept += [*inner.param_groups, *inner.state.values()]
    tensors = dict.fromkeys(t for t in tree_leaves(kept) if isinstance(t, Tensor))
    was = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
    rank, step, might = (
        state.resources,
        state.random_streams.step,
        state.resources.can_step,
    )  # within another
    rank.can_step = might and steps
    held = state.optimistic_step is not None and state.optimistic_step.is_warm_up
    if state.optimistic_step is not None:
        state.optimistic_step.is_warm_up = True
    try:
        with ExitStack() as changed:
            for module in modules:
                changed.enter_context(preserve_buffers(module, state.device))
            if steps:
                changed.enter_context(_restore_optimizer_tables(inner))
            yield
    finally:
        rank.can_step, state.random_streams.step = might, step
        rank.get_last_update_result = stepped
        if state.optimistic_step is not None:
            state.optimistic_step.is_warm_up = held
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for t, before in was:
                t.copy_(before)


class RecordedState:
    """A step that may be in vain: `restore` lets all be as before it, but weights and optimizer.

    That is buffers of modules, and of a loss that is one; Parameters that no optimizer steps, and a
    forward writes to; gradients that are not the stages';
    torch's generators, where no seed decides what is drawn; and what is in `batch`, which is the
    one given, and notes what somebody looks at.
    """

    def __init__(self, state: State, batch: StepInputs, unstepped: UnsteppedParameters) -> None:
        modules = [stage.module for stage in state.stages.values()]
        if isinstance(state.loss, nn.Module):
            modules.append(state.loss)
        self.restore_functions = [make_buffer_restorer(module) for module in modules]
        self.restore_functions.append(unstepped.capture())
        self.gradients = [(p, p.grad, _clone(p.grad)) for p in find_unmanaged_parameters(state)]
        generators = state.random_streams.generators if state.random_streams.seed is None else ()
        self.generators = [(generator, generator.get_state()) for generator in generators]
        self.probes = [
            ProbedMicrobatches(each) for each in (batch.inputs, batch.targets, batch.keywords)
        ]
        inputs, targets, keywords = self.probes
        self.batch = batch._replace(inputs=inputs, targets=targets, keywords=keywords)

    @torch.no_grad()
    def restore(self) -> None:
        """Let all be as it was."""
        for back in self.restore_functions:
            back()
        for generator, drawn in self.generators:
            generator.set_state(drawn)
        given = [one for looks in self.probes for one in reversed(looks.gradients)]
        for p, gradient, before in (*self.gradients, *given):
            p.grad = gradient
            if gradient is not None and before is not None:
                gradient.copy_(before)
        for looks in self.probes:
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
        inner = unwrap_optimizer(state.optimizer)
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
        self.initial_copies: dict[Tensor, Tensor] = {}
        self.written_parameters: set[Tensor] | None = None

    def capture(self) -> Callable[[], None]:
        """What puts them back as they are now.

        That raises ModelError for one that has been written to, and has no copy.
        """
        if self.initial_copies:
            self.written_parameters = {
                p
                for p, was in self.initial_copies.items()
                if not has_same_bits(p.detach().cpu(), was)
            }
            self.initial_copies = {}
        if self.written_parameters is None:
            copies = self.initial_copies = {p: p.detach().to("cpu", copy=True) for p in self.names}
        else:
            copies = {p: p.detach().clone() for p in self.written_parameters}
        was = [
            (p, p.data, trace)
            for p, trace in zip(self.names, get_write_traces([*self.names]), strict=True)
        ]

        def put_back() -> None:
            for p, data, trace in was:
                if p in copies:
                    p.data = data
                    p.copy_(copies[p])
                elif get_write_traces([p]) != [trace]:
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

    def __init__(self, microbatches: Microbatches) -> None:
        self.microbatches = microbatches
        self.values: list[tuple[Tensor, int, Tensor]] = []
        self.gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def __len__(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, mb: Any) -> Any:
        found = self.microbatches[mb]
        for t in tree_leaves(found):
            if isinstance(t, Tensor):
                self._record_tensor(t)
        return found

    def _record_tensor(self, t: Tensor) -> None:
        leaf = self.microbatches if isinstance(self.microbatches, Tensor) else t
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


def find_unmanaged_parameters(state: State) -> set[nn.Parameter]:
    """Parameters that are the optimizer's or the loss's alone: nobody zeroes their gradients."""
    own = {p for stage in state.stages.values() for p in stage.module.parameters()}
    groups = getattr(unwrap_optimizer(state.optimizer), "param_groups", ())
    others = {p for group in groups for p in group["params"]}
    if isinstance(state.loss, nn.Module):
        others |= {*state.loss.parameters()} - own
    return others - own.union(getattr(state.optimizer, "main_parameters", ()))


def copy_on_access(batch: StepInputs) -> StepInputs:
    """A batch of which each look gives a copy, as a loss may write to its target, and inputs may
    have a `grad`."""
    inputs, targets, keywords = map(ProbedCopies, (batch.inputs, batch.targets, batch.keywords))
    return batch._replace(inputs=inputs, targets=targets, keywords=keywords)


class ProbedCopies(Sequence[Any]):
    """Microbatches of which each look gives a copy."""

    def __init__(self, microbatches: Microbatches) -> None:
        self.microbatches = microbatches

    def __len__(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, mb: Any) -> Any:
        return tree_map_only(Tensor, _copy, self.microbatches[mb])


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@contextmanager
def _restore_optimizer_tables(optimizer: torch.optim.Optimizer) -> Iterator[None]:
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
