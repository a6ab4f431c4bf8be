"""Save checkpoints beside the steps: copy the state during one step, and write it during later
ones.

saver = Saver(executor, "checkpoints", keep=2)
for step in range(1000):
    if step and step % 50 == 0:
        saver.due(step)  # what the executor is after so many steps
    executor.step(inputs, targets)
    saver.write()  # once nothing takes back what was due
saver.ended()
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

from schedir.checkpoints.checkpoint_group import CheckpointGroup, apart
from schedir.checkpoints.local_state import Names, TensorPiece
from schedir.checkpoints.save_checkpoint import SavePlan, take, write
from schedir.checkpoints.state_exchange import kept_of, of_stages
from schedir.errors import ModelError, UsageError, describe
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.snapshot_copies import Pair, SnapshotCopy


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is whole: of which step, where, and in how many seconds it was written."""

    step: int
    path: Path
    seconds: float


class Saver:
    """Saves an executor as `save` does, beside its steps; its program has `checkpoint_snapshots`.

    What a step changes is copied by the Snapshots of the step behind which it is due; all else, as
    buffers, which a forward may write to, at once.  A thread writes the files.  All processes make
    theirs together, and call the same; they wait half an hour for what others write.  `saved` is
    the newest one that it has made whole.  Raises ModelError for a program without snapshots.

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
    ...         saver.due(step + 1)
    ...     saver.drop()  # no step copies the last
    ...     saver.ended()
    ...     saver.saved.step
    3
    """

    def __init__(
        self,
        executor: Executor | InProcessExecutor,
        folder: str | os.PathLike[str],
        *,
        names: Names = of_stages,
        keep: int | None = None,
    ) -> None:
        self.executor, self.folder, self.names, self.keep = executor, Path(folder), names, keep
        self.ranks = executor.ranks if isinstance(executor, InProcessExecutor) else [executor]
        if not all(isinstance(rank, Executor) for rank in self.ranks):
            raise UsageError(
                "a Saver is of an Executor or an InProcessExecutor, which copies, not "
                f"{describe(executor)}",
                hint="save(schedule, folder, step=..., optimizer=...)",
            )
        program = self.ranks[0].program
        if not program.checkpoint_snapshots:
            raise ModelError(
                "the program takes no checkpoint_snapshots, and these copy what is saved beside a "
                "step",
                program=program.name,
                hint="compile(..., checkpoint_snapshots=True), or save(executor, folder, step=...)",
            )
        self.group: Any = None
        peers = self.peers = kept_of(executor)[0]
        if not peers.alone:
            self.group = apart(peers.group)
            self.peers = CheckpointGroup(self.group)
        self._memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._taken: SavePlan | None = None  # copied, or about to be
        self._at_once: list[SnapshotCopy] = []
        self._thread: Thread | None = None
        self.saved: SavedCheckpoint | None = None
        self._error: BaseException | None = None

    def due(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Let what the executor is now, after so many steps, be saved; the next step copies it.

        Nobody but the step may change weights or what optimizers keep meanwhile.  Waits until what
        was written before has been, and raises what that has (`ended`).  Raises ModelError where
        another step is due, and neither `write` nor `drop` was called.
        """
        if self._taken is not None:
            raise ModelError(
                f"step {self._taken.step} is due, and would not be saved any more",
                hint="saver.write() or saver.drop() before another step is due",
            )
        self.ended()
        taken = take(self.executor, step=step, names=self.names, extra=extra)
        wanted: list[dict[int, list[Pair]]] = [{} for _ in self.ranks]
        now: list[Pair] = []
        tensors = {}
        for name, (kind, pieces) in taken.tensors.items():
            pairs = [(self._room(name, piece), piece.memory) for piece in pieces]
            if name in taken.stepped:
                number, stage = taken.stepped[name]
                wanted[number].setdefault(stage, []).extend(pairs)
            else:
                now += pairs
            copies = [
                piece._replace(memory=memory)
                for piece, (memory, _) in zip(pieces, pairs, strict=True)
            ]
            tensors[name] = kind, copies
        self._at_once = [self.ranks[0].state.held.snapshots.copy(now)]
        for one in self._at_once:
            one.wait()  # a forward may write to these
        for rank, own in zip(self.ranks, wanted, strict=True):
            rank.state.held.snapshots.want(own, self)
        self._taken = replace(taken, tensors=tensors)

    def write(self) -> None:
        """Begin to write what was due, if anything, and has been copied by a step; to be called
        when nobody takes it back any more.

        Raises ModelError, in all processes alike, where no step has been made since, and, once,
        where weights were changed before one copied them: by `load`, another Saver, or a step of a
        program without snapshots.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            return
        of = [rank.state.held.snapshots for rank in self.ranks]
        told = self.peers.told(
            lambda: (any(one.whose is not self for one in of), any(one.wanted for one in of))
        )
        if any(changed for changed, _ in told):
            self.drop()
            raise ModelError(
                f"step {taken.step} can be saved no more: it was not copied before weights changed",
                hint="saver.write() before a load, another Saver, or a step without snapshots",
            )
        if any(waits for _, waits in told):
            self._taken = taken
            raise ModelError(
                f"step {taken.step} has not been copied: no step was made since it was due",
                hint="executor.step(...), or save(executor, folder, step=...)",
            )
        copies = [copy for one in of for copy in one.taken()]
        copies += self._at_once

        def run() -> None:
            began = perf_counter()
            try:
                for one in copies:
                    one.finish()
                path = write(taken, self.folder, keep=self.keep, group=self.group)
                self.saved = SavedCheckpoint(taken.step, path, perf_counter() - began)
            except BaseException as error:  # whoever waits raises it
                self._error = error

        self._thread = Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Let nothing be saved of what was due and is not being written: it was taken back."""
        self._taken = None
        for rank in self.ranks:
            if rank.state.held.snapshots.whose is self:
                rank.state.held.snapshots.want({})

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def ended(self) -> None:
        """Wait until what is being written has been.

        Raises CheckpointError, in all processes alike, where one could not write, and ModelError
        where a step is due and neither `write` nor `drop` was called.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._taken is not None:
            raise ModelError(
                f"step {self._taken.step} is due, and is not being written",
                hint="saver.write() or saver.drop() before saver.ended()",
            )

    def _room(self, name: str, piece: TensorPiece) -> Tensor:
        """Memory of the host for a piece, which is made once."""
        key, of = (name, piece.offset), piece.memory
        room = self._memory.get(key)
        if room is None or room.shape != of.shape or room.dtype != of.dtype:
            room = torch.empty(of.shape, dtype=of.dtype, pin_memory=of.is_cuda)
            self._memory[key] = room
        return room
