"""Collect what all processes hold, before a checkpoint is written or read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from schedir.checkpoints.checkpoint_directory import TensorMeta
from schedir.checkpoints.checkpoint_group import CheckpointGroup
from schedir.checkpoints.local_state import LocalState, Names, own_of, tied_names
from schedir.checkpoints.manifest import several
from schedir.checkpoints.save_requirements import expect_cut, expect_savable
from schedir.errors import CheckpointError, UsageError, describe
from schedir.runtime.checkpoint_state import CheckpointState, RankCheckpointState
from schedir.runtime.model_checks.tensor_fingerprint import sum_of_bits


class RankManifest(NamedTuple):
    """What a process tells of what it has: by name in the whole model, of which stage it is, and
    what; other names of the same; the weights of each optimizer, and those that are trained and
    stepped by none; and, of who saves, checksums of buffers, and of weights that others reduce,
    each with what is kept of it."""

    parts: list[tuple[str, int, TensorMeta]]
    also: dict[str, str]
    optimizers: dict[str, list[str]]
    left: list[str]
    sums: dict[str, list[int]]


def of_stages(stage: int, name: str) -> str:
    """A name that a number of stages makes, for modules that have none for the whole model."""
    return f"stages.{stage}.{name}"


def kept_of(run: object) -> tuple[CheckpointGroup, CheckpointState]:
    """The processes of a run, and what this one has.  Raises UsageError for what is no run."""
    kept = getattr(run, "kept", None)
    if kept is None or isinstance(run, type):
        raise UsageError(
            "an Executor, an InProcessExecutor or a schedir.torch_pipelining.Schedule is saved "
            f"and loaded, not {describe(run)}"
        )
    found: CheckpointState = kept()
    return CheckpointGroup(found.group, alone=found.alone), found


def known_of(
    peers: CheckpointGroup, kept: CheckpointState, optimizer: object, names: Names, *, saves: bool
) -> tuple[list[RankCheckpointState], list[LocalState], list[RankManifest]]:
    """The ranks of a process, what these have, and what all tell of theirs, the same in all.

    Raises CheckpointError for what cannot be saved, or where two have one name; of who saves also
    where replicas that others reduce are not equal.
    """
    ranks: list[RankCheckpointState] = []

    def name(stage: int, own: str) -> str:
        found = names(stage, own)
        if not isinstance(found, str):
            raise CheckpointError(f"names({stage}, {own!r}) is {describe(found)}, and no text")
        return found

    def tied() -> Any:
        ranks.extend(kept.ranks(optimizer))
        for rank in ranks:
            expect_savable(rank)
        return {key: of for rank in ranks for key, of in tied_names(rank, name).items()}

    first = {key: name for some in peers.told(tied) for key, name in some.items()}
    kept.settle()
    owns: list[LocalState] = []

    def own() -> RankManifest:
        for rank in ranks:
            owns.append(own_of(rank, name, first))
            expect_cut(rank.optimizer, owns[-1])
        return _told_of(ranks, owns, saves=saves)

    known = peers.told(own, [RankManifest, TensorMeta])
    _expect_one_of_each(known)
    return ranks, owns, known


def _told_of(
    ranks: Sequence[RankCheckpointState], owns: Sequence[LocalState], *, saves: bool
) -> RankManifest:
    known = RankManifest([], {}, {}, [], {})
    for rank, own in zip(ranks, owns, strict=True):
        for weight in own.weights:
            parts = [*weight.parts()]
            known.parts.append((parts[0].name, weight.of, parts[0].kind))
            known.also.update(dict.fromkeys(weight.also, weight.name))
            if weight.optimizer is not None and weight.parameter.requires_grad:
                by = type(weight.optimizer).__name__
                known.optimizers.setdefault(by, []).append(weight.name)
            elif rank.reduced_elsewhere and rank.optimizer is not None and weight.is_left:
                known.left.append(weight.name)
            if saves and rank.reduced_elsewhere:
                known.sums[parts[0].name] = [sum_of_bits(part.memory.detach()) for part in parts]
        for stage, part in own.buffers:
            known.parts.append((part.name, stage, part.kind))
            if saves:
                known.sums[part.name] = [sum_of_bits(part.memory.detach())]
    return known


def _expect_one_of_each(known: Sequence[RankManifest]) -> None:
    every: dict[str, tuple[int, TensorMeta]] = {}
    for process, one in enumerate(known):
        for name, stage, kind in one.parts:
            other, there = every.setdefault(name, (stage, kind))
            if other != stage:
                raise CheckpointError(
                    f"stages {other} and {stage} both have {name}",
                    hint="names=..., which gives each its name in the whole model",
                )
            if there != kind:
                raise CheckpointError(
                    f"{name} is {list(there.shape)} of {there.dtype} in one process, and "
                    f"{list(kind.shape)} of {kind.dtype} in process {process}"
                )
    for name, before, process in _differing(known, "weights/"):
        raise CheckpointError(
            f"{name.removeprefix('weights/')}, or what its optimizer keeps, is not the same in "
            f"processes {before} and {process}: they are no replicas, or gradients were not "
            "reduced",
        )


def _differing(known: Sequence[RankManifest], what: str) -> Iterator[tuple[str, int, int]]:
    """The tensors whose names begin so of which two processes have other numbers, and which two."""
    told: dict[str, tuple[int, list[int]]] = {}
    for process, one in enumerate(known):
        for name, sums in one.sums.items():
            before, others = told.setdefault(name, (process, sums))
            if name.startswith(what) and sums != others:
                yield name, before, process


def warn_of_buffers(peers: CheckpointGroup, known: Sequence[RankManifest]) -> None:
    """Say it where a buffer is not the same wherever it is, as of replicas that see other data."""
    for name, *_ in _differing(known, "buffers/"):
        say(peers, f"{name} is not the same in all processes: that of the first is saved")
        return


def warn_of_left(peers: CheckpointGroup, known: Sequence[RankManifest]) -> None:
    """Say it where an optimizer has been given, and it does not step all that is trained: another
    one may, and would be lost."""
    if left := [*dict.fromkeys(name for one in known for name in one.left)]:
        say(peers, f"trained, and stepped by no optimizer that is saved: {several(left)}")


def say(peers: CheckpointGroup, fact: str) -> None:
    """Warn, once for all processes."""
    if not peers.number:
        warnings.warn(fact, stacklevel=4)
