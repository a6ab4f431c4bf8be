"""Keep the optimizer state of each stage in host memory, except during the stage's step.

The state tensors of the optimizer and the main parameters of a MainOptimizer stay the same objects.
Only their `data` moves between the device and the host. Between steps the data is on the host,
where for example a checkpoint reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.ir.isa.instructions import Lane
from schedir.runtime.model_checks.optimizer_requirements import require_own_parameters
from schedir.runtime.model_checks.step_isolation import (
    StepIsolation,
    make_offload_error,
    require_no_step_overlap,
)
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.snapshot_copies import copy_pairs
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.parameters.optimizer_inspection import (
    OptimizerLike,
    has_step_hooks,
    unwrap_optimizer,
)
from schedir.runtime.parameters.step_skipping import step_if_finite


class StateCopy(NamedTuple):
    """A running copy of state tensors.

    Attributes:
        job: The copy.
        tensors: For each tensor: the tensor, its memory on the host, and its memory on the device.
    """

    job: LaneJob
    tensors: Sequence[tuple[Tensor, Tensor, Tensor]]


class HostOptimizerState:
    """The optimizer state of a rank, divided into one part per stage.

    Args:
        parameters: The parameters of each trained stage. A parameter of several stages belongs to
            the first of them.
        optimizer: The optimizer.
        lanes: The lanes of the rank.
        device: The device of the rank.
        names: The names of the parameters, for errors.

    Raises:
        ModelError: A parameter of the optimizer belongs to no trained stage. Or two of its trained
            parameters share memory. Or the optimizer refers to parameters outside of its groups.
    """

    # True if the optimizer updates copies of the parameters on the host.
    replaces_parameters = False

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        lanes: CopyLanes,
        device: torch.device,
        names: Mapping[Tensor, str],
    ) -> None:
        self.parameters = parameters
        self.lanes = lanes
        self.device = device
        self.names = names
        self.optimizer = optimizer
        self.inner = unwrap_optimizer(optimizer)
        self.isolation = StepIsolation(self.inner, replaces_parameters=self.replaces_parameters)
        self.main_parameters: dict[Tensor, Tensor] = {}
        if isinstance(optimizer, MainOptimizer):
            self.main_parameters = dict(
                zip(optimizer.parameters, optimizer.main_parameters, strict=True)
            )
        # `optimizer_parameters`: stage -> its parameters in the optimizer's groups.
        # `seen_parameters`: all parameters in these groups at the last refresh.
        self.optimizer_parameters: dict[int, list[Tensor]] = {}
        self.seen_parameters: list[Tensor] = []
        self.stepped_parameters: list[Tensor] = []  # trained parameters of the model
        self.addresses: list[int] = []  # of `stepped_parameters`, at the last check
        self.refresh_parameters()
        self._require_no_overlap()
        # State tensor -> its memory on the host.
        self.host_memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.pending_loads: dict[int, StateCopy] = {}
        self.pending_stores: dict[int, StateCopy] = {}
        self.loaded_addresses: set[int] = set()  # addresses of the memory that `load` allocated

    def refresh_parameters(self) -> None:
        """Assign the optimizer's parameters to stages, if its parameter groups have changed.

        Raises:
            ModelError: A parameter of the optimizer belongs to no trained stage, or the optimizer
                refers to parameters outside of its groups.
        """
        all_parameters = [p for group in self.inner.param_groups for p in group["params"]]
        if [*map(id, all_parameters)] == [*map(id, self.seen_parameters)]:
            return
        require_own_parameters(self.inner, self.main_parameters, self.parameters)
        unassigned = set(all_parameters)
        for s in sorted(self.parameters):
            candidates = dict.fromkeys(self.main_parameters.get(p, p) for p in self.parameters[s])
            self.optimizer_parameters[s] = [p for p in candidates if p in unassigned]
            unassigned.difference_update(self.optimizer_parameters[s])
        self._require_no_references()
        parameter_of_main = {main: p for p, main in self.main_parameters.items()}
        parameters = (
            parameter_of_main.get(p, p)
            for stage_parameters in self.optimizer_parameters.values()
            for p in stage_parameters
        )
        self.stepped_parameters = [p for p in parameters if p.requires_grad]
        self.seen_parameters = all_parameters

    def _require_no_references(self) -> None:
        """Raise ModelError if the optimizer refers to parameters outside of its groups."""
        self.isolation.require_no_references(
            stages=sum(map(bool, self.optimizer_parameters.values()))
        )

    def _require_no_overlap(self) -> None:
        """Raise ModelError if stepped parameters share memory. Check only if addresses changed."""
        addresses = [p.data_ptr() for p in self.stepped_parameters]
        if addresses != self.addresses:
            require_no_step_overlap(
                {p: self.names.get(p, "a parameter") for p in self.stepped_parameters}
            )
            self.addresses = addresses

    def list_host_memory(self) -> list[Tensor]:
        """Return the host memory of the state, for statistics."""
        return [*self.host_memory.values()]

    def list_state_tensors(self, stage: int) -> list[Tensor]:
        """Return the state tensors of a stage that are on the device or can move there.

        On a GPU, the result excludes state that torch keeps on the host, such as step counts.

        Args:
            stage: The number of the stage.
        """
        stage_parameters = self.optimizer_parameters.get(stage, ())
        mains = [p for p in stage_parameters if self.main_parameters]
        leaves = tree_leaves([self.inner.state.get(p, {}) for p in stage_parameters])
        state_tensors = dict.fromkeys([*mains, *(x for x in leaves if isinstance(x, Tensor))])
        return [
            t for t in state_tensors if t in self.host_memory or t.device.type == self.device.type
        ]

    def is_on_host(self, t: Tensor) -> bool:
        """Return whether the `data` of a state tensor is in the tensor's host memory.

        Args:
            t: A state tensor.
        """
        host_memory = self.host_memory.get(t)
        return (
            host_memory is not None
            and host_memory.data_ptr() == t.data_ptr()
            and host_memory.device == t.device
        )

    # ------------------------------------------------------------ in a step

    def to_resting_state(self) -> None:
        """Move all state to the tier in which it stays between steps.

        State tensors may be on the device after the load of a checkpoint, or after the creation of
        the optimizer.

        Raises:
            ModelError: As in `refresh_parameters`, or two stepped parameters share memory.
        """
        self.refresh_parameters()
        self._require_no_overlap()
        for stage in self.optimizer_parameters:
            if not all(map(self.is_on_host, self.list_state_tensors(stage))):
                self.move_to_resting_tier(stage)
        self.finish()

    def move_to_resting_tier(self, stage: int) -> None:
        """Start to move the state of a stage to the tier in which it stays between steps.

        Args:
            stage: The number of the stage.
        """
        self.store(stage)

    def load(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Start to copy the state of a stage to the device.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.
        """
        copied_tensors = []
        for t in self.list_state_tensors(stage):
            if self.is_on_host(t):
                copied_tensors.append((t, self.host_memory[t], allocate_like(t, self.device)))
        self.loaded_addresses.update(
            device_memory.data_ptr() for _, _, device_memory in copied_tensors
        )
        pairs = [(device_memory, host_memory) for _, host_memory, device_memory in copied_tensors]
        self.pending_loads[stage] = StateCopy(
            self._start_copy(Lane.H2D, pairs, observer), copied_tensors
        )

    def _start_copy(
        self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], observer: LaneObserver | None
    ) -> LaneJob:
        """Start copies from the second to the first tensor of each pair, on a lane."""
        nbytes = sum(target.nbytes for target, _ in pairs)
        return self.lanes.start(lane, partial(copy_pairs, pairs), nbytes, observer=observer)

    def finish_load(self, stage: int) -> None:
        """Wait for `load`, and set `data` of the state tensors to their device memory.

        Args:
            stage: The number of the stage.
        """
        job, copied_tensors = self.pending_loads.pop(stage)
        job.wait()
        for t, _, device_memory in copied_tensors:
            t.data = device_memory

    def step(self, stage: int, finite: Tensor) -> None:
        """Run the optimizer step for the parameters of one stage.

        Args:
            stage: The number of the stage.
            finite: True if the gradients are finite, 0-dim bool. If it is False, nothing changes.

        Raises:
            ModelError: The optimizer has step hooks, or its step for one stage affects another
                stage.
        """
        if has_step_hooks(self.inner):
            raise make_offload_error(
                f"{type(self.inner).__name__} has hooks on its step, which would run for each stage"
            )
        if self.optimizer_parameters.get(stage):
            with self._restrict_to_stage(stage), self.isolation.watch_step(stage):
                step_if_finite(finite, self.optimizer)
            self._require_no_references()

    @contextmanager
    def _restrict_to_stage(self, stage: int) -> Iterator[None]:
        """Let the optimizer have only the parameters of one stage within this context."""
        stage_parameters, groups = set(self.optimizer_parameters[stage]), self.inner.param_groups
        params_by_group = [group["params"] for group in groups]
        parameter_lists: list[Any] = []
        if isinstance(self.optimizer, MainOptimizer):
            parameter_lists = [self.optimizer.parameters, self.optimizer.main_parameters]
            pairs = [
                pair for pair in zip(*parameter_lists, strict=True) if pair[1] in stage_parameters
            ]
            self.optimizer.parameters, self.optimizer.main_parameters = map(
                list, zip(*pairs, strict=True)
            )
        for group in groups:
            group["params"] = [p for p in group["params"] if p in stage_parameters]
        self.inner.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            self.inner.param_groups = groups
            for group, all_params in zip(groups, params_by_group, strict=True):
                group["params"] = all_params
            if isinstance(self.optimizer, MainOptimizer):
                self.optimizer.parameters, self.optimizer.main_parameters = parameter_lists

    def store(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Start to copy the state of a stage to the host.

        The `data` of state tensors is set to host memory immediately. Do not read the data before
        the next `load` of the state, or the end of the step.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.

        Raises:
            ModelError: State tensors share memory with each other or with parameters.
        """
        self.require_separate_memory(stage)
        copied_tensors = []
        for t in self.list_state_tensors(stage):
            if self.is_on_host(t):
                continue
            if t not in self.host_memory or not has_same_shape_and_dtype(self.host_memory[t], t):
                self.host_memory[t] = allocate_like(
                    t, torch.device("cpu"), pinned=self.device.type == "cuda"
                )
            copied_tensors.append((t, self.host_memory[t], t.data))
        pairs = [(host_memory, device_memory) for _, host_memory, device_memory in copied_tensors]
        job = self._start_copy(Lane.D2H, pairs, observer)
        for t, host_memory, _ in copied_tensors:
            t.data = host_memory
        self.pending_stores[stage] = StateCopy(job, copied_tensors)

    def require_separate_memory(self, stage: int) -> None:
        """Check that each state tensor of a stage has separate memory, before the state is moved.

        Args:
            stage: The number of the stage.

        Raises:
            ModelError: A state tensor shares memory with another state tensor or a parameter.
        """
        self.isolation.require_separate_memory(
            self.list_state_tensors(stage), self.stepped_parameters, stage
        )

    def finish_store(self, stage: int) -> None:
        """Wait on the host for `store`, and release the device memory of the stage's state.

        On a CPU, the method overwrites the released memory with NaN or -1, to find wrong reads.

        Args:
            stage: The stage. If the stage has no running store, the method does nothing.
        """
        if stage not in self.pending_stores:
            return
        job, copied_tensors = self.pending_stores[stage]
        job.finish()
        del self.pending_stores[stage]
        for _, _, device_memory in copied_tensors:
            if device_memory.data_ptr() in self.loaded_addresses and self.device.type == "cpu":
                device_memory.fill_(
                    torch.nan
                    if device_memory.is_floating_point() or device_memory.is_complex()
                    else -1
                )
                device_memory.untyped_storage().resize_(0)
            self.loaded_addresses.discard(device_memory.data_ptr())

    def finish(self, *, is_last_update: bool = True) -> None:
        """Wait until all state is on the host and the host may read it.

        Args:
            is_last_update: True if this is the last update of the step. Only subclasses use this
                argument.
        """
        for stage in [*self.pending_stores]:
            self.finish_store(stage)
        self.loaded_addresses.clear()  # other tensors may now get these addresses

    def fail(self) -> None:
        """After an error, wait until all running copies have ended, and ignore their errors."""
        for state_copy in (*self.pending_loads.values(), *self.pending_stores.values()):
            with suppress(Exception):  # the first error is already being raised
                state_copy.job.finish()
        self.pending_loads.clear()
        self.pending_stores.clear()
        self.loaded_addresses.clear()


@torch.no_grad()
def allocate_like(t: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Return uninitialised memory on a device, with the shape, dtype and strides of a tensor.

    Args:
        t: The tensor.
        device: The device of the new memory.
        pinned: True to pin the memory, if it is host memory.
    """
    return torch.empty_like(t, device=device, pin_memory=pinned, requires_grad=False)


def has_same_shape_and_dtype(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and dtype."""
    return one.shape == other.shape and one.dtype == other.dtype
