"""Run warm-up steps and undo their effects. Save the state before a step that may run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.model_checks.tensor_fingerprint import get_write_traces, has_same_bits
from schedir.runtime.parameters.optimizer_inspection import (
    has_known_effects,
    list_stepped_parameters,
    map_main_parameters,
)
from schedir.runtime.parameters.step_skipping import has_gated_step
from schedir.runtime.parameters.unvalidated_update_guard import list_optimizer_tables
from schedir.runtime.program_state import ProgramState
from schedir.runtime.step_inputs import Microbatches, MicrobatchView, StepInputs

# The number of warm-up steps. The first step creates the optimizer state, in memory that
# activations have freed. The second step allocates activations next to this state. The third step
# allocates the memory that is still missing because of fragmentation.
WARM_UP_STEPS: Final = 3


def warm_up(state: ProgramState, step: Callable[..., object], batch: StepInputs) -> None:
    """Run the warm-up steps, each on a copy of the inputs, and undo them.

    Args:
        state: The state of the program.
        step: A function that runs one step, with the fields of `StepInputs` as its arguments.
        batch: The inputs of the first real step.
    """
    with undo_steps(state):
        for _ in range(WARM_UP_STEPS):
            step(*batch.view(ProbedCopies))
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


@contextmanager
def undo_steps(state: ProgramState) -> Iterator[None]:
    """Undo, at the end of this context, all changes that steps made within it.

    All tensors keep their memory. The context restores:

    - weights, because a forward may write to them; the copies are in host memory,
    - buffers, including the buffers of a loss that is a module,
    - the loss scale and torch's generators,
    - gradients of Parameters that are in the optimizer or the loss, but in no stage.

    There are three kinds of optimizers:

    - A fused optimizer of torch runs, but the device skips its update. Such an optimizer creates
      its state if needed, and does not change existing state.
    - Any other optimizer of torch makes its update, and the context restores the optimizer state
      from a copy on the host.
    - An optimizer that is not torch's own, or that has hooks on its step, does not run, because its
      effects are unknown.

    Args:
        state: The state of the program that runs the steps.
    """
    optimizer, loss_scale = state.resources.optimizer, state.options.gradients.loss_scale
    makes_update = has_known_effects(optimizer) and not has_gated_step(optimizer)
    stages = [stage.module for stage in state.stages.values()]
    unmanaged_parameters = find_unmanaged_parameters(state)
    tables = list_optimizer_tables(optimizer) if makes_update else []
    written_values: list[object] = [
        p for module in stages for p in module.parameters() if p.requires_grad
    ]
    written_values += [*tables, *(p.grad for p in unmanaged_parameters)]
    if loss_scale is not None:
        written_values += [loss_scale.value, loss_scale.good_steps]
    with PreservedState() as preserved:
        preserved.add_values(
            (t for t in tree_leaves(written_values) if isinstance(t, Tensor)), on_host=True
        )
        preserved.add_gradients(unmanaged_parameters)
        preserved.add_tables(tables)
        preserved.add_fields(state.random_streams, "step")
        for service in state.list_services():
            service.preserve(preserved)
            service.undo_steps(preserved, makes_update=makes_update)
        for module in state.list_modules():
            preserved.add_frozen_parameters(module)
            preserved.add_buffers(module)
        preserved.add_generators(state.random_streams.generators)
        yield


def preserve_step(
    state: ProgramState, batch: StepInputs, unstepped: UnsteppedParameters
) -> tuple[PreservedState, StepInputs]:
    """Preserve the state before a step that may have to run again.

    The preserved state excludes weights and optimizer state, which `PostValidation` restores. It
    includes:

    - buffers, including the buffers of a loss that is a module,
    - Parameters that the optimizer does not update, because a forward may write to them,
    - gradients of Parameters that are in no stage,
    - torch's generators if there is no seed,
    - the state of all services,
    - the inputs that the step reads.

    Args:
        state: The state of the program.
        batch: The inputs of the step.
        unstepped: The Parameters of the rank that the optimizer does not update.

    Returns:
        An object whose `close` restores the state, and inputs with the same values as `batch`. The
        step must use these inputs, because they preserve each tensor when the step reads it.
    """
    preserved = PreservedState()
    for service in state.list_services():
        service.preserve(preserved)
    for module in state.list_modules():
        preserved.add_buffers(module)
    preserved.callback(unstepped.capture())
    _add_gradients_and_values(preserved, find_unmanaged_parameters(state))
    if state.random_streams.seed is None:
        preserved.add_generators(state.random_streams.generators)
    return preserved, batch.view(partial(ProbedMicrobatches, preserved))


def _add_gradients_and_values(preserved: PreservedState, tensors: Iterable[Tensor]) -> None:
    """Preserve, for each tensor, the object in its `grad` attribute and the values of `grad`."""
    for t in tensors:
        if t.grad is not None:
            preserved.add_values([t.grad])
        preserved.add_gradients([t])


class UnsteppedParameters:
    """The Parameters of a rank that its optimizer does not update.

    A forward may write to such a Parameter, as it may write to a buffer. Most of these Parameters
    are never written to, and all of them together may need much memory. So the first `capture`
    copies all of them to the host. Later captures copy only the Parameters that were written to
    between the first capture and the second.

    Args:
        state: The state of the program.
    """

    def __init__(self, state: ProgramState) -> None:
        stepped_parameters = {*list_stepped_parameters(state.resources.optimizer)}
        stepped_parameters.update(getattr(state.resources.optimizer, "parameters", ()))
        modules = [(f"of stage {s}", stage.module) for s, stage in state.stages.items()]
        modules += [("of the loss", module) for module in state.options.loss_modules]
        self.names = {
            p: f"{name} {owner}"
            for owner, module in modules
            for name, p in module.named_parameters()
            if p not in stepped_parameters
        }
        self.initial_copies: dict[Tensor, Tensor] = {}
        self.written_parameters: set[Tensor] | None = None

    def capture(self) -> Callable[[], None]:
        """Record the present values of the Parameters.

        Returns:
            A function that restores the values. It raises `ModelError` if a Parameter without a
            copy was written to.
        """
        if self.initial_copies:
            self.written_parameters = {
                p
                for p, initial_copy in self.initial_copies.items()
                if not has_same_bits(p.detach().cpu(), initial_copy)
            }
            self.initial_copies = {}
        if self.written_parameters is None:
            copies = self.initial_copies = {p: p.detach().to("cpu", copy=True) for p in self.names}
        else:
            copies = {p: p.detach().clone() for p in self.written_parameters}
        records = [
            (p, p.data, trace)
            for p, trace in zip(self.names, get_write_traces([*self.names]), strict=True)
        ]

        @torch.no_grad()
        def restore() -> None:
            for p, data, trace in records:
                if p in copies:
                    p.data = data
                    p.copy_(copies[p])
                elif get_write_traces([p]) != [trace]:
                    raise ModelError(
                        f"a forward writes to parameter {self.names[p]}, which no optimizer "
                        "updates, so schedir cannot run the step again, as norm_check='after_step' "
                        "requires",
                        hint="make it a buffer, or compile(..., norm_check='before_step')",
                    )

        return restore


class ProbedMicrobatches(MicrobatchView):
    """A view of microbatches. When a step reads a microbatch, the view preserves its tensors.

    Reading a microbatch raises `ModelError` if one of its tensors requires a gradient and is not a
    leaf. Such a tensor has an autograd graph of the caller, and only one backward can use this
    graph.

    Args:
        preserved: The object that preserves the tensors and their gradients.
        source: The inputs, targets or keywords of a step.
    """

    def __init__(self, preserved: PreservedState, source: Microbatches) -> None:
        super().__init__(source)
        self.preserved = preserved

    def __getitem__(self, mb: Any) -> Any:
        microbatch = self.source[mb]
        for t in tree_leaves(microbatch):
            if isinstance(t, Tensor):
                self._record_tensor(t)
        return microbatch

    def _record_tensor(self, t: Tensor) -> None:
        leaf = self.source if isinstance(self.source, Tensor) else t
        if t.requires_grad and not leaf.is_leaf:
            raise ModelError(
                "an argument of the step has a grad_fn, but the step may run again "
                "(norm_check 'after_step')",
                hint="pass x.detach(), or compile(..., norm_check='before_step')",
            )
        if t.requires_grad:
            _add_gradients_and_values(self.preserved, [leaf])
        if not t.is_inference():  # torch refuses writes to inference tensors in a step
            self.preserved.add_written_values(t)


def find_unmanaged_parameters(state: ProgramState) -> set[nn.Parameter]:
    """Return the Parameters of the optimizer and of the loss that are in no stage.

    An executor does not set the gradients of these Parameters to zero.

    Args:
        state: The state of the program.
    """
    stage_parameters = {p for stage in state.stages.values() for p in stage.module.parameters()}
    other_parameters = {*list_stepped_parameters(state.resources.optimizer)}
    other_parameters.update(p for loss in state.options.loss_modules for p in loss.parameters())
    return other_parameters - stage_parameters.union(map_main_parameters(state.resources.optimizer))


class ProbedCopies(MicrobatchView):
    """A view of microbatches that returns a copy of a microbatch at each read.

    The original tensors stay unchanged: a loss may write to its target, and a backward writes to
    the `grad` of its inputs.
    """

    def __getitem__(self, mb: Any) -> Any:
        return tree_map_only(Tensor, _copy, self.source[mb])


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)
