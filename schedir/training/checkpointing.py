"""Save checkpoints during training, and resume from them."""

from __future__ import annotations

import warnings
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import torch.distributed as dist

from schedir.checkpoints import Saver, load
from schedir.checkpoints.async_saver import SavedCheckpoint
from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.checkpoints.checkpoint_group import apart
from schedir.checkpoints.save_checkpoint import take, write
from schedir.errors import CheckpointError, ModelError
from schedir.runtime.executor import Executor
from schedir.training.batches.samples import Batches
from schedir.training.config.train_config import TrainConfig
from schedir.training.run_results import LossLog
from schedir.transports.json_collectives import broadcast

_CURSOR: Final = "data"


class TrainingCheckpoints:
    """The checkpoints of a rank, in `train.checkpoint_dir`; of a run without one it does nothing.

    `made` is how many steps had been made when this process began, and `taken` how many samples for
    them; `saved` is the step of which there is a checkpoint.  With snapshots in the program, what
    is after a step is copied under the next one, if there is one, and written by a thread beside
    later ones.  Process 0 prints what is done.
    """

    def __init__(
        self, executor: Executor, train: TrainConfig, batches: Batches, losses: LossLog | None
    ) -> None:
        self.executor, self.train, self.batches, self.losses = executor, train, batches, losses
        self.made = self.taken = self.saved = 0
        self.due = 0  # the step that is copied, and is yet to be judged; 0 where none is
        self.extra: dict[str, Any] = {}
        self.saver: Saver | None = None
        if train.checkpoint_dir is not None and executor.program.checkpoint_snapshots:
            self.saver = Saver(
                executor, train.checkpoint_dir, names=_names, keep=train.checkpoint_keep
            )
        self.group: Any = None
        if self.saver is not None:
            self.group = self.saver.group
        elif train.checkpoint_dir is not None and dist.get_world_size() > 1:
            self.group = apart()

    def go_on(self) -> int:
        """Be what the newest whole checkpoint says, if there is to be one: the steps that have been
        made.  All processes must call this.

        Raises CheckpointError where there are checkpoints, and none of them is whole.
        """
        train, folder = self.train, self.train.checkpoint_dir
        if folder is None:
            return 0
        run = None if self.losses is None else self.losses.run
        self.extra = broadcast(None if run is None else run.extra, 0)
        if train.resume == "no":
            return 0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            state = load(self.executor, folder, names=_names)
        for warning in said:
            print(warning.message, flush=True)
        if state is None:
            return 0
        self.made = self.saved = step = int(state["step"])
        if (cursor := state["extra"].get(_CURSOR)) is not None:
            self.taken = self.batches.taken(cursor)
        if run is not None:
            changed = run.changed(state["extra"])
            print(
                f"resumed at step {step} from {CheckpointDirectory(folder).of(step)}"
                f"{f'; changed since: {changed}' if changed else ''}",
                flush=True,
            )
        return step

    def at_once(self, step: int) -> bool:
        """Whether a step (from 1) is to be saved before another one begins."""
        train = self.train
        if train.checkpoint_dir is None:
            return False
        return step == train.steps or (self.saver is None and step % train.checkpoint_every == 0)

    def beside(self, step: int) -> bool:
        """Whether what is after a step is to be copied under the next one."""
        return (
            self.saver is not None and step > self.made and step % self.train.checkpoint_every == 0
        )

    def save(self, step: int) -> None:
        """Save what is after a step, whose numbers have been judged; all processes call this."""
        folder, began = self.train.checkpoint_dir, perf_counter()
        assert folder is not None
        self.ended()
        self._secure()
        extra = self._state(step)
        taken = take(self.executor, step=step, names=_names, extra=extra)
        path = write(taken, folder, keep=self.train.checkpoint_keep, group=self.group)
        self._say(SavedCheckpoint(step, path, perf_counter() - began))

    def copy(self, step: int) -> None:
        """Let the next step copy what is after this one; waits for the checkpoint before."""
        assert self.saver is not None
        self.ended()
        self.saver.due(step, self._state(step))
        self.due = step

    def write(self) -> None:
        """Begin to write what was copied, which has been judged, and whose losses are written; say
        what has become whole since, and raise what could not be written."""
        if self.saver is not None and self.due:
            self.due = 0
            self._secure()
            self.saver.write()
        elif self.saver is not None and not self.saver.is_writing:
            self.ended()

    def stop(self, step: int) -> None:
        """The run stops at a step whose numbers are wrong: what was copied after it is dropped, and
        what was copied before it is written."""
        if self.saver is not None:
            if self.due >= step:
                self.due = 0
                self.saver.drop()
            self.write()
            self.ended()

    def ended(self) -> None:
        """Wait until what is being written is whole.  Raises CheckpointError where it cannot be."""
        if self.saver is not None:
            self.saver.ended()
            if self.saver.saved is not None and self.saver.saved.step > self.saved:
                self._say(self.saver.saved)

    def close(self) -> None:
        """Nothing comes any more, whatever has ended the run: what is being written becomes whole,
        if that needs no other process, which may be gone."""
        if self.saver is not None and dist.get_world_size() == 1:
            with suppress(CheckpointError, ModelError):  # it is no longer what is wrong
                self.ended()

    def _secure(self) -> None:
        """No checkpoint is of steps whose losses may be lost."""
        if self.losses is not None:
            self.losses.secure()

    def _state(self, step: int) -> dict[str, Any]:
        taken = self.taken + (step - self.made) * self.batches.size
        return self.extra | {_CURSOR: self.batches.cursor(taken)}

    def _say(self, saved: SavedCheckpoint) -> None:
        self.saved = saved.step
        if not dist.get_rank():
            print(f"saved step {saved.step} to {saved.path} in {saved.seconds:.2g} s", flush=True)

    @property
    def where(self) -> str:
        """Which step is saved, and where."""
        folder, steps = self.train.checkpoint_dir, self.train.steps
        if folder is None or not self.saved:
            return "no step has been made"
        return (
            f"step {self.saved} of {steps} is saved in {CheckpointDirectory(folder).of(self.saved)}"
        )


def _names(stage: int, name: str) -> str:
    """A GPT's parameters have the names of the whole model."""
    return name
