"""Keep the optimizer state of each stage in host memory, except while it is stepped.

What is moved are the memories of the tensors that an optimizer keeps, and of a MainOptimizer's
copies: the tensors stay the same objects, and their `data` is on the device or on the host.  So
whoever looks at them between steps, as a checkpoint does, finds them on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Lane
from schedir.ir.program import Program
from schedir.runtime.model_checks.step_isolation import (
    ON_DEVICE_HINT,
    StepIsolation,
    make_offload_error,
    require_no_step_overlap,
)
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.snapshot_copies import copy_pairs
from schedir.runtime.parameters.mixed_precision import (
    MainOptimizer,
    OptimizerLike,
    has_step_hooks,
    is_torch_optimizer,
    step_if_finite,
    unwrap_optimizer,
)

# Of torch's own those that step each parameter by itself; LBFGS takes all for one.
_PER_PARAMETER_OPTIMIZERS: Final = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


class StateCopy(NamedTuple):
    """What is being copied: each tensor with its memory on the host, and that on the device."""

    job: LaneJob
    tensors: Sequence[tuple[Tensor, Tensor, Tensor]]


class HostOptimizerState:
    """The state of an optimizer, by the stages of a rank whose parameters it steps.

    `parameters` are those of each trained stage.  One that several stages have is the first one's.
    """

    replaces_parameters = (
        False  # whether a step gets other parameters in place of those of the device
    )

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        lanes: CopyLanes,
        device: torch.device,
        names: Mapping[Tensor, str],
    ) -> None:
        self.parameters, self.lanes, self.device = parameters, lanes, device
        self.names = names  # of the parameters, for errors
        self.optimizer, self.inner = optimizer, unwrap_optimizer(optimizer)
        self.isolation = StepIsolation(self.inner, replaces_parameters=self.replaces_parameters)
        self.main_parameters: dict[Tensor, Tensor] = {}
        if isinstance(optimizer, MainOptimizer):
            self.main_parameters = dict(
                zip(optimizer.parameters, optimizer.main_parameters, strict=True)
            )
        self.optimizer_parameters: dict[
            int, list[Tensor]
        ] = {}  # by stage, what the optimizer has of it
        self.seen_parameters: list[Tensor] = []  # what it had when that was looked at
        self.stepped_parameters: list[Tensor] = []  # the parameters for these
        self.addresses: list[int] = []  # of the parameters when their memory was looked at
        self.refresh_parameters()
        self._require_no_overlap()
        self.host_memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # memory on the host
        self.pending_loads: dict[int, StateCopy] = {}
        self.pending_stores: dict[int, StateCopy] = {}
        self.loaded_addresses: set[int] = set()  # memory that a load has made, by address

    def refresh_parameters(self) -> None:
        """See what the optimizer has of each stage: groups may have come since the last step.

        Raises ModelError where that is of none of them.
        """
        has = [p for group in self.inner.param_groups for p in group["params"]]
        if [*map(id, has)] == [*map(id, self.seen_parameters)]:
            return
        _require_stage_parameters(self.inner, self.main_parameters, self.parameters)
        left = set(has)
        for s in sorted(self.parameters):
            found = dict.fromkeys(self.main_parameters.get(p, p) for p in self.parameters[s])
            self.optimizer_parameters[s] = [p for p in found if p in left]
            left.difference_update(self.optimizer_parameters[s])
        self._require_no_references()
        whose = {main: p for p, main in self.main_parameters.items()}
        parameters = (whose.get(p, p) for own in self.optimizer_parameters.values() for p in own)
        self.stepped_parameters = [p for p in parameters if p.requires_grad]
        self.seen_parameters = has

    def _require_no_references(self) -> None:
        """Verify that the optimizer steps only the parameters in its groups."""
        self.isolation.require_no_references(
            stages=sum(map(bool, self.optimizer_parameters.values()))
        )

    def _require_no_overlap(self) -> None:
        """Raise ModelError for two stepped parameters in one memory; a `data` may have been set."""
        addresses = [p.data_ptr() for p in self.stepped_parameters]
        if addresses != self.addresses:
            require_no_step_overlap(
                {p: self.names.get(p, "a parameter") for p in self.stepped_parameters}
            )
            self.addresses = addresses

    def list_host_memory(self) -> list[Tensor]:
        """The memory on the host."""
        return [*self.host_memory.values()]

    def list_state_tensors(self, stage: int) -> list[Tensor]:
        """What is kept of a stage, where it is on the device or can go there; a count that torch
        keeps on the host while parameters are on a GPU stays there."""
        own = self.optimizer_parameters.get(stage, ())
        mains = [p for p in own if self.main_parameters]
        leaves = tree_leaves([self.inner.state.get(p, {}) for p in own])
        every = dict.fromkeys([*mains, *(x for x in leaves if isinstance(x, Tensor))])
        return [t for t in every if t in self.host_memory or t.device.type == self.device.type]

    def is_on_host(self, t: Tensor) -> bool:
        """Whether the memory of a tensor is that on the host."""
        place = self.host_memory.get(t)
        return place is not None and place.data_ptr() == t.data_ptr() and place.device == t.device

    # ------------------------------------------------------------ in a step

    def to_resting_state(self) -> None:
        """Let all that is kept be on the host: what was loaded from elsewhere since the last step,
        or made with the optimizer.  Raises as `refresh_parameters`."""
        self.refresh_parameters()
        self._require_no_overlap()
        for stage in self.optimizer_parameters:
            if not all(map(self.is_on_host, self.list_state_tensors(stage))):
                self.move_to_resting_tier(stage)
        self.finish()

    def move_to_resting_tier(self, stage: int) -> None:
        """Take what is kept of a stage to where it is between steps."""
        self.store(stage)

    def load(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Begin to copy what is kept of a stage to the device."""
        moving = []
        for t in self.list_state_tensors(stage):
            if self.is_on_host(t):
                moving.append((t, self.host_memory[t], allocate_like(t, self.device)))
        self.loaded_addresses.update(here.data_ptr() for _, _, here in moving)
        pairs = [(here, place) for _, place, here in moving]
        self.pending_loads[stage] = StateCopy(self._start_copy(Lane.H2D, pairs, observer), moving)

    def _start_copy(
        self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], observer: LaneObserver | None
    ) -> LaneJob:
        """Copy to the first of each pair on a lane."""
        nbytes = sum(to.nbytes for to, _ in pairs)
        return self.lanes.start(lane, partial(copy_pairs, pairs), nbytes, observer=observer)

    def finish_load(self, stage: int) -> None:
        """Wait until it is there."""
        job, moving = self.pending_loads.pop(stage)
        job.wait()
        for t, _, here in moving:
            t.data = here

    def step(self, stage: int, finite: Tensor) -> None:
        """Let the optimizer step the parameters of a stage, and no others, if `finite` is true."""
        if has_step_hooks(self.inner):
            raise ModelError(
                f"{type(self.inner).__name__} has hooks on its step, which would run for each "
                "stage: the optimizer's states are not on the device",
                hint="hooks of the training loop, or optimizer_placement='device'",
            )
        if self.optimizer_parameters.get(stage):
            with self._restrict_to_stage(stage), self.isolation.watch_step(stage):
                step_if_finite(finite, self.optimizer)
            self._require_no_references()

    @contextmanager
    def _restrict_to_stage(self, stage: int) -> Iterator[None]:
        """Within this the optimizer has the parameters of one stage."""
        own, groups = set(self.optimizer_parameters[stage]), self.inner.param_groups
        params = [group["params"] for group in groups]
        both: list[Any] = []
        if isinstance(self.optimizer, MainOptimizer):
            both = [self.optimizer.parameters, self.optimizer.main_parameters]
            pairs = [pair for pair in zip(*both, strict=True) if pair[1] in own]
            self.optimizer.parameters, self.optimizer.main_parameters = map(
                list, zip(*pairs, strict=True)
            )
        for group in groups:
            group["params"] = [p for p in group["params"] if p in own]
        self.inner.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            self.inner.param_groups = groups
            for group, whole in zip(groups, params, strict=True):
                group["params"] = whole
            if isinstance(self.optimizer, MainOptimizer):
                self.optimizer.parameters, self.optimizer.main_parameters = both

    def store(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Begin to copy what is kept of a stage back; nobody reads it until it is loaded again, or
        the step has ended."""
        self.require_separate_memory(stage)
        moving = []
        for t in self.list_state_tensors(stage):
            if self.is_on_host(t):
                continue
            if t not in self.host_memory or not has_same_shape_and_dtype(self.host_memory[t], t):
                self.host_memory[t] = allocate_like(
                    t, torch.device("cpu"), pinned=self.device.type == "cuda"
                )
            moving.append((t, self.host_memory[t], t.data))
        pairs = [(place, here) for _, place, here in moving]
        job = self._start_copy(Lane.D2H, pairs, observer)
        for t, place, _ in moving:
            t.data = place
        self.pending_stores[stage] = StateCopy(job, moving)

    def require_separate_memory(self, stage: int) -> None:
        """Verify that a stage's optimizer state has memory of its own, before it is moved."""
        self.isolation.require_separate_memory(
            self.list_state_tensors(stage), self.stepped_parameters, stage
        )

    def finish_store(self, stage: int) -> None:
        """Wait on the host until a stage's has been stored, and let go of its memory on the device;
        where that is the host's, too, nobody finds there what was."""
        if stage not in self.pending_stores:
            return
        job, moving = self.pending_stores[stage]
        job.finish()
        del self.pending_stores[stage]
        for _, _, here in moving:
            if here.data_ptr() in self.loaded_addresses and self.device.type == "cpu":
                here.fill_(torch.nan if here.is_floating_point() or here.is_complex() else -1)
                here.untyped_storage().resize_(0)
            self.loaded_addresses.discard(here.data_ptr())

    def finish(self, *, is_last_update: bool = True) -> None:
        """Wait until all is on the host, and the host may read it: behind the last update."""
        for stage in [*self.pending_stores]:
            self.finish_store(stage)
        self.loaded_addresses.clear()  # others may get memory at these addresses now

    def fail(self) -> None:
        """After an error: nothing is being copied any more."""
        for moving in (*self.pending_loads.values(), *self.pending_stores.values()):
            with suppress(Exception):  # an earlier one is told
                moving.job.finish()
        self.pending_loads.clear()
        self.pending_stores.clear()
        self.loaded_addresses.clear()


@torch.no_grad()
def allocate_like(t: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Memory for a tensor elsewhere, in the same order."""
    return torch.empty_like(t, device=device, pin_memory=pinned, requires_grad=False)


def has_same_shape_and_dtype(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _require_stage_parameters(
    inner: Any,
    main: Mapping[Tensor, Tensor],
    parameters: Mapping[int, Sequence[Tensor]],
    program: str = "",
) -> None:
    """Refuse an optimizer that steps what none of the trained stages has."""
    own = {p for of_stage in parameters.values() for p in of_stage if p.requires_grad}
    own.update([main[p] for p in own if p in main])
    copied = {copy: p for p, copy in main.items()}
    for group in inner.param_groups:
        for p in group["params"]:
            if copied.get(p, p).requires_grad and p not in own:
                raise make_offload_error(
                    f"{type(inner).__name__} steps a parameter of {list(p.shape)} of none of this "
                    "rank's trained stages",
                    f"an optimizer of its own for that, or {ON_DEVICE_HINT}",
                    program,
                )


def require_stagewise_steps(
    program: Program, parameters: Mapping[int, Sequence[Tensor]], optimizer: OptimizerLike | None
) -> None:
    """Refuse an optimizer that cannot step one stage after the other to the same bits, or whose
    state nobody knows; `parameters` are those of each trained stage."""

    refuse = partial(make_offload_error, program=program.name)
    trained = {p for own in parameters.values() for p in own if p.requires_grad}
    if optimizer is None:
        if trained and program.has_backward:
            raise refuse(
                "this rank has no optimizer: who steps by hand keeps its state himself",
                "optimizer=..., or compile(..., optimizer_placement='device')",
            )
        return
    inner, device = unwrap_optimizer(optimizer), ON_DEVICE_HINT
    name = type(inner).__name__
    if isinstance(optimizer, MainOptimizer) and type(optimizer) is not MainOptimizer:
        raise refuse(f"{type(optimizer).__name__} may step more than its copies", device)
    if not isinstance(inner, torch.optim.Optimizer):
        raise refuse(f"{name} is no torch.optim.Optimizer: what it keeps is not known", device)
    if not getattr(
        inner, "elementwise", is_torch_optimizer(inner) and name in _PER_PARAMETER_OPTIMIZERS
    ):
        raise refuse(
            f"{name} steps all parameters as one: it cannot step one stage after the other"
            if is_torch_optimizer(inner)
            else f"it is not known whether {name} steps each number by itself",
            device
            if is_torch_optimizer(inner)
            else f"{name}.elementwise = True, if it does; or {device}",
        )
    if has_step_hooks(inner):
        raise refuse(f"{name} has hooks on its step, which would run for each stage", device)
    if program.optimizer_placement == "cpu_step" and any(
        group.get("capturable") for group in inner.param_groups
    ):
        raise refuse(f"{name} is capturable, which is for what a GPU steps", "capturable=False")
    main: dict[Tensor, Tensor] = {}
    if isinstance(optimizer, MainOptimizer):
        main = dict(zip(optimizer.parameters, optimizer.main_parameters, strict=True))
    _require_stage_parameters(inner, main, parameters, program.name)
