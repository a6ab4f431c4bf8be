"""Save checkpoints beside the steps: copy the state during one step, and write it during later
ones.

saver = Saver(executor, "checkpoints", keep=2)
for step in range(1000):
    if step and step % 50 == 0:
        saver.due(step)  # what the executor is after so many steps
    executor.step(inputs, targets)
    saver.write()  # once nothing takes back what was due
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

from schedir.checkpoints.checkpoint_group import CheckpointGroup, create_separate_group
from schedir.checkpoints.local_state import NameMap, TensorPiece
from schedir.checkpoints.save_checkpoint import SavePlan, plan_save, write_checkpoint
from schedir.checkpoints.state_exchange import add_stage_prefix, get_checkpoint_state
from schedir.errors import ModelError, UsageError, describe
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.snapshot_copies import CopyPair, SnapshotCopy


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is whole: of which step, where, and in how many seconds it was written."""

    step: int
    path: Path
    seconds: float


class Saver:
    """Saves an executor as `save` does, beside its steps; its program has `checkpoint_snapshots`.

    What a step changes is copied by the Snapshots of the step behind which it is due; all else, as
    buffers, which a forward may write to, at once.  A thread writes the files.  All processes make
    theirs together, and call the same; they wait half an hour for what others write.
    `saved_checkpoint` is the newest one that it has made whole.  Raises ModelError for a program
    without snapshots.

    >>> import schedir, tempfile, torch
    >>> from schedir.checkpoints import Saver
    >>> from schedir.runtime import InProcessExecutor
    >>> shape = schedir.PipelineShape(ranks=2, microbatches=4)
    >>> program = schedir.compile(schedir.schedules.one_f_one_b, shape, checkpoint_snapshots=True)
    >>> stages = [torch.nn.Linear(8, 8) for _ in range(2)]
    >>> how = dict(loss=torch.nn.functional.mse_loss, boundary=(2, 8))
    >>> run = InProcessExecutor(program, stages, optimizer=torch.optim.AdamW, **how)
    >>> x = torch.ones(4, 2, 8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saver = Saver(run, folder, keep=2)
    ...     for step in range(4):
    ...         loss = run.step(x, x)  # copies what is due under it
    ...         saver.write()  # the step before, beside the next ones
    ...         saver.schedule_save(step + 1)
    ...     saver.cancel()  # no step copies the last
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
        self.executor, self.directory, self.name_map, self.keep = (
            executor,
            Path(directory),
            name_map,
            keep,
        )
        self.rank_executors = (
            executor.executors if isinstance(executor, InProcessExecutor) else [executor]
        )
        if not all(isinstance(rank, Executor) for rank in self.rank_executors):
            raise UsageError(
                "a Saver is of an Executor or an InProcessExecutor, which copies, not "
                f"{describe(executor)}",
                hint="save(schedule, folder, step=..., optimizer=...)",
            )
        program = self.rank_executors[0].program
        if not program.checkpoint_snapshots:
            raise ModelError(
                "the program takes no checkpoint_snapshots, and these copy what is saved beside a "
                "step",
                program=program.name,
                hint="compile(..., checkpoint_snapshots=True), or save(executor, folder, step=...)",
            )
        self.group: Any = None
        peers = self.peers = get_checkpoint_state(executor)[0]
        if not peers.is_single_process:
            self.group = create_separate_group(peers.group)
            self.peers = CheckpointGroup(self.group)
        self._host_buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._save_plan: SavePlan | None = None  # copied, or about to be
        self._immediate_copies: list[SnapshotCopy] = []
        self._writer_thread: Thread | None = None
        self.saved_checkpoint: SavedCheckpoint | None = None
        self._error: BaseException | None = None

    def schedule_save(self, step: int, extra_state: Mapping[str, Any] | None = None) -> None:
        """Let what the executor is now, after so many steps, be saved; the next step copies it.

        Nobody but the step may change weights or what optimizers keep meanwhile.  Waits until what
        was written before has been, and raises what that has (`wait`).  Raises ModelError where
        another step is due, and neither `write_checkpoint` nor `cancel` was called.
        """
        if self._save_plan is not None:
            raise ModelError(
                f"step {self._save_plan.step} is due, and would not be saved any more",
                hint="saver.write() or saver.cancel() before another step is due",
            )
        self.wait()
        taken = plan_save(self.executor, step=step, name_map=self.name_map, extra_state=extra_state)
        wanted: list[dict[int, list[CopyPair]]] = [{} for _ in self.rank_executors]
        now: list[CopyPair] = []
        tensors = {}
        for name, (kind, pieces) in taken.tensors.items():
            pairs = [(self._get_host_buffer(name, piece), piece.memory) for piece in pieces]
            if name in taken.stepped_tensors:
                number, stage = taken.stepped_tensors[name]
                wanted[number].setdefault(stage, []).extend(pairs)
            else:
                now += pairs
            copies = [
                piece._replace(memory=memory)
                for piece, (memory, _) in zip(pieces, pairs, strict=True)
            ]
            tensors[name] = kind, copies
        self._immediate_copies = [self.rank_executors[0].state.resources.snapshots.start_copy(now)]
        for one in self._immediate_copies:
            one.wait()  # a forward may write to these
        for rank, own in zip(self.rank_executors, wanted, strict=True):
            rank.state.resources.snapshots.request(own, self)
        self._save_plan = replace(taken, tensors=tensors)

    def write(self) -> None:
        """Begin to write what was due, if anything, and has been copied by a step; to be called
        when nobody takes it back any more.

        Raises ModelError, in all processes alike, where no step has been made since, and, once,
        where weights were changed before one copied them: by `load`, another Saver, or a step of a
        program without snapshots.
        """
        taken, self._save_plan = self._save_plan, None
        if taken is None:
            return
        of = [rank.state.resources.snapshots for rank in self.rank_executors]
        told = self.peers.gather_results(
            lambda: (any(one.requester is not self for one in of), any(one.requested for one in of))
        )
        if any(changed for changed, _ in told):
            self.cancel()
            raise ModelError(
                f"step {taken.step} can be saved no more: it was not copied before weights changed",
                hint="saver.write() before a load, another Saver, or a step without snapshots",
            )
        if any(waits for _, waits in told):
            self._save_plan = taken
            raise ModelError(
                f"step {taken.step} has not been copied: no step was made since it was due",
                hint="executor.step(...), or save(executor, folder, step=...)",
            )
        copies = [copy for one in of for copy in one.take_copies()]
        copies += self._immediate_copies

        def run() -> None:
            began = perf_counter()
            try:
                for one in copies:
                    one.finish()
                path = write_checkpoint(taken, self.directory, keep=self.keep, group=self.group)
                self.saved_checkpoint = SavedCheckpoint(taken.step, path, perf_counter() - began)
            except BaseException as error:  # whoever waits raises it
                self._error = error

        self._writer_thread = Thread(target=run, name="checkpoint", daemon=True)
        self._writer_thread.start()

    def cancel(self) -> None:
        """Let nothing be saved of what was due and is not being written: it was taken back."""
        self._save_plan = None
        for rank in self.rank_executors:
            if rank.state.resources.snapshots.requester is self:
                rank.state.resources.snapshots.request({})

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer_thread is not None and self._writer_thread.is_alive()

    def wait(self) -> None:
        """Wait until what is being written has been.

        Raises CheckpointError, in all processes alike, where one could not write, and ModelError
        where a step is due and neither `write_checkpoint` nor `cancel` was called.
        """
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._save_plan is not None:
            raise ModelError(
                f"step {self._save_plan.step} is due, and is not being written",
                hint="saver.write() or saver.cancel() before saver.wait()",
            )

    def _get_host_buffer(self, name: str, piece: TensorPiece) -> Tensor:
        """Memory of the host for a piece, which is made once."""
        key, of = (name, piece.offset), piece.memory
        room = self._host_buffers.get(key)
        if room is None or room.shape != of.shape or room.dtype != of.dtype:
            room = torch.empty(of.shape, dtype=of.dtype, pin_memory=of.is_cuda)
            self._host_buffers[key] = room
        return room
