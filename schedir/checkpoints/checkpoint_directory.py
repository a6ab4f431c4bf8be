"""Manage the directory of a run's checkpoints, which has one subdirectory per step.

    step-00000120        complete: gets this name after all files and the manifest were written
    step-00000130.tmp    incomplete: being written, or left by a run that ended while it wrote
    step-00000120.old    the replaced checkpoint, while a new one of the same step takes its name
    step-00000110.gone   being removed

A process or a machine may stop between any two system calls. Even then, a directory without a
suffix contains all files of its checkpoint. The next process that writes removes the leftovers.
Files and directories with other names stay unchanged. This module does not need torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from difflib import get_close_matches
from operator import index
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from schedir.checkpoints.durable_io import (
    compute_digests,
    fsync_path,
    open_regular_file,
    print_to_stderr,
    translate_os_errors,
)
from schedir.checkpoints.manifest import IncompleteCheckpointError as IncompleteCheckpointError
from schedir.checkpoints.manifest import Manifest as Manifest
from schedir.checkpoints.manifest import ManifestFile as ManifestFile
from schedir.checkpoints.manifest import StoredSlice as StoredSlice
from schedir.checkpoints.manifest import TensorMeta as TensorMeta
from schedir.checkpoints.manifest_json import MANIFEST_NAME as MANIFEST_NAME
from schedir.checkpoints.manifest_json import encode_manifest
from schedir.checkpoints.manifest_json import read_manifest as read_manifest
from schedir.errors import CheckpointError, UsageError
from schedir.io.directory_lock import DirectoryLock, LockHeldError
from schedir.io.files import require_path

LOCK_FILE: Final = ".checkpoints.lock"
_STEP_PREFIX: Final = "step-"
_UNFINISHED_SUFFIX: Final = ".tmp"
_REPLACED_SUFFIX: Final = ".old"
_REMOVING_SUFFIX: Final = ".gone"
_NAME_PATTERN = re.compile(
    rf"{_STEP_PREFIX}(\d{{8,16}})({_UNFINISHED_SUFFIX}|{_REPLACED_SUFFIX}|{_REMOVING_SUFFIX}|)"
)
_WORD_SEPARATORS = re.compile(r"[\W\d_]+")

# The locks that this process has, by real path of the directory. The operating system releases
# these locks when the process ends.
_locks_by_directory: dict[str, DirectoryLock] = {}


SelectFiles = Callable[[Manifest], list[str]]  # manifest -> the files that this process verifies
GatherTexts = Callable[[str], list[str]]  # text of this process -> texts of all processes
_T = TypeVar("_T")


class LatestCheckpoint(NamedTuple):
    """The newest complete checkpoint of a directory.

    Attributes:
        manifest: The manifest of this checkpoint, or None if no checkpoint is complete.
        skip_reasons: For each newer checkpoint, the reason why it was skipped. The newest is first.
    """

    manifest: Manifest | None
    skip_reasons: tuple[str, ...]


def _is_misspelled(name: str, known_name: str) -> bool:
    """Return whether two names differ slightly in one word of at least four letters."""
    words, known_words = (_WORD_SEPARATORS.split(text) for text in (name, known_name))
    if len(words) != len(known_words):
        return False
    pairs = [pair for pair in zip(words, known_words, strict=True) if pair[0] != pair[1]]
    if len(pairs) != 1:
        return False
    ((word, known_word),) = pairs
    return min(len(word), len(known_word)) >= 4 and bool(
        get_close_matches(word, [known_word], cutoff=0.8)
    )


class CheckpointDirectory:
    """The directory of a run's checkpoints.

    Args:
        path: The directory, which need not exist. A relative path stays the same directory if the
            process changes its working directory later.

    Raises:
        UsageError: `path` is empty, or is not a valid path.
        CheckpointError: `path` is a single checkpoint, not a directory of checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path_text = str(require_path(path))
        if not str(path):
            raise UsageError("directory is '', not a path", hint="'.' is the current directory")
        try:
            self.path = Path(os.path.abspath(Path(path).expanduser()))
        except RuntimeError as error:
            raise UsageError(f"directory {self.path_text} cannot be used: {error}") from None
        if os.path.exists(self.path / MANIFEST_NAME):
            raise CheckpointError(
                f"{self.path_text} is a single checkpoint, not a directory of checkpoints",
                hint=f"use the directory that contains this checkpoint: {Path(path).parent}",
            )

    # ------------------------------------------------------------ reading

    def list_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, complete or not, in ascending order.

        Raises:
            CheckpointError: The directory cannot be read.
        """
        return sorted(
            {step for step, suffix in self._scan_entries() if suffix in ("", _REPLACED_SUFFIX)}
        )

    def find_similar_directory(self) -> str:
        """Return a directory of checkpoints with a similar name if this directory does not exist.

        Names are similar if one word of at least four letters is spelled slightly differently. So
        run1 and run2, or run_a and run_b, are not similar: they are often two runs. The result is
        "" if there is no such directory.
        """
        if os.path.lexists(self.path):
            return ""
        try:
            names = sorted(path.name for path in self.path.parent.iterdir() if path.is_dir())
        except OSError:
            return ""
        for name in names:
            if _is_misspelled(self.path.name, name):
                with suppress(CheckpointError):
                    if CheckpointDirectory(self.path.with_name(name)).list_steps():
                        return str(Path(self.path_text).with_name(name))
        return ""

    def locate_step(self, step: int) -> Path:
        """Return the directory of a step's checkpoint. The directory need not exist.

        If a save was interrupted while it replaced this checkpoint, the result is the `.old`
        directory.

        Args:
            step: The step.
        """
        path = self._make_path(step)
        replaced_path = self._make_path(step, _REPLACED_SUFFIX)
        return replaced_path if not path.exists() and replaced_path.exists() else path

    def get_unfinished_path(self, step: int) -> Path:
        """Return the directory in which a step's checkpoint is written until it is complete.

        Args:
            step: The step.
        """
        return self._make_path(step, _UNFINISHED_SUFFIX)

    def load_manifest(self, step: int, *, include_tensors: bool = True) -> Manifest:
        """Read and verify the manifest of a step's checkpoint.

        This method verifies the digest and the format of the manifest, and that the slices in the
        manifest cover each tensor exactly. It does not verify the other files.

        Args:
            step: The step.
            include_tensors: True to read tensors and slices, too. False makes reading fast.

        Raises:
            IncompleteCheckpointError: The manifest is missing, damaged, or of another step.
            CheckpointError: The manifest cannot be read, or its format is of another version.
        """
        path = self.locate_step(step)
        try:
            with open_regular_file(path / MANIFEST_NAME, step) as file:
                manifest = read_manifest(file, path.name, include_tensors=include_tensors)
        except CheckpointError as error:
            error.step = step
            error.file = MANIFEST_NAME
            raise
        if manifest.step != step:
            raise IncompleteCheckpointError(
                f"{path.name} is not complete: its manifest is for step {manifest.step}",
                step=step,
                file=MANIFEST_NAME,
            )
        return manifest

    def check_files(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Compare files of a checkpoint with their digests in the manifest.

        The sizes of all files are compared first, before any file is read.

        Args:
            manifest: The manifest.
            names: The files to read. By default all files are read.

        Raises:
            IncompleteCheckpointError: A file is missing, or differs from the manifest.
            CheckpointError: A file cannot be read.
        """
        self.check_sizes(manifest)
        path = self.locate_step(manifest.step)
        selected_names = manifest.files if names is None else names
        sizes = {path / name: manifest.files[name].size for name in selected_names}
        for file, digest in compute_digests(sizes, manifest.step):
            if digest != manifest.files[file.name].sha256:
                raise IncompleteCheckpointError(
                    f"{path.name} is not complete: {file.name} does not match its digest",
                    step=manifest.step,
                    file=file.name,
                )

    def check_sizes(self, manifest: Manifest) -> None:
        """Compare the sizes of all files with the manifest. Raises the errors of `check_files`.

        Only `check_files` detects a changed file that has the same size.

        Args:
            manifest: The manifest.
        """
        for name, file in manifest.files.items():
            self._require_size(self.locate_step(manifest.step), manifest.step, name, file)

    def find_checkpoint(
        self,
        select_files: SelectFiles | None = None,
        gather_texts: GatherTexts | None = None,
        *,
        step: int | None = None,
    ) -> LatestCheckpoint:
        """Find and verify the newest complete checkpoint, or the checkpoint of a given step.

        If several processes load the checkpoint, all of them call this method together. Each
        process then verifies only some of the files, and all processes get the same checkpoint.

        Args:
            select_files: Returns the files of a manifest that this process verifies, for example
                the files that this process will read, or the result of `Manifest.assign_files`. By
                default this process verifies all files.
            gather_texts: Takes the text of this process, and returns the texts of all processes in
                order of rank. By default this process works alone.
            step: The step of the checkpoint. By default the result is the newest complete
                checkpoint, and newer incomplete checkpoints are skipped.

        Raises:
            CheckpointError: A checkpoint cannot be read, but may be complete. For example, it has a
                newer format or the process has no permission. Such a checkpoint is not skipped,
                because resuming from an older checkpoint would lose steps. All processes raise this
                error.
            IncompleteCheckpointError: `step` is given, and its checkpoint is incomplete. All
                processes raise this error.
        """
        skip_reasons: list[str] = []
        all_steps = {
            step for steps in _gather_outcomes(self.list_steps, gather_texts) for step in steps
        }
        if step is not None:
            if step not in all_steps:
                raise CheckpointError(
                    f"there is no checkpoint of step {step} in {self.path_text}",
                    hint=f"the steps are {', '.join(map(str, sorted(all_steps)))}"
                    if all_steps
                    else "",
                )
            return LatestCheckpoint(self.verify(step, select_files, gather_texts), ())
        # If only some processes find the checkpoint of a step, this checkpoint is skipped as
        # incomplete.
        for candidate in sorted(all_steps, reverse=True):
            try:
                return LatestCheckpoint(
                    self.verify(candidate, select_files, gather_texts), tuple(skip_reasons)
                )
            except IncompleteCheckpointError as error:
                skip_reasons.append(error.fact)
        return LatestCheckpoint(None, tuple(skip_reasons))

    def verify(
        self,
        step: int,
        select_files: SelectFiles | None = None,
        gather_texts: GatherTexts | None = None,
    ) -> Manifest:
        """Verify all files of a step's checkpoint, and return its manifest.

        Several processes may verify the files together, as in `find_checkpoint`. If the checkpoint
        is incomplete for one process, all processes raise the same error.

        Args:
            step: The step.
            select_files: Returns the files of a manifest that this process verifies. By default
                this process verifies all files.
            gather_texts: Takes the text of this process, and returns the texts of all processes.

        Raises:
            UsageError: `step` is not a valid step.
            IncompleteCheckpointError: The checkpoint is incomplete, or differs between processes.
            CheckpointError: A file cannot be read.
        """
        _require_step(step)
        manifests: list[Manifest] = []

        def digest() -> str:
            manifest = self.load_manifest(step)
            manifests.append(manifest)
            # Each process compares the sizes of all files, because it may later read files whose
            # digests another process has verified.
            self.check_files(manifest, select_files and select_files(manifest))
            return manifest.digest

        if len({*_gather_outcomes(digest, gather_texts)}) > 1:
            raise IncompleteCheckpointError(
                f"processes read different checkpoints of step {step}", step=step
            )
        return manifests[0]

    def find_newest_step(self) -> int | None:
        """Return the newest step with a complete checkpoint, or None if there is none.

        Raises:
            CheckpointError: See `find_checkpoint`.
        """
        manifest = self.find_checkpoint().manifest
        return None if manifest is None else manifest.step

    # ------------------------------------------------------------ writing

    def claim(self) -> None:
        """Lock the directory, so that no other process writes to it.

        The lock is released by `release`, or when this process ends. The directory is created if it
        does not exist. `begin` calls this, too. If the file system has no locks, this method prints
        a warning to stderr.

        Raises:
            CheckpointError: Another run has the lock, or the directory cannot be created.
        """
        with translate_os_errors(f"write to {self.path_text}"):
            self.path.mkdir(parents=True, exist_ok=True)
            for key, lock in [*_locks_by_directory.items()]:
                if not lock.is_held:  # The directory of the lock was removed.
                    _locks_by_directory.pop(key).release()
            key = os.path.realpath(self.path)
            if key in _locks_by_directory:
                return
            lock = DirectoryLock(self.path / LOCK_FILE)
            try:
                reason = lock.acquire()
            except LockHeldError as error:
                raise CheckpointError(
                    f"another run{f', {error.owner},' if error.owner else ''} saves checkpoints to "
                    f"{self.path_text}",
                    hint="use a different folder for each run",
                ) from None
            if reason:
                print_to_stderr(
                    f"{self.path_text} has no locks ({reason}): do not start a second run that "
                    "uses it"
                )
            _locks_by_directory[key] = lock

    def release(self) -> None:
        """Release the lock of the directory, so that other processes can write to it."""
        if lock := _locks_by_directory.pop(os.path.realpath(self.path), None):
            lock.release()

    def begin(self, step: int) -> Path:
        """Create the directory to which all processes write the checkpoint of a step.

        Only one process calls this, and gets the lock of the directory. The call also removes the
        leftovers of interrupted saves.

        Args:
            step: The step.

        Returns:
            The directory with the suffix `.tmp`.

        Raises:
            UsageError: `step` is not a valid step.
            CheckpointError: Another run has the lock, the step's directory exists without a
                manifest, or the directory cannot be written.
        """
        _require_step(step)
        self.claim()
        with self.translate_write_errors(step):
            self._remove_leftovers()
            if (path := self._make_path(step)).exists() and not (path / MANIFEST_NAME).is_file():
                raise CheckpointError(
                    f"cannot save step {step}: {path.name} in {self.path_text} is not a checkpoint",
                    step=step,
                    hint=f"move {path.name} to another folder",
                )
            self.get_unfinished_path(step).mkdir()
        return self.get_unfinished_path(step)

    def abandon(self, step: int) -> None:
        """Remove the files of a checkpoint that will not be finished.

        Args:
            step: The step.
        """
        self._remove(self.get_unfinished_path(step))

    def remove_all(self) -> None:
        """Remove all checkpoints, the newest last.

        Only one process calls this, and gets the lock of the directory.

        Raises:
            CheckpointError: Another run has the lock, or a checkpoint could not be removed.
        """
        if not self.list_steps():
            return
        self.claim()
        for step, suffix in sorted(self._scan_entries()):
            self._remove(self._make_path(step, suffix))
        if remaining_steps := self.list_steps():
            raise CheckpointError(
                f"cannot remove step {remaining_steps[0]} of {self.path_text}",
                step=remaining_steps[0],
            )

    def finish(self, manifest: Manifest, keep: int | None = None) -> Path:
        """Complete the checkpoint of a step, after all processes have written their files.

        Only one process calls this. All data is flushed to the disk before the directory gets its
        final name. If `finish` fails, it removes only the unfinished checkpoint.

        Args:
            manifest: The manifest to write.
            keep: The number of checkpoints to keep: the newest complete checkpoints up to this
                step. Older checkpoints are removed. By default all checkpoints are kept.

        Returns:
            The directory of the checkpoint.

        Raises:
            UsageError: `keep` is not a positive integer.
            CheckpointError: A file is missing, its size differs from the manifest, or the system
                could not write, for example because the disk is full.
        """
        step = manifest.step
        if keep is not None and (type(keep) is not int or keep < 1):
            raise UsageError(
                f"keep must be an integer of 1 or more, not {keep!r:.60}", fields=["keep"]
            )
        path = self.get_unfinished_path(step)
        target = self._make_path(step)
        try:
            with self.translate_write_errors(step):
                for name, file in manifest.files.items():
                    self._require_size(path, step, name, file)
                    fsync_path(path / name)
                with (path / MANIFEST_NAME).open("xb") as manifest_file:
                    for line in encode_manifest(replace(manifest, finished_at=int(time.time()))):
                        manifest_file.write(line)
                fsync_path(path / MANIFEST_NAME)
                fsync_path(path)
                self._replace_directory(path, target, self._make_path(step, _REPLACED_SUFFIX))
        except BaseException:
            self.abandon(step)
            raise
        if keep is not None:
            self._remove_older(step, keep)
        return target

    def _replace_directory(self, path: Path, target: Path, replaced_path: Path) -> None:
        """Rename `path` to `target`. An existing target is first renamed to `replaced_path`.

        At any moment, the old or the new checkpoint exists. If the second rename fails, the first
        rename is undone.
        """
        if has_target := target.exists():
            target.rename(replaced_path)
        try:
            path.rename(target)
        except OSError:
            if has_target:
                with suppress(OSError):
                    replaced_path.rename(target)
            raise
        fsync_path(self.path)
        if has_target:
            self._remove(replaced_path)

    def _remove_leftovers(self) -> None:
        """Remove the leftovers of interrupted saves.

        Only the process with the lock may call this.
        """
        for step, suffix in self._scan_entries():
            path = self._make_path(step, suffix)
            if suffix == _REPLACED_SUFFIX and not self._make_path(step).exists():
                # The save was interrupted before it renamed the new checkpoint.
                path.rename(self._make_path(step))
            elif suffix:
                self._remove(path)

    def _remove_older(self, step: int, keep: int) -> None:
        """Remove checkpoints older than the `keep` newest complete checkpoints up to `step`."""
        num_complete = 0
        for other_step in reversed([s for s in self.list_steps() if s <= step]):
            if num_complete >= keep:
                self._remove(self.locate_step(other_step))
            else:
                num_complete += other_step == step or self._has_all_files(other_step)

    def _has_all_files(self, step: int) -> bool:
        """Return whether all files of a checkpoint exist with the right sizes."""
        try:
            self.check_sizes(self.load_manifest(step, include_tensors=False))
        except CheckpointError:
            return False
        return True

    def _remove(self, path: Path) -> None:
        """Rename a directory, and then remove it.

        If the removal fails, this method only prints a message to stderr. A save must not fail
        because an old checkpoint cannot be removed.
        """
        removing_path = path.with_name(path.name.partition(".")[0] + _REMOVING_SUFFIX)
        try:
            if path != removing_path:
                if removing_path.exists():
                    shutil.rmtree(removing_path)
                path.rename(removing_path)
            shutil.rmtree(removing_path)
        except FileNotFoundError:
            pass
        except OSError as error:
            print_to_stderr(f"cannot remove {path.name} in {self.path_text}: {error.strerror}")

    # ------------------------------------------------------------ names

    def _make_path(self, step: int, suffix: str = "") -> Path:
        return self.path / f"{_STEP_PREFIX}{step:08}{suffix}"

    def _scan_entries(self) -> Iterator[tuple[int, str]]:
        """Yield the step and the suffix of each checkpoint directory."""
        try:
            matches = [_NAME_PATTERN.fullmatch(entry.name) for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path_text}: {error.strerror}") from None
        for match in matches:
            if match and match[1] == f"{int(match[1]):08}":
                yield int(match[1]), match[2]

    def _require_size(self, path: Path, step: int, name: str, file: ManifestFile) -> None:
        """Raise IncompleteCheckpointError if a file is missing or its size is not `file.size`."""
        with open_regular_file(path / name, step) as stream:
            size = os.fstat(stream.fileno()).st_size
        if size != file.size:
            raise IncompleteCheckpointError(
                f"{path.name} is not complete: {name} has {size:,} bytes instead of {file.size:,}",
                step=step,
                file=name,
            )

    def translate_write_errors(
        self, step: int, needed_bytes: int | None = None
    ) -> AbstractContextManager[None]:
        """Convert an OSError in this context to a CheckpointError that names the directory.

        Args:
            step: The step that is saved.
            needed_bytes: The number of bytes that this process writes, or None if it is unknown.
        """
        action = f"save step {step} to {self.path_text}"
        return translate_os_errors(action, step, directory=self.path, needed_bytes=needed_bytes)


