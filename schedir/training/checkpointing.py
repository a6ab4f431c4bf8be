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
    """The checkpoints of one rank of a training run, in `train.checkpoint_dir`.

    Without `train.checkpoint_dir` no checkpoint is read or written. If the program has checkpoint
    snapshots, step n + 1 copies the state after step n, and a thread writes the files during later
    steps. Otherwise `save` writes the files between two steps. Process 0 prints each checkpoint
    that is loaded or saved. All processes must create this object together.

    Args:
        executor: The executor of this rank.
        train: The section [train] of the configuration.
        batches: The training samples. A checkpoint stores the number of samples that were used.
        losses: The loss log of the run on process 0. None on all other processes.

    Attributes:
        start_step: The number of steps that were complete when this process began.
        start_samples: The number of samples that these steps used, summed over all replicas.
        saved_step: The step of the newest complete checkpoint, or 0 if there is none.
        pending_step: The last complete step when a copy was requested, until `write` begins to
            write this copy. 0 if there is no such copy.
        extra_state: The name and the settings of the run, which each checkpoint stores.
    """

    def __init__(
        self, executor: Executor, train: TrainConfig, batches: Batches, losses: LossLog | None
    ) -> None:
        self.executor = executor
        self.train = train
        self.batches = batches
        self.losses = losses
        self.start_step = self.start_samples = self.saved_step = 0
        self.pending_step = 0
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
        """Load the newest complete checkpoint, and return the number of complete steps.

        All processes must call this. With `train.resume = "no"` this method loads nothing. Process
        0 prints the settings that changed since the checkpoint.

        Returns:
            The number of complete steps, or 0 if there is no checkpoint.

        Raises:
            CheckpointError: There are checkpoints, but none of them is complete.
            ModelError: The run of the checkpoint has different samples than this run.
        """
        train, folder = self.train, self.train.checkpoint_dir
        if folder is None:
            return 0
        run = None if self.losses is None else self.losses.run
        self.extra_state = broadcast(None if run is None else run.extra_state, 0)
        if train.resume == "no":
            return 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = load(self.executor, folder, name_map=_keep_name)
        for warning in caught:
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
        """Return whether to save the state after `step` before the next step begins.

        Args:
            step: The step, from 1. The last step is always saved. Other steps are saved between
                steps only if the program has no snapshots.
        """
        train = self.train
        if train.checkpoint_dir is None:
            return False
        return step == train.steps or (self.saver is None and step % train.checkpoint_every == 0)

    def should_copy(self, step: int) -> bool:
        """Return whether step `step` + 1 must copy the state after `step`.

        Args:
            step: The step, from 1.
        """
        return (
            self.saver is not None
            and step > self.start_step
            and step % self.train.checkpoint_every == 0
        )

    def save(self, step: int) -> None:
        """Save the state after a step, and return when the checkpoint is complete.

        All processes must call this, after it is certain that the loss and the gradients of the
        step are finite.

        Args:
            step: The step, from 1.

        Raises:
            CheckpointError: This checkpoint or the previous one cannot be written.
        """
        folder, start_time = self.train.checkpoint_dir, perf_counter()
        assert folder is not None
        self.wait()
        self._flush_losses()
        extra = self._make_extra_state(step)
        save_plan = plan_save(self.executor, step=step, name_map=_keep_name, extra_state=extra)
        path = write_checkpoint(
            save_plan, folder, keep=self.train.checkpoint_keep, group=self.group
        )
        self._report_saved(SavedCheckpoint(step, path, perf_counter() - start_time))

    def schedule_copy(self, step: int) -> None:
        """Request that the next step copies the current state.

        This method waits until the previous checkpoint is complete.

        Args:
            step: The last complete step, from 1.

        Raises:
            CheckpointError: The previous checkpoint cannot be written.
        """
        assert self.saver is not None
        self.wait()
        self.saver.schedule_save(step, self._make_extra_state(step))
        self.pending_step = step

    def write(self) -> None:
        """Begin to write a copied state, if there is one.

        Without a copied state, report the previous checkpoint if it is complete. Call this after it
        is certain that the losses and gradients of the copied step are finite. The losses are
        flushed to the disk before the checkpoint is written.

        Raises:
            CheckpointError: The previous checkpoint cannot be written.
            ModelError: No step has copied the state, or the weights were changed before the copy.
        """
        if self.saver is not None and self.pending_step:
            self.pending_step = 0
            self._flush_losses()
            self.saver.write()
        elif self.saver is not None and not self.saver.is_writing:
            self.wait()

    def handle_failed_step(self, step: int) -> None:
        """Discard a copy of the state after a failed step, and complete the previous checkpoint.

        Args:
            step: The step, from 1, whose loss or gradients are not finite.

        Raises:
            CheckpointError: The previous checkpoint cannot be written.
        """
        if self.saver is not None:
            if self.pending_step >= step:
                self.pending_step = 0
                self.saver.cancel()
            self.write()
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete, and report it.

        Raises:
            CheckpointError: The checkpoint cannot be written.
        """
        if self.saver is not None:
            self.saver.wait()
            if (
                self.saver.saved_checkpoint is not None
                and self.saver.saved_checkpoint.step > self.saved_step
            ):
                self._report_saved(self.saver.saved_checkpoint)

    def close(self) -> None:
        """Complete the checkpoint that is being written, when the run ends for any reason.

        With several processes this method does nothing, because other processes may have exited.
        """
        if self.saver is not None and dist.get_world_size() == 1:
            with suppress(CheckpointError, ModelError):  # The run reports another error.
                self.wait()

    def _flush_losses(self) -> None:
        """Flush the losses to the disk before the checkpoint of their steps is complete."""
        if self.losses is not None:
            self.losses.sync_to_disk()

    def _make_extra_state(self, step: int) -> dict[str, Any]:
        samples = self.start_samples + (step - self.start_step) * self.batches.batch_size
        return self.extra_state | {_CURSOR_KEY: self.batches.make_cursor(samples)}

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        self.saved_step = saved.step
        if not dist.get_rank():
            print(f"saved step {saved.step} to {saved.path} in {saved.seconds:.2g} s", flush=True)

    @property
    def description(self) -> str:
        """Return a text with the newest saved step and its directory."""
        folder, steps = self.train.checkpoint_dir, self.train.steps
        if folder is None or not self.saved_step:
            return "no step is saved"
        return (
            f"step {self.saved_step} of {steps} is saved in "
            f"{CheckpointDirectory(folder).locate_step(self.saved_step)}"
        )


def _keep_name(stage: int, name: str) -> str:
    """Return the name unchanged: parameters of a stage have the names of the complete model."""
    return name
