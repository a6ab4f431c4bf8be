"""Run warm-up steps and undo their effects, or prepare to undo a step that must run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from schedir.runtime.parameters.unvalidated_update_guard import copy_tables, restore_tables
from schedir.runtime.rank_state import State
from schedir.runtime.step_inputs import Microbatches, MicrobatchView, StepInputs

# The number of warm-up steps. The first one creates the optimizer state, in memory that activations
# have freed. The second one allocates activations next to that state. The third one allocates what
# fragmented memory still lacks.
WARM_UP_STEPS: Final = 3


def warm_up(state: State, step: Callable[..., object], batch: StepInputs) -> None:
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
def undo_steps(state: State) -> Iterator[None]:
    """Undo at the end of the context all changes that steps made within it.

    All tensors keep their memory. The context restores:

    - weights, because a forward may write to them; the host keeps a copy meanwhile,
    - buffers, including those of a loss that is a module,
    - the loss scale and torch's generators,
    - gradients of Parameters that only the optimizer or only the loss has.

    The optimizer is treated in one of three ways. A fused optimizer of torch is launched, but the
    device skips its update. It keeps its state, and creates the state that its first step needs.
    Any other optimizer of torch makes its update, and the context restores its state from a copy on
    the host. An optimizer that is not torch's own, or that has hooks on its step, is not run,
    because its effects are unknown.

    Args:
        state: The state of the program that runs the steps.
    """
    optimizer, loss_scale = state.resources.optimizer, state.options.loss_scale
    makes_update = has_known_effects(optimizer) and not has_gated_step(optimizer)
    stages = [stage.module for stage in state.stages.values()]
    own = {p for module in stages for p in module.parameters() if p.requires_grad}
    gradients = [(p, p.grad) for p in find_unmanaged_parameters(state)]
    restored: list[object] = [*own, *(gradient for _, gradient in gradients)]
    if loss_scale is not None:
        restored += [loss_scale.value, loss_scale.good_steps]
    tables = copy_tables(optimizer) if makes_update else []
    restored += [table for table, _ in tables]
    tensors = dict.fromkeys(t for t in tree_leaves(restored) if isinstance(t, Tensor))
    copies = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
    step = state.random_streams.step
    try:
        with ExitStack() as stack:
            for service in state.list_services():
                stack.enter_context(service.undo_steps(makes_update=makes_update))
            for module in state.list_modules():
                stack.enter_context(preserve_buffers(module, state.device))
            yield
    finally:
        state.random_streams.step = step
        restore_tables(tables)
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for t, before in copies:
                t.copy_(before)


class RecordedState:
    """The state before a step that may have to run again.

    It excludes weights and optimizer state, which `OptimisticStep` restores. It includes:

    - buffers, including those of a loss that is a module,
    - Parameters that no optimizer steps, because a forward may write to them,
    - gradients of Parameters that no stage has,
    - torch's generators if there is no seed,
    - the inputs of the step that the step reads.

    Args:
        state: The state of the program.
        batch: The inputs of the step.
        unstepped: The Parameters of the rank that no optimizer steps.

    Attributes:
        batch: The same inputs. The step must read them from here, so that they are recorded.
    """

    def __init__(self, state: State, batch: StepInputs, unstepped: UnsteppedParameters) -> None:
        self.restore_functions = [make_buffer_restorer(module) for module in state.list_modules()]
        self.restore_functions.append(unstepped.capture())
        self.gradients = [(p, p.grad, _clone(p.grad)) for p in find_unmanaged_parameters(state)]
        generators = state.random_streams.generators if state.random_streams.seed is None else ()
        self.generators = [(generator, generator.get_state()) for generator in generators]
        self.batch = batch.view(ProbedMicrobatches)
        self.probes: list[Any] = [self.batch.inputs, self.batch.targets, self.batch.keywords]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the recorded state."""
        for restore in self.restore_functions:
            restore()
        for generator, generator_state in self.generators:
            generator.set_state(generator_state)
        input_gradients = [one for probe in self.probes for one in reversed(probe.gradients)]
        for p, gradient, before in (*self.gradients, *input_gradients):
            p.grad = gradient
            if gradient is not None and before is not None:
                gradient.copy_(before)
        for probe in self.probes:
            for t, version, before in reversed(probe.values):
                if t._version != version:
                    t.copy_(before)


class UnsteppedParameters:
    """The Parameters of a rank that its optimizer does not step.

    A forward may write to such a Parameter, as it does to a buffer. Most of them are never written
    to, and they may need much memory. So the first `capture` copies all of them to the host. Later
    ones copy only those that the first step wrote to.

    Args:
        state: The state of the program.
    """

    def __init__(self, state: State) -> None:
        inner = unwrap_optimizer(state.resources.optimizer)
        stepped = {p for group in getattr(inner, "param_groups", ()) for p in group["params"]}
        stepped.update(getattr(state.resources.optimizer, "parameters", ()))
        modules = [(f"of stage {s}", stage.module) for s, stage in state.stages.items()]
        modules += [("of the loss", module) for module in state.options.loss_modules]
        self.names = {
            p: f"{name} {owner}"
            for owner, module in modules
            for name, p in module.named_parameters()
            if p not in stepped
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
                        f"a forward writes to {self.names[p]}, which no optimizer steps, and the "
                        "step must run again (norm_check 'after_step')",
                        hint="make it a buffer, or compile(..., norm_check='before_step')",
                    )

        return put_back


class ProbedMicrobatches(MicrobatchView):
    """Microbatches that record the tensors of each microbatch that is read.

    Reading a microbatch raises `ModelError` if one of its tensors requires a gradient and is not a
    leaf. The caller's graph computed such a tensor, and a second backward cannot use that graph.

    Args:
        source: The inputs, targets or keywords of a step.

    Attributes:
        values: For each tensor that was read: the tensor, its version and a copy.
        gradients: For each tensor that requires a gradient: the leaf, its `grad` and a copy.
    """

    def __init__(self, source: Microbatches) -> None:
        super().__init__(source)
        self.values: list[tuple[Tensor, int, Tensor]] = []
        self.gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

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
            self.gradients.append((leaf, leaf.grad, _clone(leaf.grad)))
        if not t.is_inference():  # Nothing writes to a tensor of inference mode.
            self.values.append((t, t._version, t.detach().clone()))


def _clone(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def find_unmanaged_parameters(state: State) -> set[nn.Parameter]:
    """Return the Parameters of the optimizer and of the loss that no stage has.

    An executor does not zero the gradients of these.

    Args:
        state: The state of the program.
    """
    own = {p for stage in state.stages.values() for p in stage.module.parameters()}
    groups = getattr(unwrap_optimizer(state.resources.optimizer), "param_groups", ())
    others = {p for group in groups for p in group["params"]}
    others.update(p for loss in state.options.loss_modules for p in loss.parameters())
    return others - own.union(getattr(state.resources.optimizer, "main_parameters", ()))


class ProbedCopies(MicrobatchView):
    """Microbatches that return a copy at each read.

    A loss may write to its target, and a backward to the `grad` of the inputs.
    """

    def __getitem__(self, mb: Any) -> Any:
        return tree_map_only(Tensor, _copy, self.source[mb])


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)