def to_python_integer(step: int) -> int:
    """Return an integer of another library, such as NumPy, as an integer of Python.

    Other values are returned unchanged, and refused where they are used.

    Args:
        step: The step that the user gave.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        return step
    try:
        return index(step)
    except TypeError:
        return step  # such as a tensor with several elements


def _require_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**16:
        raise UsageError(f"step must be an integer of 0 or more, not {step!r:.60}", fields=["step"])


def _gather_outcomes(compute: Callable[[], _T], gather_texts: GatherTexts | None) -> list[_T]:
    """Call `compute` in each process, and return the results of all processes, as JSON values.

    If `compute` fails in one process, all processes raise the error. If several processes fail, a
    CheckpointError has precedence over an IncompleteCheckpointError.
    """
    if gather_texts is None:
        return [compute()]
    outcome: list[object]
    try:
        outcome = ["", compute(), None, ""]
    except CheckpointError as error:
        kind = "incomplete" if isinstance(error, IncompleteCheckpointError) else "refused"
        outcome = [kind, error.fact, error.step, error.file]
    outcomes = [json.loads(text) for text in gather_texts(json.dumps(outcome))]
    for kind_name, error_type in (
        ("refused", CheckpointError),
        ("incomplete", IncompleteCheckpointError),
    ):
        for found_kind, fact, step, file in outcomes:
            if found_kind == kind_name:
                raise error_type(fact, step, file)
    return [value for _, value, _, _ in outcomes]
