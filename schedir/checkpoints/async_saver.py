"""Save checkpoints asynchronously: later steps run while a thread writes the files.

One step copies the state to host memory, and a thread then writes the copy.

    saver = Saver(executor, "checkpoints", keep=2)
    for step in range(1000):
        if step and step % 50 == 0:
            saver.schedule_save(step)  # the state after `step` steps
        executor.step(inputs, targets)  # copies the state
        saver.write()  # starts to write the copy, if there is one
    saver.wait()
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedir.call_errors import explain_wrong_calls
from schedir.checkpoints.checkpoint_group import CheckpointGroup, create_separate_group
from schedir.checkpoints.local_state import NameMap, TensorPiece
from schedir.checkpoints.save_checkpoint import SavePlan, plan_save, write_checkpoint
from schedir.checkpoints.state_exchange import add_stage_prefix, get_checkpoint_state
from schedir.errors import ModelError, UsageError, describe
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.copy_lanes import LaneJob
from schedir.runtime.offload.snapshot_copies import CopyPair, SnapshotCopies


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint that a `Saver` has written.

    Attributes:
        step: The number of steps after which the state was saved.
        path: The directory of the checkpoint.
        seconds: The time that writing took, in seconds.
    """

    step: int
    path: Path
    seconds: float


@explain_wrong_calls("Saver(executor, directory)")
class Saver:
    """Saves checkpoints of an executor as `save` does, but while later steps run.

    The program must have been compiled with `checkpoint_snapshots`. The Snapshot instructions of
    the program copy the tensors that a step changes. `schedule_save` itself copies all other
    tensors, such as buffers, because a forward may write to them. A thread then writes the files.

    All processes create their Saver together, and call the same methods in the same order. A
    process waits at most 30 minutes for the files of other processes.

    Args:
        executor: The executor to save.
        directory: The directory of the checkpoints. The directory is created if it does not exist.
        name_map: A function of the index of a stage and the name of a parameter or buffer in this
            stage. It returns the name of the parameter or buffer in the full model.
        keep: The number of newest checkpoints to keep. By default all are kept.

    Attributes:
        saved_checkpoint: The newest complete checkpoint that this Saver has written, or None.

    Raises:
        UsageError: `executor` is not an executor.
        ModelError: The program has no `checkpoint_snapshots`.

    Example:
        >>> import schedir, tempfile, torch
        >>> from schedir.checkpoints import Saver
        >>> from schedir.runtime import InProcessExecutor
        >>> shape = schedir.PipelineShape(ranks=2, microbatches=4)
        >>> program = schedir.compile(
        ...     schedir.schedules.one_f_one_b, shape, checkpoint_snapshots=True
        ... )
        >>> stages = [torch.nn.Linear(8, 8) for _ in range(2)]
        >>> how = dict(loss=torch.nn.functional.mse_loss, boundary=(2, 8))
        >>> run = InProcessExecutor(program, stages, optimizer=torch.optim.AdamW, **how)
        >>> x = torch.ones(4, 2, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saver = Saver(run, folder, keep=2)
        ...     for step in range(4):
        ...         loss = run.step(x, x)  # copies the state of a scheduled save
        ...         saver.write()  # writes this copy while later steps run
        ...         saver.schedule_save(step + 1)
        ...     saver.cancel()  # no later step copies the state of the last scheduled save
        ...     saver.wait()
        ...     saver.saved_checkpoint.step
        3
    """

    def __init__(
        self,
        executor: Executor | InProcessExecutor,
        directory: str | os.PathLike[str],
        *,
        name_map: NameMap = add_stage_prefix,
        keep: int | None = None,
    ) -> None:
        self.executor = executor
        self.directory: Path = Path(directory)
        self.name_map = name_map
        self.keep = keep
        self.rank_executors: list[Executor] = (
            executor.executors if isinstance(executor, InProcessExecutor) else [executor]
        )
        if not all(isinstance(rank, Executor) for rank in self.rank_executors):
            raise UsageError(
                "Saver: executor must be an Executor or an InProcessExecutor, not "
                f"{describe(executor)}",
                hint="for a schedule of torch, use save(schedule, folder, step=..., optimizer=...)",
            )
        program = self.rank_executors[0].program
        if not program.checkpoint_snapshots:
            raise ModelError(
                "a Saver needs a program with checkpoint_snapshots, but this program has none",
                program=program.name,
                hint="compile(..., checkpoint_snapshots=True), or save(executor, folder, step=...)",
            )
        self.group: Any = None
        peers = get_checkpoint_state(executor)[0]
        self.peers: CheckpointGroup = peers
        if not peers.is_single_process:
            self.group = create_separate_group(peers.group)
            self.peers = CheckpointGroup(self.group)
        self._host_buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        # The scheduled save that `write` has not started to write yet, or None.
        self._save_plan: SavePlan | None = None
        self._immediate_copies: list[LaneJob] = []
        self._writer_thread: Thread | None = None
        self.saved_checkpoint: SavedCheckpoint | None = None
        self._error: BaseException | None = None

    def schedule_save(self, step: int, extra_state: Mapping[str, Any] | None = None) -> None:
        """Schedule a save of the current state; the next step copies this state.

        Until the end of that step, no other code may change weights or optimizer states. The call
        waits until the previous checkpoint is written, and raises the errors of that save as `wait`
        does. All processes must call this method.

        Args:
            step: The number of steps that were made so far.
            extra_state: More values for the checkpoint, as JSON values. The first process saves
                these values.

        Raises:
            ModelError: Another save is scheduled, and neither `write` nor `cancel` was called.
            CheckpointError: The previous checkpoint could not be written, or this state cannot be
                saved.
        """
        if self._save_plan is not None:
            raise ModelError(
                f"the save of step {self._save_plan.step} is scheduled, and has not been written",
                hint="call saver.write() or saver.cancel() before schedule_save",
            )
        self.wait()
        save_plan = plan_save(
            self.executor, step=step, name_map=self.name_map, extra_state=extra_state
        )
        requests: list[dict[int, list[CopyPair]]] = [{} for _ in self.rank_executors]
        immediate_pairs: list[CopyPair] = []
        tensors = {}
        for name, (kind, pieces) in save_plan.tensors.items():
            pairs = [(self._get_host_buffer(name, piece), piece.memory) for piece in pieces]
            if name in save_plan.stepped_tensors:
                number, stage = save_plan.stepped_tensors[name]
                requests[number].setdefault(stage, []).extend(pairs)
            else:
                immediate_pairs += pairs
            copies = [
                piece._replace(memory=memory)
                for piece, (memory, _) in zip(pieces, pairs, strict=True)
            ]
            tensors[name] = kind, copies
        self._immediate_copies = [
            self.rank_executors[0].state.service(SnapshotCopies).start_copy(immediate_pairs)
        ]
        for copy in self._immediate_copies:
            copy.wait()  # The next forward may write to these tensors.
        for rank, stage_copies in zip(self.rank_executors, requests, strict=True):
            rank.state.service(SnapshotCopies).request(stage_copies, self)
        self._save_plan = replace(save_plan, tensors=tensors)

    def write(self) -> None:
        """Start to write the scheduled checkpoint, if there is one.

        Call this after the step that copies the state, and only when the copied state is final. For
        example, the state is not final while post-validation can still undo the update. All
        processes must call this method.

        Raises:
            ModelError: No step was made since `schedule_save`. The save remains scheduled. Or the
                weights changed before a step copied them: by `load`, by another Saver, or by a step
                of a program without snapshots. The save is then canceled. All processes raise this
                error.
        """
        plan, self._save_plan = self._save_plan, None
        if plan is None:
            return
        snapshots = [rank.state.service(SnapshotCopies) for rank in self.rank_executors]
        statuses = self.peers.gather_results(
            lambda: (
                any(service.requester is not self for service in snapshots),
                any(service.requested for service in snapshots),
            )
        )
        if any(has_changed for has_changed, _ in statuses):
            self.cancel()
            raise ModelError(
                f"step {plan.step} cannot be saved: the weights changed before they were copied",
                hint="call saver.write() before you load a checkpoint, use another Saver, or run a "
                "program without snapshots",
            )
        if any(is_waiting for _, is_waiting in statuses):
            self._save_plan = plan
            raise ModelError(
                f"the state of step {plan.step} has not been copied: no step has run since "
                "schedule_save",
                hint="call executor.step(...), or save(executor, folder, step=...)",
            )
        copies = [copy for service in snapshots for copy in service.take_copies()]
        copies += self._immediate_copies

        def run() -> None:
            begin_time = perf_counter()
            try:
                for copy in copies:
                    copy.finish()
                path = write_checkpoint(plan, self.directory, keep=self.keep, group=self.group)
                self.saved_checkpoint = SavedCheckpoint(
                    plan.step, path, perf_counter() - begin_time
                )
            except BaseException as error:  # `wait` raises this error.
                self._error = error

        self._writer_thread = Thread(target=run, name="checkpoint", daemon=True)
        self._writer_thread.start()

    def cancel(self) -> None:
        """Cancel a scheduled save that is not being written yet.

        Call this, for example, if the step was undone.
        """
        self._save_plan = None
        for rank in self.rank_executors:
            if rank.state.service(SnapshotCopies).requester is self:
                rank.state.service(SnapshotCopies).request({})

    @property
    def is_writing(self) -> bool:
        """Return whether a thread is writing a checkpoint now."""
        return self._writer_thread is not None and self._writer_thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: A process could not write its files. All processes raise this error
                once.
            ModelError: A save is scheduled, and neither `write` nor `cancel` was called.
        """
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._save_plan is not None:
            raise ModelError(
                f"the save of step {self._save_plan.step} is scheduled, and has not been written",
                hint="call saver.write() or saver.cancel() before saver.wait()",
            )

    def _get_host_buffer(self, name: str, piece: TensorPiece) -> Tensor:
        """Return the host memory for a slice, which is allocated once and reused by later saves."""
        key, source = (name, piece.offset), piece.memory
        buffer = self._host_buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._host_buffers[key] = buffer
        return buffer
