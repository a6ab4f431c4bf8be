"""Run the optimizer step of each stage on the host, on a separate lane.

During the step of a stage, host parameters replace the stage's parameters in the optimizer. With
a MainOptimizer the host parameters receive the rounded main parameters. With other optimizers,
`offload_gradient` copies the parameters to the host parameters in the first update of a step. The
optimizer state of each parameter always stays on the host, in the same objects.

The steps run on the host lane, while the device computes.
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
from schedir.runtime.model_checks.step_isolation import ON_DEVICE_HINT, make_offload_error
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.host_optimizer_state import (
    HostOptimizerState,
    has_same_shape_and_dtype,
)
from schedir.runtime.offload.snapshot_copies import copy_pairs
from schedir.runtime.parameters.gradient_buffers import scale_buffer
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike, is_torch_optimizer
from schedir.runtime.parameters.parameter_copies import make_parameter_like
from schedir.runtime.stage_state import StageState


class _GradCheck(NamedTuple):
    """The result of an update's gradient check, which the host may read when `job` has ended.

    Attributes:
        finite: True if all gradients are finite, 0-dim bool.
        grad_factor: The factor of gradient clipping, 0-dim. None without clipping.
        job: The copy to the host, or None on a CPU.
    """

    finite: Tensor
    grad_factor: Tensor | None
    job: LaneJob | None


class _HostParameters:
    """The parameters and gradient buffers of a stage in host memory.

    The optimizer does not step a parameter without a gradient. Such a parameter has no copy on the
    host.

    Attributes:
        host_copies: Parameter on the device -> parameter on the host.
        flat_pairs: Pairs of a gradient buffer on the host and the same buffer on the device.
        device_weights: Parameter on the device -> the tensor on the device that has its values.
            With ZeRO, this tensor is the replica's shard.
    """

    def __init__(
        self,
        stage: StageState,
        parameters: Sequence[nn.Parameter],
        all_host_copies: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        pinned = (
            stage.gradients.reduced_flat and stage.gradients.reduced_flat[0].device.type == "cuda"
        )
        gradients = stage.gradients
        self.flat_pairs = [
            (_allocate_on_host(buffer, bool(pinned)), buffer) for buffer in gradients.reduced_flat
        ]
        views = dict(gradients.bound_views)
        if stage.sharded_parameters.is_sharded:
            views = {p: view for p, (view,) in gradients.shard_views.items()}
        self.stage = stage
        self.parameters = [p for p in parameters if p in views]
        self.refresh_weights()
        self.host_copies: dict[nn.Parameter, nn.Parameter] = {}
        self.host_memory: dict[nn.Parameter, Tensor] = {}  # keys as in `host_copies`
        self.host_gradients: dict[nn.Parameter, Tensor] = {}  # key: parameter on the host
        for p, weights in self.device_weights.items():
            if p not in all_host_copies or not has_same_shape_and_dtype(
                all_host_copies[p], weights
            ):
                all_host_copies[p] = make_parameter_like(
                    p, _allocate_on_host(weights, bool(pinned))
                )
            self.host_copies[p] = host_copy = all_host_copies[p]
            self.host_memory[p], view = host_copy.detach(), views[p]
            if view.numel():
                (flat,) = (
                    host for host, buffer in self.flat_pairs
                    if buffer.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                    and buffer.dtype == view.dtype
                    and 0 <= view.storage_offset() - buffer.storage_offset() < buffer.numel()
                )  # fmt: skip
                (buffer,) = (buffer for host, buffer in self.flat_pairs if host is flat)
                offset = view.storage_offset() - buffer.storage_offset()
                self.host_gradients[host_copy] = flat.as_strided(view.shape, view.stride(), offset)
            elif not stage.sharded_parameters.is_sharded:  # an empty shard has no gradient
                self.host_gradients[host_copy] = _allocate_on_host(view, pinned=False)
        self.was_stepped = True  # if False, weights are not copied back

    def refresh_weights(self) -> None:
        """Find the weights on the device again: users may have set `data` of a parameter."""
        shards = self.stage.parameter_shards
        self.device_weights = {p: shards.get(p, p.detach()) for p in self.parameters}

    def count_bytes(self) -> int:
        """Return the bytes of weights and gradients that a step reads."""
        return sum(t.nbytes for t in self.list_host_tensors())

    def list_host_tensors(self) -> list[Tensor]:
        """Return the tensors in host memory."""
        return [*(host for host, _ in self.flat_pairs), *self.host_memory.values()]

    def bind_gradients(self) -> None:
        """Set the `grad` of host parameters again, because a step may have replaced it."""
        for host_copy, gradient in self.host_gradients.items():
            host_copy.grad = gradient

    def find_moved_parameter(self) -> nn.Parameter | None:
        """Return a parameter whose `data` on the device moved since `refresh_weights`, or None."""
        if self.stage.sharded_parameters.is_sharded:  # ShardedParameters checks its weights.
            return None
        for p, weights in self.device_weights.items():
            if p.data_ptr() != weights.data_ptr():
                return p
        return None

    def find_replaced_parameter(self) -> nn.Parameter | None:
        """Return a parameter whose `data` on the host moved to other memory, or None."""
        for p, host_copy in self.host_copies.items():
            expected, actual = self.host_memory[p], host_copy.detach()
            if not (
                has_same_shape_and_dtype(expected, actual) and expected.stride() == actual.stride()
            ):
                return p
            if expected.data_ptr() != actual.data_ptr():
                return p
        return None


class CpuOptimizer(HostOptimizerState):
    """The optimizer state of a rank on the host, and its optimizer steps on the host.

    Args:
        parameters: The parameters of each trained stage.
        optimizer: The optimizer.
        lanes: The lanes of the rank.
        device: The device of the rank.
        names: The names of the parameters, for errors.
        stages: All stages of the rank.
    """

    replaces_parameters = True

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Tensor]],
        optimizer: OptimizerLike,
        lanes: CopyLanes,
        device: torch.device,
        names: Mapping[Tensor, str],
        stages: Mapping[int, StageState],
    ) -> None:
        self.stages = stages
        self.host_parameters: dict[int, _HostParameters] = {}
        # Parameter on the device -> parameter on the host. The host parameters stay the same
        # objects, because an optimizer may use them as keys of its state.
        self.host_copies: dict[nn.Parameter, nn.Parameter] = {}
        self.grad_check: _GradCheck | None = None
        self.jobs: dict[tuple[Lane, int], LaneJob] = {}  # (lane, stage) -> copy or step
        super().__init__(parameters, optimizer, lanes, device, names)

    def refresh_parameters(self) -> None:
        """See `HostOptimizerState.refresh_parameters`."""
        old_parameters = self.seen_parameters
        super().refresh_parameters()
        if self.seen_parameters is not old_parameters:
            self.host_parameters = {}

    def list_host_memory(self) -> list[Tensor]:
        """See `HostOptimizerState.list_host_memory`."""
        tensors = [
            t
            for host_parameters in self.host_parameters.values()
            for t in host_parameters.list_host_tensors()
        ]
        return [*super().list_host_memory(), *tensors]

    def to_resting_state(self) -> None:
        """See `HostOptimizerState.to_resting_state`.

        The method also allocates the host memory of each stage that has none. For other stages, it
        looks up the weights on the device again, because their memory may have changed.
        """
        super().to_resting_state()
        parameter_of_main = {main: p for p, main in self.main_parameters.items()}
        for s, stage_parameters in self.optimizer_parameters.items():
            if s not in self.host_parameters:
                parameters: Any = [parameter_of_main.get(p, p) for p in stage_parameters]
                self.host_parameters[s] = _HostParameters(
                    self.stages[s], parameters, self.host_copies
                )
            else:
                self.host_parameters[s].refresh_weights()

    # ------------------------------------------------------------ in a step

    def offload_gradient(
        self, stage: int, *, is_first_update: bool, observer: LaneObserver | None = None
    ) -> None:
        """Start to copy the gradients of a stage to the host.

        In the first update of a step the method also copies the parameters, because they may have
        changed since the last step. It does not copy parameters if there are main parameters.

        Args:
            stage: The number of the stage.
            is_first_update: True if this is the first update of the step.
            observer: An object that is notified of the start and the end of the copy.

        Raises:
            ModelError: The `data` of a parameter was set to another tensor in the step.
        """
        host_parameters = self.host_parameters[stage]
        if (p := host_parameters.find_moved_parameter()) is not None:
            raise make_offload_error(
                f"a forward or a backward assigns a new tensor to the data of "
                f"{self.names.get(p, 'a parameter')}: its update would be lost",
                f"write in place with weight.data.copy_(new); or {ON_DEVICE_HINT}",
            )
        pairs: list[tuple[Tensor, Tensor]] = [*host_parameters.flat_pairs]
        if is_first_update and not self.main_parameters:
            pairs += [
                (host_copy.detach(), host_parameters.device_weights[p])
                for p, host_copy in host_parameters.host_copies.items()
            ]
        self.jobs[Lane.D2H, stage] = self._start_copy(Lane.D2H, pairs, observer)

    def set_grad_check(self, finite: Tensor, grad_factor: Tensor | None) -> None:
        """Set the result of the gradient check, for the optimizer steps of all stages in an update.

        Args:
            finite: True if the gradients are finite, 0-dim bool on the device.
            grad_factor: The factor of gradient clipping, 0-dim on the device; None without
                clipping.
        """
        if self.device.type == "cpu":
            self.grad_check = _GradCheck(finite, grad_factor, None)
            return
        pairs = [(_allocate_on_host(t, True), t) for t in (finite, grad_factor) if t is not None]
        copies = [copy for copy, _ in pairs]
        job = self._start_copy(Lane.D2H, pairs, None)
        self.grad_check = _GradCheck(copies[0], copies[1] if grad_factor is not None else None, job)

    def wait_for_gradients(self) -> None:
        """Make the computation wait for all copies of gradients before it changes the gradients."""
        for (lane, _), job in self.jobs.items():
            if lane is Lane.D2H:
                job.wait()

    def begin_step(self, stage: int, make_error: Any, observer: LaneObserver | None = None) -> None:
        """Start the optimizer step of a stage on the host lane.

        The step waits until the gradients of the stage are on the host.

        Args:
            stage: The number of the stage.
            make_error: A function that converts an error to an error that names the instruction.
            observer: An object that is notified of the start and the end of the step.
        """
        assert self.grad_check is not None, "the checker proves that there is a norm"
        grad_check = self.grad_check
        host_parameters = self.host_parameters[stage]
        thread_count = torch.get_num_threads()

        def run() -> None:
            # The lane's thread does not inherit this setting of the main thread.
            if torch.get_num_threads() != thread_count:
                torch.set_num_threads(thread_count)
            grad_factor = grad_check.grad_factor
            try:
                for flat, _ in host_parameters.flat_pairs if grad_factor is not None else ():
                    scale_buffer(flat, 1.0 if grad_factor is None else grad_factor)
                self.step(stage, grad_check.finite)
            except Exception as error:
                raise make_error(error) from error
            for flat, _ in host_parameters.flat_pairs if self.device.type == "cpu" else ():
                flat.fill_(torch.nan)

        after_jobs = [
            self.jobs[Lane.D2H, stage],
            *([grad_check.job] if grad_check.job is not None else []),
        ]
        self.jobs[Lane.HOST, stage] = self.lanes.start(
            Lane.HOST, run, host_parameters.count_bytes(), after_jobs, observer=observer
        )

    def step(self, stage: int, finite: Tensor) -> None:
        """See `HostOptimizerState.step`. The optimizer step runs on the host lane.

        Raises:
            ModelError: As in the base class. Also if the optimizer replaces the memory of a
                parameter, because the copy to the device reads the old memory.
        """
        host_parameters = self.host_parameters[stage]
        host_parameters.bind_gradients()
        old_versions = [host_copy._version for host_copy in host_parameters.host_copies.values()]
        with nullcontext() if is_torch_optimizer(self.inner) else _RandomDrawGuard(self.inner):
            super().step(stage, finite)
        if (p := host_parameters.find_replaced_parameter()) is not None:
            raise make_offload_error(
                f"the step of {type(self.inner).__name__} assigns a new tensor to the data of "
                f"{self.names.get(p, 'a parameter')}",
                f"write in place with p.copy_(new) or p.data.copy_(new); or {ON_DEVICE_HINT}",
            )
        for main in self.optimizer_parameters[stage] if self.main_parameters else ():
            main.grad = None
        host_parameters.was_stepped = not self.main_parameters or old_versions != [
            host_copy._version for host_copy in host_parameters.host_copies.values()
        ]
        # A state tensor that this step created is in host memory already. Only record its memory.
        for t in self.list_state_tensors(stage):
            self.host_memory.setdefault(t, t.detach())

    def reload_weights(
        self, stage: int, *, is_last_update: bool, observer: LaneObserver | None = None
    ) -> None:
        """Start to copy the weights of a stage back to the device, after the stage's step.

        On a CPU, the host copies are overwritten with NaN after the last update, to find wrong
        reads.

        Args:
            stage: The number of the stage.
            is_last_update: True if this is the last update of the step.
            observer: An object that is notified of the start and the end of the copy.
        """
        host_parameters = self.host_parameters[stage]
        pairs = [
            (host_parameters.device_weights[p], host_copy.detach())
            for p, host_copy in host_parameters.host_copies.items()
        ]

        def run() -> None:
            if host_parameters.was_stepped:
                copy_pairs(pairs)
            for _, host_weights in pairs if is_last_update and self.device.type == "cpu" else ():
                host_weights.fill_(torch.nan)

        nbytes = sum(target.nbytes for target, _ in pairs)
        after_jobs = [self.jobs[Lane.HOST, stage]]
        self.jobs[Lane.H2D, stage] = self.lanes.start(
            Lane.H2D, run, nbytes, after_jobs, observer=observer
        )

    def finish(self, *, is_last_update: bool = True) -> None:
        """Wait until all weights are on the device.

        After the last update the host waits. After earlier updates only the computation waits.

        Args:
            is_last_update: True if this is the last update of the step.
        """
        for lane, s in [*self.jobs]:
            if lane is Lane.H2D:
                job = self.jobs.pop((lane, s))
                job.finish() if is_last_update else job.wait()
        if is_last_update:
            super().finish()

    def fail(self) -> None:
        """See `HostOptimizerState.fail`."""
        for job in self.jobs.values():
            with suppress(Exception):  # the first error is already being raised
                job.finish()
        self.jobs.clear()
        super().fail()

    @contextmanager
    def _restrict_to_stage(self, stage: int) -> Iterator[None]:
        """See `HostOptimizerState._restrict_to_stage`. The optimizer gets host parameters."""
        host_copies = self.host_parameters[stage].host_copies
        optimizer = self.optimizer
        inner = self.inner
        with super()._restrict_to_stage(stage):
            if self.main_parameters:
                main_optimizer: Any = optimizer
                main_optimizer.parameters = [
                    host_copies.get(p, p) for p in main_optimizer.parameters
                ]
                yield
                return
            for group in inner.param_groups:
                group["params"] = [host_copies.get(p, p) for p in group["params"]]
            state, stage_parameters = inner.state, {*self.optimizer_parameters[stage]}
            # Each stage also gets the state that belongs to no parameter.
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


@torch.no_grad()
def _allocate_on_host(t: Tensor, pinned: bool) -> Tensor:
    """Return new host memory for a tensor, with the same strides."""
    return torch.empty_like(t, device="cpu", pin_memory=pinned, requires_grad=False)
