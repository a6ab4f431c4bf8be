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

from schedir.checkpoints.durable_io import digests, opened, sync, tell, writes
from schedir.checkpoints.manifest import IncompleteCheckpointError as IncompleteCheckpointError
from schedir.checkpoints.manifest import Manifest as Manifest
from schedir.checkpoints.manifest import ManifestFile as ManifestFile
from schedir.checkpoints.manifest import StoredSlice as StoredSlice
from schedir.checkpoints.manifest import TensorMeta as TensorMeta
from schedir.checkpoints.manifest_json import MANIFEST as MANIFEST
from schedir.checkpoints.manifest_json import read as read_manifest
from schedir.checkpoints.manifest_json import written
from schedir.errors import CheckpointError, UsageError
from schedir.io.directory_lock import DirectoryLock, LockHeldError
from schedir.io.files import path_of

LOCK: Final = ".checkpoints.lock"
_STEP: Final = "step-"
_UNFINISHED: Final = ".tmp"
_ASIDE: Final = ".old"
_GOING: Final = ".gone"
_NAME = re.compile(rf"{_STEP}(\d{{8,16}})({_UNFINISHED}|{_ASIDE}|{_GOING}|)")

_locks: dict[str, DirectoryLock] = {}  # of this process, by folder: they go when it ends


Share = Callable[[Manifest], list[str]]  # of its files, those that a process verifies
Agree = Callable[[str], list[str]]  # takes this process's text; returns the texts of all processes
_T = TypeVar("_T")


class LatestCheckpoint(NamedTuple):
    """The newest whole checkpoint, None where none is, and why each newer one was passed over."""

    manifest: Manifest | None
    passed: tuple[str, ...]


