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
from schedir.checkpoints.checkpoint_group import create_separate_group
from schedir.checkpoints.save_checkpoint import plan_save, write_checkpoint
from schedir.errors import CheckpointError, ModelError
from schedir.runtime.executor import Executor
from schedir.training.batches.samples import Batches
from schedir.training.config.train_config import TrainConfig
from schedir.training.run_results import LossLog
from schedir.transports.json_collectives import broadcast

_CURSOR_KEY: Final = "data"


class TrainingCheckpoints:
    """The checkpoints of a rank, in `train.checkpoint_dir`; of a run without one it does nothing.

    `start_step` is how many steps had been made when this process began, and `start_samples` how
    many samples for them; `saved_step` is the step of which there is a checkpoint.  With snapshots
    in the program, what is after a step is copied under the next one, if there is one, and written
    by a thread beside later ones.  Process 0 prints what is done.
    """

    def __init__(
        self, executor: Executor, train: TrainConfig, batches: Batches, losses: LossLog | None
    ) -> None:
        self.executor, self.train, self.batches, self.losses = executor, train, batches, losses
        self.start_step = self.start_samples = self.saved_step = 0
        self.pending_step = 0  # the step that is copied, and is yet to be judged; 0 where none is
        self.extra_state: dict[str, Any] = {}
        self.saver: Saver | None = None
        if train.checkpoint_dir is not None and executor.program.checkpoint_snapshots:
            self.saver = Saver(
                executor, train.checkpoint_dir, name_map=_keep_name, keep=train.checkpoint_keep
            )
        self.group: Any = None
        if self.saver is not None:
            self.group = self.saver.group
        elif train.checkpoint_dir is not None and dist.get_world_size() > 1:
            self.group = create_separate_group()

    def resume(self) -> int:
        """Be what the newest whole checkpoint says, if there is to be one: the steps that have been
        made.  All processes must call this.

        Raises CheckpointError where there are checkpoints, and none of them is whole.
        """
        train, folder = self.train, self.train.checkpoint_dir
        if folder is None:
            return 0
        run = None if self.losses is None else self.losses.run
        self.extra_state = broadcast(None if run is None else run.extra_state, 0)
        if train.resume == "no":
            return 0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            state = load(self.executor, folder, name_map=_keep_name)
        for warning in said:
            print(warning.message, flush=True)
        if state is None:
            return 0
        self.start_step = self.saved_step = step = int(state["step"])
        if (cursor := state["extra"].get(_CURSOR_KEY)) is not None:
            self.start_samples = self.batches.read_cursor(cursor)
        if run is not None:
            changed = run.describe_changes(state["extra"])
            print(
                f"resumed at step {step} from {CheckpointDirectory(folder).locate_step(step)}"
                f"{f'; changed since: {changed}' if changed else ''}",
                flush=True,
            )
        return step

    def should_save_now(self, step: int) -> bool:
        """Whether a step (from 1) is to be saved before another one begins."""
        train = self.train
        if train.checkpoint_dir is None:
            return False
        return step == train.steps or (self.saver is None and step % train.checkpoint_every == 0)

    def should_copy(self, step: int) -> bool:
        """Whether what is after a step is to be copied under the next one."""
        return (
            self.saver is not None
            and step > self.start_step
            and step % self.train.checkpoint_every == 0
        )

    def save(self, step: int) -> None:
        """Save what is after a step, whose numbers have been judged; all processes call this."""
        folder, began = self.train.checkpoint_dir, perf_counter()
        assert folder is not None
        self.wait()
        self._flush_losses()
        extra = self._make_extra_state(step)
        taken = plan_save(self.executor, step=step, name_map=_keep_name, extra_state=extra)
        path = write_checkpoint(taken, folder, keep=self.train.checkpoint_keep, group=self.group)
        self._report_saved(SavedCheckpoint(step, path, perf_counter() - began))

    def schedule_copy(self, step: int) -> None:
        """Let the next step copy what is after this one; waits for the checkpoint before."""
        assert self.saver is not None
        self.wait()
        self.saver.schedule_save(step, self._make_extra_state(step))
        self.pending_step = step

    def write(self) -> None:
        """Begin to write what was copied, which has been judged, and whose losses are written; say
        what has become whole since, and raise what could not be written."""
        if self.saver is not None and self.pending_step:
            self.pending_step = 0
            self._flush_losses()
            self.saver.write()
        elif self.saver is not None and not self.saver.is_writing:
            self.wait()

    def handle_failed_step(self, step: int) -> None:
        """The run stops at a step whose numbers are wrong: what was copied after it is dropped, and
        what was copied before it is written."""
        if self.saver is not None:
            if self.pending_step >= step:
                self.pending_step = 0
                self.saver.cancel()
            self.write()
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is whole.  Raises CheckpointError where it cannot be."""
        if self.saver is not None:
            self.saver.wait()
            if (
                self.saver.saved_checkpoint is not None
                and self.saver.saved_checkpoint.step > self.saved_step
            ):
                self._report_saved(self.saver.saved_checkpoint)

    def close(self) -> None:
        """Nothing comes any more, whatever has ended the run: what is being written becomes whole,
        if that needs no other process, which may be gone."""
        if self.saver is not None and dist.get_world_size() == 1:
            with suppress(CheckpointError, ModelError):  # it is no longer what is wrong
                self.wait()

    def _flush_losses(self) -> None:
        """No checkpoint is of steps whose losses may be lost."""
        if self.losses is not None:
            self.losses.sync_to_disk()

    def _make_extra_state(self, step: int) -> dict[str, Any]:
        taken = self.start_samples + (step - self.start_step) * self.batches.batch_size
        return self.extra_state | {_CURSOR_KEY: self.batches.make_cursor(taken)}

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        self.saved_step = saved.step
        if not dist.get_rank():
            print(f"saved step {saved.step} to {saved.path} in {saved.seconds:.2g} s", flush=True)

    @property
    def description(self) -> str:
        """Which step is saved, and where."""
        folder, steps = self.train.checkpoint_dir, self.train.steps
        if folder is None or not self.saved_step:
            return "no step has been made"
        return (
            f"step {self.saved_step} of {steps} is saved in "
            f"{CheckpointDirectory(folder).locate_step(self.saved_step)}"
        )


def _keep_name(stage: int, name: str) -> str:
    """A GPT's parameters have the names of the whole model."""
    return name
