"""Run the optimizer step for one stage after the other.

If the host steps the states, host parameters replace the parameters of a stage in the optimizer
during the stage's step. With a MainOptimizer the host parameters receive the rounded main
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.runtime.model_checks.optimizer_requirements import require_own_parameters
from schedir.runtime.model_checks.step_isolation import (
    StepIsolation,
    make_offload_error,
    require_no_step_overlap,
)
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.parameters.optimizer_inspection import (
    OptimizerLike,
    has_step_hooks,
    is_torch_optimizer,
    list_stepped_parameters,
    map_main_parameters,
    unwrap_optimizer,
)
from schedir.runtime.parameters.step_skipping import step_if_finite


class StagewiseOptimizer:
    """An optimizer, with its parameters divided into one part per stage.

    Args:
        parameters: The parameters of each trained stage. A parameter of several stages belongs to
            the first of them.
        optimizer: The optimizer.
        names: The names of the parameters, for errors.
        steps_copies: True if the optimizer steps copies of the parameters on the host.

    Attributes:
        inner: The optimizer that has the states: `optimizer`, or the optimizer that it wraps.
        main_parameters: Parameter -> its main parameter, with a MainOptimizer.
        optimizer_parameters: Stage -> its parameters in the groups of the optimizer.
        seen_parameters: All parameters in these groups at the last refresh.
        trained_parameters: The parameters of the model that the optimizer trains.

    Raises:
        ModelError: A parameter of the optimizer belongs to no trained stage. Or two of its trained
            parameters share memory. Or the optimizer refers to parameters outside of its groups.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        names: Mapping[Tensor, str],
        *,
        steps_copies: bool,
    ) -> None:
        self.parameters = parameters
        self.names = names
        self.optimizer = optimizer
        self.inner = unwrap_optimizer(optimizer)
        self.isolation: StepIsolation = StepIsolation(self.inner, replaces_parameters=steps_copies)
        self.parameter_of_main = map_main_parameters(optimizer)
        self.main_parameters: dict[Tensor, Tensor] = {
            p: main for main, p in self.parameter_of_main.items()
        }
        self.optimizer_parameters: dict[int, list[Tensor]] = {}
        self.seen_parameters: list[Tensor] = []
        self.trained_parameters: list[Tensor] = []
        self.addresses: list[int] = []  # of `trained_parameters`, at the last check
        self.refresh_parameters()

    def refresh_parameters(self) -> None:
        """Assign the optimizer's parameters to stages, if its parameter groups have changed.

        Raises:
            ModelError: A parameter of the optimizer belongs to no trained stage, or two trained
                parameters share memory, or the optimizer refers to parameters outside of its
                groups.
        """
        all_parameters = list_stepped_parameters(self.inner)
        if [*map(id, all_parameters)] != [*map(id, self.seen_parameters)]:
            require_own_parameters(self.optimizer, self.parameters)
            self._assign_parameters(all_parameters)
            self._require_no_references()
            self.trained_parameters = [
                p
                for stage_parameters in self.optimizer_parameters.values()
                for p in self.find_model_parameters(stage_parameters)
                if p.requires_grad
            ]
            self.seen_parameters = all_parameters
        addresses = [p.data_ptr() for p in self.trained_parameters]
        if addresses != self.addresses:
            require_no_step_overlap(
                {p: self.names.get(p, "a parameter") for p in self.trained_parameters}
            )
            self.addresses = addresses

    def _assign_parameters(self, all_parameters: Sequence[Tensor]) -> None:
        unassigned = set(all_parameters)
        for s in sorted(self.parameters):
            candidates = dict.fromkeys(self.main_parameters.get(p, p) for p in self.parameters[s])
            self.optimizer_parameters[s] = [p for p in candidates if p in unassigned]
            unassigned.difference_update(self.optimizer_parameters[s])

    def find_model_parameters(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Return the parameters of the model that belong to parameters of the optimizer.

        Args:
            parameters: Parameters in groups of the optimizer. They may be main parameters.
        """
        return [self.parameter_of_main.get(p, p) for p in parameters]

    def _require_no_references(self) -> None:
        """Raise ModelError if the optimizer refers to parameters outside of its groups."""
        self.isolation.require_no_references(
            stages=sum(map(bool, self.optimizer_parameters.values()))
        )

    def list_state_tensors(self, stage: int) -> list[Tensor]:
        """Return the main parameters and the optimizer state of a stage, as tensors.

        Args:
            stage: The number of the stage.
        """
        stage_parameters = self.optimizer_parameters.get(stage, ())
        mains = [p for p in stage_parameters if self.main_parameters]
        leaves = tree_leaves([self.inner.state.get(p, {}) for p in stage_parameters])
        return [*dict.fromkeys([*mains, *(x for x in leaves if isinstance(x, Tensor))])]

    def require_separate_memory(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Check that each state tensor of a stage has separate memory, before the state is moved.

        Args:
            tensors: The state tensors of the stage.
            stage: The number of the stage.

        Raises:
            ModelError: A state tensor shares memory with another state tensor or a parameter.
        """
        self.isolation.require_separate_memory(tensors, self.trained_parameters, stage)

    def step(
        self,
        stage: int,
        finite: Tensor,
        host_copies: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        """Run the optimizer step for the parameters of one stage.

        Args:
            stage: The number of the stage.
            finite: True if the gradients are finite, 0-dim bool. If it is False, nothing changes.
            host_copies: Parameter -> the host parameter that the optimizer steps instead. None if
                the step is on the device.

        Raises:
            ModelError: The optimizer has step hooks, or its step for one stage affects another
                stage. Or it draws random numbers on the host.
        """
        if has_step_hooks(self.inner):
            raise make_offload_error(
                f"{type(self.inner).__name__} has hooks on its step, which would run for each stage"
            )
        if not self.optimizer_parameters.get(stage):
            return
        is_checked = host_copies is not None and not is_torch_optimizer(self.inner)
        with (
            _RandomDrawGuard(self.inner) if is_checked else nullcontext(),
            self._restrict_to_stage(stage, host_copies or {}),
            nullcontext() if host_copies is None else self._replace_state_keys(stage, host_copies),
            self.isolation.watch_step(stage),
        ):
            step_if_finite(finite, self.optimizer)
        self._require_no_references()

    @contextmanager
    def _restrict_to_stage(
        self, stage: int, host_copies: Mapping[Any, nn.Parameter]
    ) -> Iterator[None]:
        """Let the optimizer have only the parameters of one stage within this context.

        Host parameters replace the parameters that have one.
        """
        stage_parameters, groups = set(self.optimizer_parameters[stage]), self.inner.param_groups
        params_by_group = [group["params"] for group in groups]
        parameter_lists: list[Any] = []
        if isinstance(self.optimizer, MainOptimizer):
            parameter_lists = [self.optimizer.parameters, self.optimizer.main_parameters]
            pairs = [
                (host_copies.get(p, p), main)
                for p, main in zip(*parameter_lists, strict=True)
                if main in stage_parameters
            ]
            self.optimizer.parameters, self.optimizer.main_parameters = map(
                list, zip(*pairs, strict=True)
            )
        for group in groups:
            group["params"] = [
                host_copies.get(p, p) for p in group["params"] if p in stage_parameters
            ]
        self.inner.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            self.inner.param_groups = groups
            for group, all_params in zip(groups, params_by_group, strict=True):
                group["params"] = all_params
            if isinstance(self.optimizer, MainOptimizer):
                self.optimizer.parameters, self.optimizer.main_parameters = parameter_lists

    @contextmanager
    def _replace_state_keys(
        self, stage: int, host_copies: Mapping[Any, nn.Parameter]
    ) -> Iterator[None]:
        """Use host parameters as keys of the optimizer state within this context.

        The state of a main parameter keeps its key. Each stage also gets the state that belongs to
        no parameter.
        """
        if self.main_parameters:
            yield
            return
        inner, state = self.inner, self.inner.state
        stage_parameters = {*self.optimizer_parameters[stage]}
        keys = [key for key in state if not isinstance(key, Tensor) or key in stage_parameters]
        inner.state = defaultdict(dict)
        inner.state.update({host_copies.get(key, key): state[key] for key in keys})
        try:
            yield
        finally:
            new_state, inner.state = inner.state, state
            parameter_by_copy = {host_copy: p for p, host_copy in host_copies.items()}
            for key in keys:
                if host_copies.get(key, key) not in new_state:
                    del state[key]
            state.update(
                {
                    parameter_by_copy.get(key, key): parameter_state
                    for key, parameter_state in new_state.items()
                }
            )


class _RandomDrawGuard(TorchDispatchMode):
    """Refuse an optimizer that draws random numbers: a forward may draw at the same time."""

    def __init__(self, optimizer: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = type(optimizer).__name__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModelError(
                f"{self.name} draws random numbers in its step, but with 'cpu_step' the host runs "
                "the step during other instructions",
                hint="compile(..., optimizer_placement='host')",
            )
        return func(*args, **(kwargs or {}))
