"""Run the optimizer step of each stage on the host, on its own lane.

An optimizer steps the parameters that it was made with.  While the host steps a stage it is given
others in their place, which lie on the host: those of a MainOptimizer are what its copies are
rounded into, and those of any other are copies of the parameters, which go along with gradients.
What it keeps of each parameter lies on the host all the time, and is the same object in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Lane
from schedir.runtime.model_checks.step_isolation import ON_DEVICE, refusal
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.host_optimizer_state import HostOptimizerState, alike
from schedir.runtime.offload.snapshot_copies import copy
from schedir.runtime.parameters.gradient_buffers import scale
from schedir.runtime.parameters.mixed_precision import OptimizerLike, is_torchs
from schedir.runtime.parameters.parameter_copies import like
from schedir.runtime.stage_state import StageState

Pairs = Sequence[tuple[Tensor, Tensor]]  # what is copied to, and what is copied


class _GradCheck(NamedTuple):
    """Of an update, on the host: whether it is finite, and what gradients are multiplied by; when
    `job` has ended."""

    finite: Tensor
    shrink: Tensor | None
    job: LaneJob | None


class _HostParameters:
    """What the host has of a stage: `place` are the parameters in the place of the device's, and
    `flats` the buffers of gradients, each with the device's; `weights` are what the device has.
    What takes no gradient is not stepped, and has no place."""

    def __init__(
        self,
        stage: StageState,
        parameters: Sequence[nn.Parameter],
        replica: int,
        placed: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        pinned = stage.gradients.kept and stage.gradients.kept[0].device.type == "cuda"
        gradients = stage.gradients
        self.flats = [(_on_host(kept, bool(pinned)), kept) for kept in gradients.kept]
        views = dict(gradients.bound)
        if stage.weights is not None:
            views = gradients.pieces[replica]
        self.stage, self.parameters = stage, [p for p in parameters if p in views]
        self.look()
        self.place: dict[nn.Parameter, nn.Parameter] = {}
        self.memory: dict[nn.Parameter, Tensor] = {}  # of each of `place`
        self.gradients: dict[nn.Parameter, Tensor] = {}  # of each of `place` that has one
        for p, weights in self.weights.items():
            if p not in placed or not alike(placed[p], weights):
                placed[p] = like(p, _on_host(weights, bool(pinned)))
            self.place[p] = one = placed[p]
            self.memory[p], view = one.detach(), views[p]
            if view.numel():
                (flat,) = (
                    host for host, kept in self.flats
                    if kept.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                    and kept.dtype == view.dtype
                    and 0 <= view.storage_offset() - kept.storage_offset() < kept.numel()
                )  # fmt: skip
                (kept,) = (kept for host, kept in self.flats if host is flat)
                at = view.storage_offset() - kept.storage_offset()
                self.gradients[one] = flat.as_strided(view.shape, view.stride(), at)
            elif stage.weights is None:  # of pieces, those that are empty have none
                self.gradients[one] = _on_host(view, pinned=False)
        self.stepped = True  # else there is nothing new to copy back

    def look(self) -> None:
        """See where weights are on the device: somebody may have set their data."""
        weights = self.stage.weights
        self.weights = {
            p: p.detach() if weights is None else weights.pieces[p] for p in self.parameters
        }

    def nbytes(self) -> int:
        """Bytes that a step reads of weights and gradients."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """The memory on the host."""
        return [*(host for host, _ in self.flats), *self.memory.values()]

    def bind(self) -> None:
        """Let each `grad` be that on the host again; a step may have put another in its place."""
        for one, gradient in self.gradients.items():
            one.grad = gradient

    def moved(self) -> nn.Parameter | None:
        """Return a parameter whose `data` on the device has moved since `look`, or None."""
        if self.stage.weights is not None:  # with ZeRO, `Parts` checks this
            return None
        for p, was in self.weights.items():
            if p.data_ptr() != was.data_ptr():
                return p
        return None

    def replaced(self) -> nn.Parameter | None:
        """Return a parameter whose `data` on the host has moved to other memory, or None."""
        for p, one in self.place.items():
            was, now = self.memory[p], one.detach()
            if not (alike(was, now) and was.stride() == now.stride()):
                return p
            if was.data_ptr() != now.data_ptr():
                return p
        return None


class CpuOptimizer(HostOptimizerState):
    """The state of an optimizer on the host, which steps there the stages of a rank.

    `stages` are all of the rank.
    """

    replaces = True

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        lanes: CopyLanes,
        device: torch.device,
        names: Mapping[Tensor, str],
        stages: Mapping[int, StageState],
        replica: int,
    ) -> None:
        self.stages, self.replica = stages, replica
        self.parts: dict[int, _HostParameters] = {}
        # The parameters in the place of the device's: an optimizer may keep something by these.
        self.placed: dict[nn.Parameter, nn.Parameter] = {}
        self.judged: _GradCheck | None = None
        self.jobs: dict[tuple[Lane, int], LaneJob] = {}  # by stage: of gradients, steps and weights
        super().__init__(parameters, optimizer, lanes, device, names)

    def look(self) -> None:
        """As of HostOptimizerState."""
        before = self.seen
        super().look()
        if self.seen is not before:
            self.parts = {}

    def away(self) -> list[Tensor]:
        """As of HostOptimizerState."""
        parts = [t for part in self.parts.values() for t in part.tensors()]
        return [*super().away(), *parts]

    def rest(self) -> None:
        """As of HostOptimizerState; and make what the host has of each stage, once, and see where
        the device's is."""
        super().rest()
        whose = {main: p for p, main in self.main.items()}
        for s, own in self.own.items():
            if s not in self.parts:
                parameters: Any = [whose.get(p, p) for p in own]
                self.parts[s] = _HostParameters(
                    self.stages[s], parameters, self.replica, self.placed
                )
            else:
                self.parts[s].look()

    # ------------------------------------------------------------ in a step

    def offload(self, stage: int, *, first: bool, marks: LaneObserver | None = None) -> None:
        """Begin to copy a stage's gradient; in the first update with parameters that the optimizer
        itself has, of which somebody may have changed some since the last step."""
        part = self.parts[stage]
        if (p := part.moved()) is not None:
            raise refusal(
                f"a forward or a backward sets the data of {self.names.get(p, 'a parameter')} to "
                "another tensor: the optimizer's update of it would be lost",
                f"weight.data.copy_(new), which writes in place; or {ON_DEVICE}",
            )
        pairs: list[tuple[Tensor, Tensor]] = [*part.flats]
        if first and not self.main:
            pairs += [(one.detach(), part.weights[p]) for p, one in part.place.items()]
        self.jobs[Lane.D2H, stage] = self._copy(Lane.D2H, pairs, marks)

    def judge(self, finite: Tensor, shrink: Tensor | None) -> None:
        """Take what all steps of an update are made by: 0-dim tensors of the device."""
        if self.device.type == "cpu":
            self.judged = _GradCheck(finite, shrink, None)
            return
        pairs = [(_on_host(t, True), t) for t in (finite, shrink) if t is not None]
        host = [to for to, _ in pairs]
        job = self._copy(Lane.D2H, pairs, None)
        self.judged = _GradCheck(host[0], host[1] if shrink is not None else None, job)

    def arrived(self) -> None:
        """Let what is computed come after all copies of gradients: they may change now."""
        for (lane, _), job in self.jobs.items():
            if lane is Lane.D2H:
                job.wait()

    def begin(self, stage: int, fails: Any, marks: LaneObserver | None = None) -> None:
        """Begin to step a stage on the host, behind its gradient; `fails` makes of an error that of
        the instruction."""
        assert self.judged is not None, "the checker proves that there is a norm"
        judged, part, threads = self.judged, self.parts[stage], torch.get_num_threads()

        def run() -> None:
            if torch.get_num_threads() != threads:  # of the lane's own thread
                torch.set_num_threads(threads)
            shrink = judged.shrink
            try:
                for flat, _ in part.flats if shrink is not None else ():
                    scale(flat, 1.0 if shrink is None else shrink)
                self.step(stage, judged.finite)
            except Exception as error:
                raise fails(error) from error
            for flat, _ in part.flats if self.device.type == "cpu" else ():
                flat.fill_(torch.nan)

        after = [self.jobs[Lane.D2H, stage], *([judged.job] if judged.job is not None else [])]
        self.jobs[Lane.HOST, stage] = self.lanes.start(
            Lane.HOST, run, part.nbytes(), after, marks=marks
        )

    def step(self, stage: int, finite: Tensor) -> None:
        """As of HostOptimizerState, on the host.  Raises ModelError also for an optimizer that puts
        other memory in the place of a parameter's: it is from the memory that it was given that
        weights go back to the device."""
        part = self.parts[stage]
        part.bind()
        before = [one._version for one in part.place.values()]
        with nullcontext() if is_torchs(self.inner) else _RandomDrawGuard(self.inner):
            super().step(stage, finite)
        if (p := part.replaced()) is not None:
            raise refusal(
                f"{type(self.inner).__name__} sets the data of {self.names.get(p, 'a parameter')} "
                "to another tensor in its step",
                f"p.copy_(new) or p.data.copy_(new), which write in place; or {ON_DEVICE}",
            )
        for main in self.own[stage] if self.main else ():
            main.grad = None
        part.stepped = not self.main or before != [one._version for one in part.place.values()]
        for t in self.tensors(stage):  # what it has made lies where it is
            self.places.setdefault(t, t.detach())

    def reload(self, stage: int, *, last: bool, marks: LaneObserver | None = None) -> None:
        """Begin to copy a stage's weights back, when they have been stepped; behind the last update
        nobody finds on the host what was."""
        part = self.parts[stage]
        pairs = [(part.weights[p], one.detach()) for p, one in part.place.items()]

        def run() -> None:
            if part.stepped:
                copy(pairs)
            for _, one in pairs if last and self.device.type == "cpu" else ():
                one.fill_(torch.nan)

        nbytes = sum(to.nbytes for to, _ in pairs)
        after = [self.jobs[Lane.HOST, stage]]
        self.jobs[Lane.H2D, stage] = self.lanes.start(Lane.H2D, run, nbytes, after, marks=marks)

    def finish(self, *, last: bool = True) -> None:
        """Wait until all weights are back; what is computed waits, and the host behind the last
        update alone."""
        for lane, s in [*self.jobs]:
            if lane is Lane.H2D:
                job = self.jobs.pop((lane, s))
                job.finish() if last else job.wait()
        if last:
            super().finish()

    def fail(self) -> None:
        """As of HostOptimizerState."""
        for job in self.jobs.values():
            with suppress(Exception):  # an earlier one is told
                job.finish()
        self.jobs.clear()
        super().fail()

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """As of HostOptimizerState, with parameters on the host in the place of the device's."""
        place, optimizer, inner = self.parts[stage].place, self.optimizer, self.inner
        with super()._only(stage):
            if self.main:
                both: Any = optimizer
                both.parameters = [place.get(p, p) for p in both.parameters]
                yield
                return
            for group in inner.param_groups:
                group["params"] = [place.get(p, p) for p in group["params"]]
            state, own = inner.state, {*self.own[stage]}
            # The step of every stage sees the state that belongs to no parameter.
            keys = [key for key in state if not isinstance(key, Tensor) or key in own]
            inner.state = defaultdict(dict)
            inner.state.update({place.get(key, key): state[key] for key in keys})
            try:
                yield
            finally:
                made, inner.state = inner.state, state
                whose = {one: p for p, one in place.items()}
                for key in keys:
                    if place.get(key, key) not in made:
                        del state[key]
                state.update({whose.get(key, key): kept for key, kept in made.items()})


class _RandomDrawGuard(TorchDispatchMode):
    """Within this an optimizer that draws random numbers is refused: what computes draws beside."""

    def __init__(self, optimizer: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = type(optimizer).__name__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModelError(
                f"{self.name} draws random numbers in its step, which the host makes beside what "
                "is computed",
                hint="compile(..., optimizer_placement='host')",
            )
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _on_host(t: Tensor, pinned: bool) -> Tensor:
    """Memory of the host for a tensor, in the same order."""
    return torch.empty_like(t, device="cpu", pin_memory=pinned, requires_grad=False)
