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
    ON_DEVICE,
    StepIsolation,
    expect_stepped_apart,
    refusal,
)
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.snapshot_copies import copy
from schedir.runtime.parameters.mixed_precision import (
    MainOptimizer,
    OptimizerLike,
    has_hooks,
    innermost,
    is_torchs,
    step_if,
)

# Of torch's own those that step each parameter by itself; LBFGS takes all for one.
_BY_PARAMETER: Final = (
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

    replaces = False  # whether a step gets other parameters in place of those of the device

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
        self.optimizer, self.inner = optimizer, innermost(optimizer)
        self.isolation = StepIsolation(self.inner, replaces=self.replaces)
        self.main: dict[Tensor, Tensor] = {}
        if isinstance(optimizer, MainOptimizer):
            self.main = dict(zip(optimizer.parameters, optimizer.main, strict=True))
        self.own: dict[int, list[Tensor]] = {}  # by stage, what the optimizer has of it
        self.seen: list[Tensor] = []  # what it had when that was looked at
        self.stepped: list[Tensor] = []  # the parameters for these
        self.addresses: list[int] = []  # of the parameters when their memory was looked at
        self.look()
        self._expect_stepped_apart()
        self.places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # memory on the host
        self.loading: dict[int, StateCopy] = {}
        self.storing: dict[int, StateCopy] = {}
        self.loaded: set[int] = set()  # memory that a load has made, by address

    def look(self) -> None:
        """See what the optimizer has of each stage: groups may have come since the last step.

        Raises ModelError where that is of none of them.
        """
        has = [p for group in self.inner.param_groups for p in group["params"]]
        if [*map(id, has)] == [*map(id, self.seen)]:
            return
        _require_own(self.inner, self.main, self.parameters)
        left = set(has)
        for s in sorted(self.parameters):
            found = dict.fromkeys(self.main.get(p, p) for p in self.parameters[s])
            self.own[s] = [p for p in found if p in left]
            left.difference_update(self.own[s])
        self._expect_no_references()
        whose = {main: p for p, main in self.main.items()}
        parameters = (whose.get(p, p) for own in self.own.values() for p in own)
        self.stepped = [p for p in parameters if p.requires_grad]
        self.seen = has

    def _expect_no_references(self) -> None:
        """Verify that the optimizer steps only the parameters in its groups."""
        self.isolation.expect_no_references(stages=sum(map(bool, self.own.values())))

    def _expect_stepped_apart(self) -> None:
        """Raise ModelError for two stepped parameters in one memory; a `data` may have been set."""
        addresses = [p.data_ptr() for p in self.stepped]
        if addresses != self.addresses:
            expect_stepped_apart({p: self.names.get(p, "a parameter") for p in self.stepped})
            self.addresses = addresses

    def away(self) -> list[Tensor]:
        """The memory on the host."""
        return [*self.places.values()]

    def tensors(self, stage: int) -> list[Tensor]:
        """What is kept of a stage, where it is on the device or can go there; a count that torch
        keeps on the host while parameters are on a GPU stays there."""
        own = self.own.get(stage, ())
        mains = [p for p in own if self.main]
        leaves = tree_leaves([self.inner.state.get(p, {}) for p in own])
        every = dict.fromkeys([*mains, *(x for x in leaves if isinstance(x, Tensor))])
        return [t for t in every if t in self.places or t.device.type == self.device.type]

    def is_away(self, t: Tensor) -> bool:
        """Whether the memory of a tensor is that on the host."""
        place = self.places.get(t)
        return place is not None and place.data_ptr() == t.data_ptr() and place.device == t.device

    # ------------------------------------------------------------ in a step

    def rest(self) -> None:
        """Let all that is kept be on the host: what was loaded from elsewhere since the last step,
        or made with the optimizer.  Raises as `look`."""
        self.look()
        self._expect_stepped_apart()
        for stage in self.own:
            if not all(map(self.is_away, self.tensors(stage))):
                self.put(stage)
        self.finish()

    def put(self, stage: int) -> None:
        """Take what is kept of a stage to where it is between steps."""
        self.store(stage)

    def load(self, stage: int, marks: LaneObserver | None = None) -> None:
        """Begin to copy what is kept of a stage to the device."""
        moving = []
        for t in self.tensors(stage):
            if self.is_away(t):
                moving.append((t, self.places[t], like(t, self.device)))
        self.loaded.update(here.data_ptr() for _, _, here in moving)
        pairs = [(here, place) for _, place, here in moving]
        self.loading[stage] = StateCopy(self._copy(Lane.H2D, pairs, marks), moving)

    def _copy(
        self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], marks: LaneObserver | None
    ) -> LaneJob:
        """Copy to the first of each pair on a lane."""
        nbytes = sum(to.nbytes for to, _ in pairs)
        return self.lanes.start(lane, partial(copy, pairs), nbytes, marks=marks)

    def arrive(self, stage: int) -> None:
        """Wait until it is there."""
        job, moving = self.loading.pop(stage)
        job.wait()
        for t, _, here in moving:
            t.data = here

    def step(self, stage: int, finite: Tensor) -> None:
        """Let the optimizer step the parameters of a stage, and no others, if `finite` is true."""
        if has_hooks(self.inner):
            raise ModelError(
                f"{type(self.inner).__name__} has hooks on its step, which would run for each "
                "stage: the optimizer's states are not on the device",
                hint="hooks of the training loop, or optimizer_placement='device'",
            )
        if self.own.get(stage):
            with self._only(stage), self.isolation.watch(stage):
                step_if(finite, self.optimizer)
            self._expect_no_references()

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """Within this the optimizer has the parameters of one stage."""
        own, groups = set(self.own[stage]), self.inner.param_groups
        params = [group["params"] for group in groups]
        both: list[Any] = []
        if isinstance(self.optimizer, MainOptimizer):
            both = [self.optimizer.parameters, self.optimizer.main]
            pairs = [pair for pair in zip(*both, strict=True) if pair[1] in own]
            self.optimizer.parameters, self.optimizer.main = map(list, zip(*pairs, strict=True))
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
                self.optimizer.parameters, self.optimizer.main = both

    def store(self, stage: int, marks: LaneObserver | None = None) -> None:
        """Begin to copy what is kept of a stage back; nobody reads it until it is loaded again, or
        the step has ended."""
        self.expect_own_memory(stage)
        moving = []
        for t in self.tensors(stage):
            if self.is_away(t):
                continue
            if t not in self.places or not alike(self.places[t], t):
                self.places[t] = like(t, torch.device("cpu"), pinned=self.device.type == "cuda")
            moving.append((t, self.places[t], t.data))
        pairs = [(place, here) for _, place, here in moving]
        job = self._copy(Lane.D2H, pairs, marks)
        for t, place, _ in moving:
            t.data = place
        self.storing[stage] = StateCopy(job, moving)

    def expect_own_memory(self, stage: int) -> None:
        """Verify that a stage's optimizer state has memory of its own, before it is moved."""
        self.isolation.expect_own_memory(self.tensors(stage), self.stepped, stage)

    def leave(self, stage: int) -> None:
        """Wait on the host until a stage's has been stored, and let go of its memory on the device;
        where that is the host's, too, nobody finds there what was."""
        if stage not in self.storing:
            return
        job, moving = self.storing[stage]
        job.finish()
        del self.storing[stage]
        for _, _, here in moving:
            if here.data_ptr() in self.loaded and self.device.type == "cpu":
                here.fill_(torch.nan if here.is_floating_point() or here.is_complex() else -1)
                here.untyped_storage().resize_(0)
            self.loaded.discard(here.data_ptr())

    def finish(self, *, last: bool = True) -> None:
        """Wait until all is on the host, and the host may read it: behind the last update."""
        for stage in [*self.storing]:
            self.leave(stage)
        self.loaded.clear()  # others may get memory at these addresses now

    def fail(self) -> None:
        """After an error: nothing is being copied any more."""
        for moving in (*self.loading.values(), *self.storing.values()):
            with suppress(Exception):  # an earlier one is told
                moving.job.finish()
        self.loading.clear()
        self.storing.clear()
        self.loaded.clear()