class CheckpointDirectory:
    """The folder of a run's checkpoints, which need not be there yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises UsageError for what names no folder."""
        self.given = str(path_of(path))
        if not str(path):
            raise UsageError("'' names no folder", hint="'.' is the one in which the process is")
        try:
            # It stays the same folder when the process goes to another.
            self.path = Path(os.path.abspath(Path(path).expanduser()))
        except RuntimeError as error:
            raise UsageError(f"{self.given} names no folder: {error}") from None

    # ------------------------------------------------------------ what is there

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, whole or not, the newest last.

        Raises CheckpointError if the folder cannot be read.
        """
        return sorted({step for step, what in self._names() if what in ("", _ASIDE)})

    def of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        path, aside = self._named(step), self._named(step, _ASIDE)
        return aside if not path.exists() and aside.exists() else path

    def unfinished(self, step: int) -> Path:
        """Where it is written."""
        return self._named(step, _UNFINISHED)

    def read(self, step: int, *, tensors: bool = True) -> Manifest:
        """The manifest of a step's checkpoint; without `tensors` quickly, with neither these nor
        boxes.

        Its own digest, its form, and that boxes make up tensors are verified; files are not.
        Raises IncompleteCheckpointError, and CheckpointError for one that cannot be read, or is of
        a format that is not known.
        """
        path = self.of(step)
        try:
            with opened(path / MANIFEST, step) as file:
                manifest = read_manifest(file, path.name, tensors=tensors)
        except CheckpointError as error:
            error.step, error.file = step, MANIFEST
            raise
        if manifest.step != step:
            raise IncompleteCheckpointError(
                f"{path.name} is not whole: its manifest is of step {manifest.step}",
                step=step,
                file=MANIFEST,
            )
        return manifest

    def check_files(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Read files of a checkpoint, all unless some are named, and compare them with what the
        manifest says; the sizes of all files before any is read.

        Raises IncompleteCheckpointError if one is another, and CheckpointError if it cannot be
        read.
        """
        self.check_sizes(manifest)
        path, own = self.of(manifest.step), manifest.files if names is None else names
        sizes = {path / name: manifest.files[name].size for name in own}
        for file, digest in digests(sizes, manifest.step):
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
            self._require_size(self.of(manifest.step), manifest.step, name, file)

    def find(
        self,
        own: Share | None = None,
        agree: Agree | None = None,
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
            return LatestCheckpoint(self.verify(step, own, agree), ())
        passed: list[str] = []
        every = {step for steps in _agreed(self.steps, agree) for step in steps}
        for newest in sorted(every, reverse=True):  # one that not all see is not whole
            try:
                return LatestCheckpoint(self.verify(newest, own, agree), tuple(passed))
            except IncompleteCheckpointError as error:
                passed.append(error.fact)
        return LatestCheckpoint(None, tuple(passed))

    def verify(self, step: int, own: Share | None = None, agree: Agree | None = None) -> Manifest:
        """The manifest of a step's checkpoint, all of whose files are as it says; processes may
        verify them together, as in `find`: where it is not whole for one, all raise what that does.

        Raises what `read` and `check_files` do.
        """
        _require_step(step)
        found: list[Manifest] = []

        def digest() -> str:
            manifest = self.read(step)
            found.append(manifest)
            # This compares the sizes of all: who reads a file may not be who verified it.
            self.check_files(manifest, own and own(manifest))
            return manifest.digest

        if len({*_agreed(digest, agree)}) > 1:
            raise IncompleteCheckpointError(
                f"the checkpoint of step {step} is not the same to all processes", step=step
            )
        return found[0]

    def newest(self) -> int | None:
        """The newest step whose checkpoint is whole, if there is any; raises what `find` does."""
        found = self.find().manifest
        return None if found is None else found.step

    # ------------------------------------------------------------ writing

    def claim(self) -> None:
        """Let no other process write here while this one lives; the folder is made if need be.

        `begin` does this, too.  Raises CheckpointError if another has it, or if it cannot be made.
        """
        with writes(f"write to {self.given}"):
            self.path.mkdir(parents=True, exist_ok=True)
            for key, lock in [*_locks.items()]:
                if not lock.held:  # its folder has been removed
                    _locks.pop(key).leave()
            key = os.path.realpath(self.path)
            if key in _locks:
                return
            lock = DirectoryLock(self.path / LOCK)
            try:
                why = lock.take()
            except LockHeldError as other:
                raise CheckpointError(
                    f"{self.given} is in use by another run"
                    f"{f', {other.owner}' if other.owner else ''}: it saves checkpoints there",
                    hint="each run has a folder of its own",
                ) from None
            if why:
                tell(f"{self.given} has no locks ({why}): nothing keeps another run out of it")
            _locks[key] = lock

    def release(self) -> None:
        """Let other processes write here."""
        if lock := _locks.pop(os.path.realpath(self.path), None):
            lock.leave()

    def begin(self, step: int) -> Path:
        """Make the folder in which all processes write; of one process, which gets the lock.

        What runs that ended have left unfinished is removed.  Raises CheckpointError.
        """
        _require_step(step)
        self.claim()
        with self.writing(step):
            self._tidy()
            if (path := self._named(step)).exists() and not (path / MANIFEST).is_file():
                raise CheckpointError(
                    f"cannot save step {step}: {path.name} of {self.given} is no checkpoint",
                    step=step,
                    hint="move it away",
                )
            self.unfinished(step).mkdir()
        return self.unfinished(step)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that will not be finished."""
        self._remove(self.unfinished(step))

    def remove_all(self) -> None:
        """Remove all checkpoints, the newest last; of one process, which gets the lock.

        Raises CheckpointError where one stays.
        """
        if not self.steps():
            return
        self.claim()
        for step, what in sorted(self._names()):
            self._remove(self._named(step, what))
        if left := self.steps():
            raise CheckpointError(f"step {left[0]} is still in {self.given}", step=left[0])

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
        path, to = self.unfinished(step), self._named(step)
        try:
            with self.writing(step):
                for name, file in manifest.files.items():
                    self._require_size(path, step, name, file)
                    sync(path / name)
                with (path / MANIFEST).open("xb") as made:
                    for line in written(replace(manifest, when=int(time.time()))):
                        made.write(line)
                sync(path / MANIFEST)
                sync(path)
                self._exchange(path, to, self._named(step, _ASIDE))
        except BaseException:
            self.abandon(step)
            raise
        if keep is not None:
            self._retain(step, keep)
        return to

    def _exchange(self, path: Path, to: Path, aside: Path) -> None:
        """Give a folder its name; what has it stands aside: one of the two is always there."""
        if replaces := to.exists():
            to.rename(aside)
        try:
            path.rename(to)
        except OSError:
            if replaces:
                with suppress(OSError):
                    aside.rename(to)
            raise
        sync(self.path)
        if replaces:
            self._remove(aside)

    def _tidy(self) -> None:
        """Remove what runs that ended have left; only who has the lock may do this."""
        for step, what in self._names():
            path = self._named(step, what)
            if what == _ASIDE and not self._named(step).exists():
                path.rename(self._named(step))  # the other never took its name
            elif what:
                self._remove(path)

    def _retain(self, step: int, keep: int) -> None:
        """Remove what is older than the newest so many whole checkpoints up to a step."""
        whole = 0
        for one in reversed([s for s in self.steps() if s <= step]):
            if whole >= keep:
                self._remove(self.of(one))
            else:
                whole += one == step or self._seems_whole(one)

    def _seems_whole(self, step: int) -> bool:
        """Whether a checkpoint has all its files, as far as their sizes tell."""
        try:
            self.check_sizes(self.read(step, tensors=False))
        except CheckpointError:
            return False
        return True

    def _remove(self, path: Path) -> None:
        """Remove a folder, which has another name before the first of its files goes.

        What cannot be removed stays, and is told: a checkpoint that is whole must not fail for it.
        """
        going = path.with_name(path.name.partition(".")[0] + _GOING)
        try:
            if path != going:
                if going.exists():
                    shutil.rmtree(going)
                path.rename(going)
            shutil.rmtree(going)
        except FileNotFoundError:
            pass
        except OSError as error:
            tell(f"cannot remove {path.name} of {self.given}: {error.strerror}")

    # ------------------------------------------------------------ names

    def _named(self, step: int, what: str = "") -> Path:
        return self.path / f"{_STEP}{step:08}{what}"

    def _names(self) -> Iterator[tuple[int, str]]:
        """The steps that the folder has by name, and what follows that."""
        try:
            found = [_NAME.fullmatch(entry.name) for entry in os.scandir(self.path)]
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"cannot read {self.given}: {error.strerror}") from None
        for match in found:
            if match and match[1] == f"{int(match[1]):08}":
                yield int(match[1]), match[2]

    def _require_size(self, path: Path, step: int, name: str, file: ManifestFile) -> None:
        """Refuse a file that is not there, or has another size."""
        with opened(path / name, step) as found:
            size = os.fstat(found.fileno()).st_size
        if size != file.size:
            raise IncompleteCheckpointError(
                f"{path.name} is not whole: {name} has {size:,} bytes, not {file.size:,}",
                step=step,
                file=name,
            )

    def writing(self, step: int, needed: int | None = None) -> AbstractContextManager[None]:
        """Turn an OSError in this context into a CheckpointError that names the folder.

        Args:
            step: The step that is saved.
            needed: The number of bytes that this process writes, if it is known.
        """
        doing = f"save step {step} to {self.given}"
        return writes(doing, step, folder=self.path, needed=needed)


def _require_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**16:
        raise UsageError(f"a step is a whole number from 0, not {step!r:.60}", fields=["step"])


def _agreed(make: Callable[[], _T], agree: Agree | None) -> list[_T]:
    """What each process makes, which JSON can say; what any was refused, all are.

    Raises CheckpointError, or IncompleteCheckpointError where nobody raises another.
    """
    if agree is None:
        return [make()]
    outcome: list[object]
    try:
        outcome = ["", make(), None, ""]
    except CheckpointError as error:
        kind = "not whole" if isinstance(error, IncompleteCheckpointError) else "refused"
        outcome = [kind, error.fact, error.step, error.file]
    outcomes = [json.loads(one) for one in agree(json.dumps(outcome))]
    for name, raised in (("refused", CheckpointError), ("not whole", IncompleteCheckpointError)):
        for said, fact, step, file in outcomes:
            if said == name:
                raise raised(fact, step, file)
    return [made for _, made, _, _ in outcomes]
