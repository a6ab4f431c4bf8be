"""The directory of a run's checkpoints: one subdirectory per step, which appears only when
complete.

    step-00000120        whole: renamed to this when all was written, and the manifest last
    step-00000130.tmp    being written; of a run that ended meanwhile, if nobody has the lock
    step-00000120.old    what stands aside while another of its step takes its name
    step-00000110.gone   being removed

So a process may end, or a machine, between any two calls of the system: what is there is whole, or
has another name, and the next that writes tidies up.  Names that are not of these forms are never
touched.  Needs no torch.
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

_locks_by_directory: dict[
    str, DirectoryLock
] = {}  # of this process, by folder: they go when it ends


SelectFiles = Callable[[Manifest], list[str]]  # of its files, those that a process verifies
GatherTexts = Callable[
    [str], list[str]
]  # takes this process's text; returns the texts of all processes
_T = TypeVar("_T")


class LatestCheckpoint(NamedTuple):
    """The newest whole checkpoint, None where none is, and why each newer one was passed over."""

    manifest: Manifest | None
    skip_reasons: tuple[str, ...]


class CheckpointDirectory:
    """The folder of a run's checkpoints, which need not be there yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises UsageError for what names no folder."""
        self.path_text = str(require_path(path))
        if not str(path):
            raise UsageError("'' names no folder", hint="'.' is the one in which the process is")
        try:
            # It stays the same folder when the process goes to another.
            self.path = Path(os.path.abspath(Path(path).expanduser()))
        except RuntimeError as error:
            raise UsageError(f"{self.path_text} names no folder: {error}") from None

    # ------------------------------------------------------------ what is there

    def list_steps(self) -> list[int]:
        """The steps of which there are checkpoints, whole or not, the newest last.

        Raises CheckpointError if the folder cannot be read.
        """
        return sorted(
            {step for step, what in self._scan_entries() if what in ("", _REPLACED_SUFFIX)}
        )

    def locate_step(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        path, aside = self._make_path(step), self._make_path(step, _REPLACED_SUFFIX)
        return aside if not path.exists() and aside.exists() else path

    def get_unfinished_path(self, step: int) -> Path:
        """Where it is written."""
        return self._make_path(step, _UNFINISHED_SUFFIX)

    def load_manifest(self, step: int, *, include_tensors: bool = True) -> Manifest:
        """The manifest of a step's checkpoint; without `include_tensors` quickly, with neither
        these nor boxes.

        Its own digest, its form, and that boxes make up tensors are verified; files are not.
        Raises IncompleteCheckpointError, and CheckpointError for one that cannot be read, or is of
        a format that is not known.
        """
        path = self.locate_step(step)
        try:
            with open_regular_file(path / MANIFEST_NAME, step) as file:
                manifest = read_manifest(file, path.name, include_tensors=include_tensors)
        except CheckpointError as error:
            error.step, error.file = step, MANIFEST_NAME
            raise
        if manifest.step != step:
            raise IncompleteCheckpointError(
                f"{path.name} is not whole: its manifest is of step {manifest.step}",
                step=step,
                file=MANIFEST_NAME,
            )
        return manifest

    def check_files(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Read files of a checkpoint, all unless some are named, and compare them with what the
        manifest says; the sizes of all files before any is read.

        Raises IncompleteCheckpointError if one is another, and CheckpointError if it cannot be
        read.
        """
        self.check_sizes(manifest)
        path, own = self.locate_step(manifest.step), manifest.files if names is None else names
        sizes = {path / name: manifest.files[name].size for name in own}
        for file, digest in compute_digests(sizes, manifest.step):
            if digest != manifest.files[file.name].sha256:
                raise IncompleteCheckpointError(
                    f"{path.name} is not whole: {file.name} is not as it was written",
                    step=manifest.step,
                    file=file.name,
                )

    def check_sizes(self, manifest: Manifest) -> None:
        """Compare the sizes of all files; raises what `check_files` does.

        A file that has been changed may have its size: see `check_files`.
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
        """The newest whole checkpoint, verified, and why each newer one was passed over; or that of
        a step, for which none is passed over.

        Where several processes go on from it, all call this: each verifies the files that
        `own(manifest)` names, those that it will read, or its `manifest.share`; and `agree(text)`
        gives what each process says, by rank.  So all come to the same checkpoint.

        Raises CheckpointError, in all of them, for what cannot be read though it may be whole, as
        of a newer format or with no permission: to go on from an older one would be wrong; and
        IncompleteCheckpointError where that of the step is not whole.
        """
        if step is not None:
            return LatestCheckpoint(self.verify(step, select_files, gather_texts), ())
        passed: list[str] = []
        every = {
            step for steps in _gather_outcomes(self.list_steps, gather_texts) for step in steps
        }
        for newest in sorted(every, reverse=True):  # one that not all see is not whole
            try:
                return LatestCheckpoint(
                    self.verify(newest, select_files, gather_texts), tuple(passed)
                )
            except IncompleteCheckpointError as error:
                passed.append(error.fact)
        return LatestCheckpoint(None, tuple(passed))

    def verify(
        self,
        step: int,
        select_files: SelectFiles | None = None,
        gather_texts: GatherTexts | None = None,
    ) -> Manifest:
        """The manifest of a step's checkpoint, all of whose files are as it says; processes may
        verify them together, as in `find_checkpoint`: where it is not whole for one, all raise what
        that does.

        Raises what `read` and `check_files` do.
        """
        _require_step(step)
        found: list[Manifest] = []

        def digest() -> str:
            manifest = self.load_manifest(step)
            found.append(manifest)
            # This compares the sizes of all: who reads a file may not be who verified it.
            self.check_files(manifest, select_files and select_files(manifest))
            return manifest.digest

        if len({*_gather_outcomes(digest, gather_texts)}) > 1:
            raise IncompleteCheckpointError(
                f"the checkpoint of step {step} is not the same to all processes", step=step
            )
        return found[0]

    def find_newest_step(self) -> int | None:
        """The newest step whose checkpoint is whole, if there is any; raises what `find_checkpoint`
        does."""
        found = self.find_checkpoint().manifest
        return None if found is None else found.step

    # ------------------------------------------------------------ writing

    def claim(self) -> None:
        """Let no other process write here while this one lives; the folder is made if need be.

        `begin` does this, too.  Raises CheckpointError if another has it, or if it cannot be made.
        """
        with translate_os_errors(f"write to {self.path_text}"):
            self.path.mkdir(parents=True, exist_ok=True)
            for key, lock in [*_locks_by_directory.items()]:
                if not lock.is_held:  # its folder has been removed
                    _locks_by_directory.pop(key).release()
            key = os.path.realpath(self.path)
            if key in _locks_by_directory:
                return
            lock = DirectoryLock(self.path / LOCK_FILE)
            try:
                why = lock.acquire()
            except LockHeldError as other:
                raise CheckpointError(
                    f"{self.path_text} is in use by another run"
                    f"{f', {other.owner}' if other.owner else ''}: it saves checkpoints there",
                    hint="each run has a folder of its own",
                ) from None
            if why:
                print_to_stderr(
                    f"{self.path_text} has no locks ({why}): nothing keeps another run out of it"
                )
            _locks_by_directory[key] = lock

    def release(self) -> None:
        """Let other processes write here."""
        if lock := _locks_by_directory.pop(os.path.realpath(self.path), None):
            lock.release()

    def begin(self, step: int) -> Path:
        """Make the folder in which all processes write; of one process, which gets the lock.

        What runs that ended have left unfinished is removed.  Raises CheckpointError.
        """
        _require_step(step)
        self.claim()
        with self.translate_write_errors(step):
            self._remove_leftovers()
            if (path := self._make_path(step)).exists() and not (path / MANIFEST_NAME).is_file():
                raise CheckpointError(
                    f"cannot save step {step}: {path.name} of {self.path_text} is no checkpoint",
                    step=step,
                    hint="move it away",
                )
            self.get_unfinished_path(step).mkdir()
        return self.get_unfinished_path(step)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that will not be finished."""
        self._remove(self.get_unfinished_path(step))

    def remove_all(self) -> None:
        """Remove all checkpoints, the newest last; of one process, which gets the lock.

        Raises CheckpointError where one stays.
        """
        if not self.list_steps():
            return
        self.claim()
        for step, what in sorted(self._scan_entries()):
            self._remove(self._make_path(step, what))
        if left := self.list_steps():
            raise CheckpointError(f"step {left[0]} is still in {self.path_text}", step=left[0])

    def finish(self, manifest: Manifest, keep: int | None = None) -> Path:
        """Let what has been written be the checkpoint of its step; of one process, when all have
        written.

        All is on the disk before it has its name.  Of whole checkpoints up to this step the newest
        `keep` are kept, and older ones removed.  Raises CheckpointError if it is not all there, or
        cannot be written, as on a full disk: nothing is left of it then, and nothing else removed.
        """
        step = manifest.step
        if keep is not None and (type(keep) is not int or keep < 1):
            raise UsageError(f"keep is {keep!r:.60}; it must be 1 or more", fields=["keep"])
        path, to = self.get_unfinished_path(step), self._make_path(step)
        try:
            with self.translate_write_errors(step):
                for name, file in manifest.files.items():
                    self._require_size(path, step, name, file)
                    fsync_path(path / name)
                with (path / MANIFEST_NAME).open("xb") as made:
                    for line in encode_manifest(replace(manifest, finished_at=int(time.time()))):
                        made.write(line)
                fsync_path(path / MANIFEST_NAME)
                fsync_path(path)
                self._replace_directory(path, to, self._make_path(step, _REPLACED_SUFFIX))
        except BaseException:
            self.abandon(step)
            raise
        if keep is not None:
            self._remove_older(step, keep)
        return to

    def _replace_directory(self, path: Path, target: Path, replaced_path: Path) -> None:
        """Give a folder its name; what has it stands aside: one of the two is always there."""
        if replaces := target.exists():
            target.rename(replaced_path)
        try:
            path.rename(target)
        except OSError:
            if replaces:
                with suppress(OSError):
                    replaced_path.rename(target)
            raise
        fsync_path(self.path)
        if replaces:
            self._remove(replaced_path)

    def _remove_leftovers(self) -> None:
        """Remove what runs that ended have left; only who has the lock may do this."""
        for step, what in self._scan_entries():
            path = self._make_path(step, what)
            if what == _REPLACED_SUFFIX and not self._make_path(step).exists():
                path.rename(self._make_path(step))  # the other never took its name
            elif what:
                self._remove(path)

    def _remove_older(self, step: int, keep: int) -> None:
        """Remove what is older than the newest so many whole checkpoints up to a step."""
        whole = 0
        for one in reversed([s for s in self.list_steps() if s <= step]):
            if whole >= keep:
                self._remove(self.locate_step(one))
            else:
                whole += one == step or self._has_all_files(one)

    def _has_all_files(self, step: int) -> bool:
        """Whether a checkpoint has all its files, as far as their sizes tell."""
        try:
            self.check_sizes(self.load_manifest(step, include_tensors=False))
        except CheckpointError:
            return False
        return True

    def _remove(self, path: Path) -> None:
        """Remove a folder, which has another name before the first of its files goes.

        What cannot be removed stays, and is told: a checkpoint that is whole must not fail for it.
        """
        going = path.with_name(path.name.partition(".")[0] + _REMOVING_SUFFIX)
        try:
            if path != going:
                if going.exists():
                    shutil.rmtree(going)
                path.rename(going)
            shutil.rmtree(going)
        except FileNotFoundError:
            pass
        except OSError as error:
            print_to_stderr(f"cannot remove {path.name} of {self.path_text}: {error.strerror}")

    # ------------------------------------------------------------ names

    def _make_path(self, step: int, suffix: str = "") -> Path:
        return self.path / f"{_STEP_PREFIX}{step:08}{suffix}"

    def _scan_entries(self) -> Iterator[tuple[int, str]]:
        """The steps that the folder has by name, and what follows that."""
        try:
            found = [_NAME_PATTERN.fullmatch(entry.name) for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path_text}: {error.strerror}") from None
        for match in found:
            if match and match[1] == f"{int(match[1]):08}":
                yield int(match[1]), match[2]

    def _require_size(self, path: Path, step: int, name: str, file: ManifestFile) -> None:
        """Refuse a file that is not there, or has another size."""
        with open_regular_file(path / name, step) as found:
            size = os.fstat(found.fileno()).st_size
        if size != file.size:
            raise IncompleteCheckpointError(
                f"{path.name} is not whole: {name} has {size:,} bytes, not {file.size:,}",
                step=step,
                file=name,
            )

    def translate_write_errors(
        self, step: int, needed_bytes: int | None = None
    ) -> AbstractContextManager[None]:
        """Turn an OSError in this context into a CheckpointError that names the folder.

        Args:
            step: The step that is saved.
            needed_bytes: The number of bytes that this process writes, if it is known.
        """
        doing = f"save step {step} to {self.path_text}"
        return translate_os_errors(doing, step, directory=self.path, needed_bytes=needed_bytes)


def _require_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**16:
        raise UsageError(f"a step is a whole number from 0, not {step!r:.60}", fields=["step"])


def _gather_outcomes(compute: Callable[[], _T], gather_texts: GatherTexts | None) -> list[_T]:
    """What each process makes, which JSON can say; what any was refused, all are.

    Raises CheckpointError, or IncompleteCheckpointError where nobody raises another.
    """
    if gather_texts is None:
        return [compute()]
    outcome: list[object]
    try:
        outcome = ["", compute(), None, ""]
    except CheckpointError as error:
        kind = "not whole" if isinstance(error, IncompleteCheckpointError) else "refused"
        outcome = [kind, error.fact, error.step, error.file]
    outcomes = [json.loads(one) for one in gather_texts(json.dumps(outcome))]
    for name, raised in (("refused", CheckpointError), ("not whole", IncompleteCheckpointError)):
        for said, fact, step, file in outcomes:
            if said == name:
                raise raised(fact, step, file)
    return [made for _, made, _, _ in outcomes]