@torch.no_grad()
def like(t: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Memory for a tensor elsewhere, in the same order."""
    return torch.empty_like(t, device=device, pin_memory=pinned, requires_grad=False)


def alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _require_own(
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
                raise refusal(
                    f"{type(inner).__name__} steps a parameter of {list(p.shape)} of none of this "
                    "rank's trained stages",
                    f"an optimizer of its own for that, or {ON_DEVICE}",
                    program,
                )


def require_by_stage(
    program: Program, parameters: Mapping[int, Sequence[Tensor]], optimizer: OptimizerLike | None
) -> None:
    """Refuse an optimizer that cannot step one stage after the other to the same bits, or whose
    state nobody knows; `parameters` are those of each trained stage."""

    refuse = partial(refusal, program=program.name)
    trained = {p for own in parameters.values() for p in own if p.requires_grad}
    if optimizer is None:
        if trained and program.trains:
            raise refuse(
                "this rank has no optimizer: who steps by hand keeps its state himself",
                "optimizer=..., or compile(..., optimizer_placement='device')",
            )
        return
    inner, device = innermost(optimizer), ON_DEVICE
    name = type(inner).__name__
    if isinstance(optimizer, MainOptimizer) and type(optimizer) is not MainOptimizer:
        raise refuse(f"{type(optimizer).__name__} may step more than its copies", device)
    if not isinstance(inner, torch.optim.Optimizer):
        raise refuse(f"{name} is no torch.optim.Optimizer: what it keeps is not known", device)
    if not getattr(inner, "elementwise", is_torchs(inner) and name in _BY_PARAMETER):
        raise refuse(
            f"{name} steps all parameters as one: it cannot step one stage after the other"
            if is_torchs(inner)
            else f"it is not known whether {name} steps each number by itself",
            device if is_torchs(inner) else f"{name}.elementwise = True, if it does; or {device}",
        )
    if has_hooks(inner):
        raise refuse(f"{name} has hooks on its step, which would run for each stage", device)
    if program.optimizer_placement == "cpu_step" and any(
        group.get("capturable") for group in inner.param_groups
    ):
        raise refuse(f"{name} is capturable, which is for what a GPU steps", "capturable=False")
    main: dict[Tensor, Tensor] = {}
    if isinstance(optimizer, MainOptimizer):
        main = dict(zip(optimizer.parameters, optimizer.main, strict=True))
    _require_own(inner, main, parameters, program.name)
