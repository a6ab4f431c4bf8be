"""OptimizerPlacement: move a rank's optimizer states between memory tiers, and step its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.program_attributes import OPTIMIZER_TIERS
from schedir.runtime.model_checks.step_isolation import ON_DEVICE_HINT, make_offload_error
from schedir.runtime.offload.activation_offloader import POISON_BYTE
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob, LaneObserver
from schedir.runtime.offload.host_parameters import (
    GradCheck,
    HostParameters,
    allocate_like,
    has_same_shape_and_dtype,
)
from schedir.runtime.offload.optimizer_state_file import HostBuffer, StateFile
from schedir.runtime.offload.snapshot_copies import copy_pairs
from schedir.runtime.offload.stagewise_optimizer import StagewiseOptimizer
from schedir.runtime.parameters.gradient_buffers import scale_buffer
from schedir.runtime.rank_resources import RankResources, RankService
from schedir.runtime.services.update_checks import RankOptimizer
from schedir.runtime.step_inputs import StepInputs

_HOST: Final = torch.device("cpu")
# Starts a function that reads or writes a host buffer, after the jobs of the buffer.
StartDiskJob = Callable[[Callable[[], None], HostBuffer], LaneJob]


class StateCopy(NamedTuple):
    """A running copy of state tensors.

    Attributes:
        job: The copy.
        tensors: For each tensor: the tensor, its memory between steps, and its memory on the
            device.
    """

    job: LaneJob
    tensors: Sequence[tuple[Tensor, Tensor, Tensor]]


class OptimizerPlacement(RankService):
    """The optimizer states of a rank, divided into one part per stage.

    The state tensors of the optimizer and the main parameters of a MainOptimizer stay the same
    objects. Only their `data` moves between memory tiers. Between steps the data is in the tier
    `tier`, where for example a checkpoint reads it. The optimizer steps stage by stage:

    - On the device: `reload` copies the state of a stage to the device, `step` updates the stage,
      and `offload` copies the state back. If the states are on the disk, `read_from_disk` comes
      before, and `write_to_disk` comes after these calls.
    - On the host: the states do not move. `offload_gradients` copies gradients to the host,
      `start_host_step` updates host parameters on the host lane, and `reload_weights` copies
      them to the device.

    Args:
        resources: The resources of the rank.

    Attributes:
        tier: The tier of the states between steps: "host" or "disk".
        stepped_at: The tier on which the optimizer steps: "device" or "host".
        resting_memory: State tensor -> its memory between steps.
        host_buffers: Stage -> the host buffer that has its state, while the state moves between
            the disk and the device.
        host_parameters: Stage -> its parameters and gradients on the host, for steps on the host.

    Raises:
        ModelError: Parameters or state tensors share memory, so an optimizer step of one stage
            changes another stage.
    """

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        program = resources.program
        self.tier, self.stepped_at = OPTIMIZER_TIERS[program.optimizer_placement]
        self.device: torch.device = resources.device
        self.lanes: CopyLanes = resources.service(CopyLanes)
        self.start_disk_job: StartDiskJob = self.make_disk_starter(
            lambda: None, self._make_move_error
        )
        self.resting_memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.pending_reloads: dict[int, StateCopy] = {}
        self.pending_offloads: dict[int, StateCopy] = {}
        self.reloaded_addresses: set[int] = set()  # of the memory that `reload` allocated
        self.host_buffers: dict[int, HostBuffer] = {}
        self.pending_writes: dict[int, tuple[LaneJob, HostBuffer]] = {}
        self.host_parameters: dict[int, HostParameters] = {}
        # Parameter on the device -> parameter on the host. The host parameters stay the same
        # objects, because an optimizer may use them as keys of its state.
        self.host_copies: dict[nn.Parameter, nn.Parameter] = {}
        self.grad_check: GradCheck = GradCheck(torch.tensor(True), None, ())
        # (lane, stage) -> copy of gradients or weights, or step on the host.
        self.host_step_jobs: dict[tuple[Lane, int], LaneJob] = {}
        try:
            if self.tier == "disk":
                resources.service(StateFile)
            self.optimizer: StagewiseOptimizer = self._make_stagewise_optimizer()
        except ModelError as error:
            error.program = program.name
            raise

    def _make_stagewise_optimizer(self) -> StagewiseOptimizer:
        resources = self.resources
        parameters = {
            s: [resources.ties.parameter_copies.get(p, p) for p in stage.module.parameters()]
            for s, stage in resources.stages.items()
            if s >= resources.program.frozen_stages
        }
        names: dict[Tensor, str] = {
            p: f"{name} of stage {s}"
            for s, stage in resources.stages.items()
            for p, name in stage.gradients.names.items()
        }
        # A rank without trained parameters may have no optimizer.
        optimizer = resources.optimizer
        return StagewiseOptimizer(
            parameters,
            torch.optim.SGD([{"params": []}]) if optimizer is None else optimizer,
            names,
            steps_copies=self.stepped_at == "host",
        )

    # ------------------------------------------------------------ between steps

    def list_host_tensors(self) -> list[Tensor]:
        """Return the memory of the states between steps, and of parameters on the host."""
        return [
            *self.resting_memory.values(),
            *(t for stage in self.host_parameters.values() for t in stage.list_host_tensors()),
        ]

    def list_state_tensors(self, stage: int) -> list[Tensor]:
        """Return the state tensors of a stage that are on the device or can move there.

        On a GPU, the result excludes state that torch keeps on the host, such as step counts.

        Args:
            stage: The number of the stage.
        """
        return [
            t
            for t in self.optimizer.list_state_tensors(stage)
            if t in self.resting_memory or t.device.type == self.device.type
        ]

    def is_at_rest(self, t: Tensor) -> bool:
        """Return whether the `data` of a state tensor is in its memory between steps.

        Args:
            t: A state tensor.
        """
        memory = self.resting_memory.get(t)
        return (
            memory is not None and memory.data_ptr() == t.data_ptr() and memory.device == t.device
        )

    def prepare_inputs(self, batch: StepInputs) -> StepInputs:
        """Move all states to the tier in which they stay between steps.

        States may be on the device after the load of a checkpoint, or after the creation of the
        optimizer. With steps on the host, the method also allocates host parameters. It looks up
        the memory of the weights on the device again, because the user may have replaced it.

        Args:
            batch: The inputs of the step. The method returns them unchanged.

        Raises:
            ModelError: See `StagewiseOptimizer.refresh_parameters`.
            ExecutionError: The states cannot be written to the disk. They are unchanged, and the
                step can be repeated.
        """
        optimizer = self.optimizer
        old_parameters = optimizer.seen_parameters
        optimizer.refresh_parameters()
        if optimizer.seen_parameters is not old_parameters:
            self.host_parameters = {}
        for stage in optimizer.optimizer_parameters:
            if not all(map(self.is_at_rest, self.list_state_tensors(stage))):
                try:
                    self.offload(stage)
                except OSError as error:
                    raise self._make_move_error(error) from error
                if self.tier == "disk":
                    self.write_to_disk(stage, self.start_disk_job)
        self.finish()
        if self.stepped_at == "host":
            self._refresh_host_parameters()
        return batch

    def _make_move_error(self, error: Exception) -> Exception:
        """Return the error for states that could not move to their tier before a step."""
        return ExecutionError(
            f"the optimizer state cannot be moved to the {self.tier} before the step: {error}",
            program=self.resources.program.name,
            hint="the state is unchanged: free space in spill_dir, and call step again",
        )

    def _refresh_host_parameters(self) -> None:
        for s, stage_parameters in self.optimizer.optimizer_parameters.items():
            if s in self.host_parameters:
                self.host_parameters[s].refresh_weights()
            else:
                parameters = self.optimizer.find_model_parameters(stage_parameters)
                self.host_parameters[s] = HostParameters(
                    self.resources.stages[s], parameters, self.host_copies
                )

    # ------------------------------------------------------------ steps on the device

    def make_disk_starter(
        self,
        make_observer: Callable[[], LaneObserver | None],
        wrap_error: Callable[[Exception], Exception],
    ) -> StartDiskJob:
        """Return a function that starts a job on the disk lane.

        Args:
            make_observer: Returns the observer of a job, see `CopyLanes.start`.
            wrap_error: Returns the error that a job raises instead of its own error.
        """

        def start(run: Callable[[], None], buffer: HostBuffer) -> LaneJob:
            def run_wrapped() -> None:
                try:
                    run()
                except Exception as error:
                    raise wrap_error(error) from error

            return self.lanes.start(
                Lane.DISK, run_wrapped, buffer.nbytes, buffer.jobs, make_observer()
            )

        return start

    def read_from_disk(self, stage: int, start: StartDiskJob) -> None:
        """Start to read the state of a stage from the disk into a host buffer.

        Args:
            stage: The number of the stage.
            start: Starts the read, see `make_disk_starter`.
        """
        file = self.resources.service(StateFile)
        tensors = filter(self.is_at_rest, self.list_state_tensors(stage))
        buffer = file.acquire_buffer({t: self.resting_memory[t] for t in tensors})
        job = start(partial(file.read, file.list_runs(buffer)), buffer)
        self.host_buffers[stage] = buffer._replace(jobs=[job])

    def reload(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Start to copy the state of a stage from the host to the device.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.
        """
        tensors = [*filter(self.is_at_rest, self.list_state_tensors(stage))]
        copied_tensors = [
            (t, self.resting_memory[t], allocate_like(t, self.device)) for t in tensors
        ]
        device_memory = [memory for _, _, memory in copied_tensors]
        self.reloaded_addresses.update(memory.data_ptr() for memory in device_memory)
        if self.tier == "disk":
            job = self._copy_from_buffer(stage, device_memory, observer)
        else:
            sources = [self.resting_memory[t] for t in tensors]
            job = self._start_copy(Lane.H2D, [*zip(device_memory, sources, strict=True)], observer)
        self.pending_reloads[stage] = StateCopy(job, copied_tensors)

    def _copy_from_buffer(
        self, stage: int, device_memory: Sequence[Tensor], observer: LaneObserver | None
    ) -> LaneJob:
        """Start to copy the state of a stage from its host buffer, and release the buffer."""
        file, buffer = self.resources.service(StateFile), self.host_buffers.pop(stage)
        if self.lanes.uses_streams:  # A stream cannot wait for the disk lane, which is a thread.
            for job in buffer.jobs:
                job.finish()
        pairs = [*zip(device_memory, buffer.views.values(), strict=True)]

        def copy_to_device() -> None:
            copy_pairs(pairs)
            if file.tiers.poisons_sources:
                buffer.block.location.fill_(POISON_BYTE)

        job = self.lanes.start(Lane.H2D, copy_to_device, buffer.nbytes, buffer.jobs, observer)
        file.release_buffer(buffer, job)
        return job

    def _start_copy(
        self,
        lane: Lane,
        pairs: Sequence[tuple[Tensor, Tensor]],
        observer: LaneObserver | None,
        after_jobs: Iterable[LaneJob] = (),
    ) -> LaneJob:
        """Start copies from the second to the first tensor of each pair, on a lane."""
        nbytes = sum(target.nbytes for target, _ in pairs)
        return self.lanes.start(lane, partial(copy_pairs, pairs), nbytes, after_jobs, observer)

    def finish_reload(self, stage: int) -> None:
        """Wait for `reload`, and set `data` of the state tensors to their device memory.

        Args:
            stage: The number of the stage.
        """
        job, copied_tensors = self.pending_reloads.pop(stage)
        job.wait()
        for t, _, device_memory in copied_tensors:
            t.data = device_memory

    def step(self, stage: int, finite: Tensor) -> None:
        """Run the optimizer step of a stage on the device.

        Args:
            stage: The number of the stage.
            finite: True if the gradients are finite, 0-dim bool. If it is False, nothing changes.

        Raises:
            ModelError: See `StagewiseOptimizer.step`.
        """
        self.optimizer.step(stage, finite)

    def offload(self, stage: int, observer: LaneObserver | None = None) -> None:
        """Start to copy the state of a stage from the device to the host.

        The `data` of state tensors is set to their memory between steps immediately. Do not read
        the data before the next `reload` of the state, or the end of the step.

        Args:
            stage: The number of the stage.
            observer: An object that is notified of the start and the end of the copy.

        Raises:
            OSError: The disk has no space for new state tensors. The state is then unchanged.
            ModelError: State tensors share memory with each other or with parameters.
        """
        tensors = self.list_state_tensors(stage)
        self.optimizer.require_separate_memory(tensors, stage)
        tensors = [t for t in tensors if not self.is_at_rest(t)]
        self._allocate_resting_memory(tensors)
        copied_tensors = [(t, self.resting_memory[t], t.data) for t in tensors]
        targets = [memory for _, memory, _ in copied_tensors]
        after_jobs: Sequence[LaneJob] = ()
        if self.tier == "disk":
            memory_by_tensor = {t: memory for t, memory, _ in copied_tensors}
            buffer = self.resources.service(StateFile).acquire_buffer(memory_by_tensor)
            targets, after_jobs = [*buffer.views.values()], buffer.jobs
        pairs = [
            (target, device_memory)
            for target, (_, _, device_memory) in zip(targets, copied_tensors, strict=True)
        ]
        job = self._start_copy(Lane.D2H, pairs, observer, after_jobs)
        for t, memory, _ in copied_tensors:
            t.data = memory
        self.pending_offloads[stage] = StateCopy(job, copied_tensors)
        if self.tier == "disk":
            self.host_buffers[stage] = buffer._replace(jobs=[job])

    def _allocate_resting_memory(self, tensors: Sequence[Tensor]) -> None:
        """Allocate the memory of state tensors that have none, or none of their shape and dtype."""
        new_tensors = [
            t
            for t in tensors
            if t not in self.resting_memory
            or not has_same_shape_and_dtype(self.resting_memory[t], t)
        ]
        if self.tier == "disk":
            memory = self.resources.service(StateFile).allocate(new_tensors)
        else:
            pinned = self.device.type == "cuda"
            memory = {t: allocate_like(t, _HOST, pinned=pinned) for t in new_tensors}
        for t in new_tensors:
            self.resting_memory[t] = memory[t]

    def finish_offload(self, stage: int) -> None:
        """Wait on the host for `offload`, and release the device memory of the stage's state.

        On a CPU, the method overwrites the released memory with NaN or -1, to find wrong reads.

        Args:
            stage: The stage. If the stage has no running offload, the method does nothing.
        """
        if stage not in self.pending_offloads:
            return
        job, copied_tensors = self.pending_offloads[stage]
        job.finish()
        del self.pending_offloads[stage]
        for _, _, device_memory in copied_tensors:
            if device_memory.data_ptr() in self.reloaded_addresses and self.device.type == "cpu":
                device_memory.fill_(
                    torch.nan
                    if device_memory.is_floating_point() or device_memory.is_complex()
                    else -1
                )
                device_memory.untyped_storage().resize_(0)
            self.reloaded_addresses.discard(device_memory.data_ptr())

    def write_to_disk(self, stage: int, start: StartDiskJob) -> None:
        """Start to write the state of a stage from its host buffer to the disk.

        Args:
            stage: The number of the stage.
            start: Starts the write, see `make_disk_starter`.
        """
        file, buffer = self.resources.service(StateFile), self.host_buffers.pop(stage)
        runs = file.list_runs(buffer)

        def write() -> None:
            file.write(runs)
            if file.tiers.poisons_sources:
                buffer.block.location.fill_(POISON_BYTE)

        job = start(write, buffer)
        self.pending_writes[stage] = job, buffer
        file.release_buffer(buffer, job)

    # ------------------------------------------------------------ steps on the host

    def offload_gradients(
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
                f"{self.optimizer.names.get(p, 'a parameter')}: its update would be lost",
                f"write in place with weight.data.copy_(new); or {ON_DEVICE_HINT}",
            )
        pairs: list[tuple[Tensor, Tensor]] = [*host_parameters.flat_pairs]
        if is_first_update and not self.optimizer.main_parameters:
            pairs += [(host, device) for device, host in host_parameters.list_weight_pairs()]
        self.host_step_jobs[Lane.D2H, stage] = self._start_copy(Lane.D2H, pairs, observer)

    def begin_optimizer_step(self, finite: Tensor, clip_factor: Tensor | None) -> None:
        """Keep the result of the gradient check for the host steps of all stages in an update.

        Args:
            finite: See `Service.begin_optimizer_step`.
            clip_factor: See `Service.begin_optimizer_step`.
        """
        if self.stepped_at == "device":
            return
        if not self.resources.service(RankOptimizer).can_step:
            finite = torch.zeros_like(finite)
        if self.device.type == "cpu":
            self.grad_check = GradCheck(finite, clip_factor, ())
            return
        pairs = [
            (allocate_like(t, _HOST, pinned=True), t)
            for t in (finite, clip_factor)
            if t is not None
        ]
        finite_copy, *factor_copies = [copy for copy, _ in pairs]
        job = self._start_copy(Lane.D2H, pairs, None)
        self.grad_check = GradCheck(finite_copy, factor_copies[0] if factor_copies else None, [job])

    def wait_for_gradients(self) -> None:
        """Make the computation wait for all copies of gradients before it changes the gradients."""
        for (lane, _), job in self.host_step_jobs.items():
            if lane is Lane.D2H:
                job.wait()

    def start_host_step(
        self, stage: int, make_error: Any, observer: LaneObserver | None = None
    ) -> None:
        """Start the optimizer step of a stage on the host lane.

        The step waits until the gradients of the stage are on the host.

        Args:
            stage: The number of the stage.
            make_error: A function that converts an error to an error that names the instruction.
            observer: An object that is notified of the start and the end of the step.
        """
        grad_check = self.grad_check
        host_parameters = self.host_parameters[stage]
        thread_count = torch.get_num_threads()

        def run() -> None:
            # The lane's thread does not inherit this setting of the main thread.
            if torch.get_num_threads() != thread_count:
                torch.set_num_threads(thread_count)
            try:
                if grad_check.grad_factor is not None:
                    for flat, _ in host_parameters.flat_pairs:
                        scale_buffer(flat, grad_check.grad_factor)
                self.step_on_host(stage, grad_check.finite)
            except Exception as error:
                raise make_error(error) from error
            for flat, _ in host_parameters.flat_pairs if self.device.type == "cpu" else ():
                flat.fill_(torch.nan)

        self.host_step_jobs[Lane.HOST, stage] = self.lanes.start(
            Lane.HOST,
            run,
            host_parameters.count_bytes(),
            [self.host_step_jobs[Lane.D2H, stage], *grad_check.jobs],
            observer,
        )

    def step_on_host(self, stage: int, finite: Tensor) -> None:
        """Run the optimizer step of a stage on the host.

        Args:
            stage: The number of the stage.
            finite: True if the gradients are finite, 0-dim bool. If it is False, nothing changes.

        Raises:
            ModelError: See `StagewiseOptimizer.step`. Also if the optimizer replaces the memory of
                a parameter, because the copy to the device reads the old memory.
        """
        optimizer, host_parameters = self.optimizer, self.host_parameters[stage]
        host_parameters.bind_gradients()
        old_versions = host_parameters.list_versions()
        optimizer.step(stage, finite, host_parameters.host_copies)
        if (p := host_parameters.find_replaced_parameter()) is not None:
            raise make_offload_error(
                f"the step of {type(optimizer.inner).__name__} assigns a new tensor to the data of "
                f"{optimizer.names.get(p, 'a parameter')}",
                f"write in place with p.copy_(new) or p.data.copy_(new); or {ON_DEVICE_HINT}",
            )
        for main in optimizer.optimizer_parameters[stage] if optimizer.main_parameters else ():
            main.grad = None
        host_parameters.was_stepped = (
            not optimizer.main_parameters or old_versions != host_parameters.list_versions()
        )
        # A state tensor that this step created is in host memory already. Only record its memory.
        for t in self.list_state_tensors(stage):
            self.resting_memory.setdefault(t, t.detach())

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
        pairs = host_parameters.list_weight_pairs()

        def run() -> None:
            if host_parameters.was_stepped:
                copy_pairs(pairs)
            for _, host_weights in pairs if is_last_update and self.device.type == "cpu" else ():
                host_weights.fill_(torch.nan)

        nbytes = sum(target.nbytes for target, _ in pairs)
        after_jobs = [self.host_step_jobs[Lane.HOST, stage]]
        self.host_step_jobs[Lane.H2D, stage] = self.lanes.start(
            Lane.H2D, run, nbytes, after_jobs, observer
        )

    # ------------------------------------------------------------ end of an update

    def finish(self, *, is_last_update: bool = True) -> None:
        """Wait until weights are on the device, and states are in their tier between steps.

        After the last update the host waits, and may read the states. Of the placements that
        use this service, only "cpu_step" allows several updates. After an earlier update, the
        computation waits for the weights.

        Args:
            is_last_update: True if this is the last update of the step.
        """
        for lane, s in [*self.host_step_jobs]:
            if lane is Lane.H2D:
                job = self.host_step_jobs.pop((lane, s))
                job.finish() if is_last_update else job.wait()
        if is_last_update:
            for stage in [*self.pending_offloads]:
                self.finish_offload(stage)
            self.reloaded_addresses.clear()  # other tensors may now get these addresses
            for stage in [*self.pending_writes]:
                job, _ = self.pending_writes[stage]
                job.finish()
                del self.pending_writes[stage]

    def fail(self, *, has_begun: bool) -> None:
        """Wait until all running copies have ended, and ignore their errors.

        Keep the state that did not reach its tier: the `data` of such a state tensor is set to its
        memory on the device, or to a copy of its host buffer.

        Args:
            has_begun: True if an instruction of the step had begun before the error.
        """
        buffer_jobs = [job for buffer in self.host_buffers.values() for job in buffer.jobs]
        reload_jobs = [state_copy.job for state_copy in self.pending_reloads.values()]
        for job in (*self.host_step_jobs.values(), *buffer_jobs, *reload_jobs):
            _finish_without_error(job)
        for job, buffer in self.pending_writes.values():
            if not _finish_without_error(job):
                for t, memory in buffer.views.items():
                    t.data = memory.clone()
        for stage, state_copy in self.pending_offloads.items():
            # After an error, buffers in `host_buffers` are not written to the file.
            if not _finish_without_error(state_copy.job) or stage in self.host_buffers:
                for t, _, memory in state_copy.tensors:
                    t.data = memory
        for buffer in self.host_buffers.values():
            self.resources.service(StateFile).release_buffer(buffer)
        if self.tier == "disk":
            for job in self.resources.service(StateFile).take_pending_jobs():
                _finish_without_error(job)
        self.host_step_jobs.clear()
        self.pending_reloads.clear()
        self.pending_offloads.clear()
        self.pending_writes.clear()
        self.host_buffers.clear()
        self.reloaded_addresses.clear()


def _finish_without_error(job: LaneJob) -> bool:
    """Wait until a job has ended, and return whether it raised no error."""
    try:
        job.finish()
    except Exception:
        return False
    return True
