"""Collect what all processes hold, before a checkpoint is written or read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from schedir.checkpoints.checkpoint_directory import TensorMeta
from schedir.checkpoints.checkpoint_group import CheckpointGroup
from schedir.checkpoints.local_state import (
    LocalState,
    NameMap,
    collect_local_state,
    collect_tied_names,
)
from schedir.checkpoints.manifest import join_facts
from schedir.checkpoints.save_requirements import require_savable, require_sliceable_state
from schedir.errors import CheckpointError, UsageError, describe
from schedir.runtime.checkpoint_state import CheckpointState, RankCheckpointState
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksum


class RankManifest(NamedTuple):
    """What a process tells of what it has: by name in the whole model, of which stage it is, and
    what; other names of the same; the weights of each optimizer, and those that are trained and
    stepped by none; and, of who saves, checksums of buffers, and of weights that others reduce,
    each with what is kept of it."""

    tensors: list[tuple[str, int, TensorMeta]]
    aliases: dict[str, str]
    optimizers: dict[str, list[str]]
    unoptimized: list[str]
    checksums: dict[str, list[int]]


def add_stage_prefix(stage: int, name: str) -> str:
    """A name that a number of stages makes, for modules that have none for the whole model."""
    return f"stages.{stage}.{name}"


def get_checkpoint_state(run: object) -> tuple[CheckpointGroup, CheckpointState]:
    """The processes of a run, and what this one has.  Raises UsageError for what is no run."""
    kept = getattr(run, "checkpoint_state", None)
    if kept is None or isinstance(run, type):
        raise UsageError(
            "an Executor, an InProcessExecutor or a schedir.torch_pipelining.Schedule is saved "
            f"and loaded, not {describe(run)}"
        )
    found: CheckpointState = kept()
    return CheckpointGroup(found.group, is_single_process=found.is_single_process), found


def gather_checkpoint_states(
    peers: CheckpointGroup,
    state: CheckpointState,
    optimizer: object,
    name_map: NameMap,
    *,
    is_saving: bool,
) -> tuple[list[RankCheckpointState], list[LocalState], list[RankManifest]]:
    """The ranks of a process, what these have, and what all tell of theirs, the same in all.

    Raises CheckpointError for what cannot be saved, or where two have one name; of who saves also
    where replicas that others reduce are not equal.
    """
    ranks: list[RankCheckpointState] = []

    def name(stage: int, own: str) -> str:
        found = name_map(stage, own)
        if not isinstance(found, str):
            raise CheckpointError(f"name_map({stage}, {own!r}) is {describe(found)}, and no text")
        return found

    def tied() -> Any:
        ranks.extend(state.collect_rank_states(optimizer))
        for rank in ranks:
            require_savable(rank)
        return {key: of for rank in ranks for key, of in collect_tied_names(rank, name).items()}

    first = {key: name for some in peers.gather_results(tied) for key, name in some.items()}
    state.validate_last_update()
    owns: list[LocalState] = []

    def own() -> RankManifest:
        for rank in ranks:
            owns.append(collect_local_state(rank, name, first))
            require_sliceable_state(rank.optimizer, owns[-1])
        return _build_rank_manifest(ranks, owns, is_saving=is_saving)

    known = peers.gather_results(own, [RankManifest, TensorMeta])
    _require_consistent(known)
    return ranks, owns, known


def _build_rank_manifest(
    ranks: Sequence[RankCheckpointState], local_states: Sequence[LocalState], *, is_saving: bool
) -> RankManifest:
    known = RankManifest([], {}, {}, [], {})
    for rank, own in zip(ranks, local_states, strict=True):
        for weight in own.weights:
            parts = [*weight.iterate_shards()]
            known.tensors.append((parts[0].name, weight.owner_stage, parts[0].meta))
            known.aliases.update(dict.fromkeys(weight.aliases, weight.name))
            if weight.optimizer is not None and weight.parameter.requires_grad:
                by = type(weight.optimizer).__name__
                known.optimizers.setdefault(by, []).append(weight.name)
            elif (
                rank.has_external_reduction
                and rank.optimizer is not None
                and weight.lacks_optimizer
            ):
                known.unoptimized.append(weight.name)
            if is_saving and rank.has_external_reduction:
                known.checksums[parts[0].name] = [
                    compute_checksum(part.memory.detach()) for part in parts
                ]
        for stage, part in own.buffers:
            known.tensors.append((part.name, stage, part.meta))
            if is_saving:
                known.checksums[part.name] = [compute_checksum(part.memory.detach())]
    return known


def _require_consistent(manifests: Sequence[RankManifest]) -> None:
    every: dict[str, tuple[int, TensorMeta]] = {}
    for process, one in enumerate(manifests):
        for name, stage, kind in one.tensors:
            other, there = every.setdefault(name, (stage, kind))
            if other != stage:
                raise CheckpointError(
                    f"stages {other} and {stage} both have {name}",
                    hint="name_map=..., which gives each its name in the whole model",
                )
            if there != kind:
                raise CheckpointError(
                    f"{name} is {list(there.shape)} of {there.dtype} in one process, and "
                    f"{list(kind.shape)} of {kind.dtype} in process {process}"
                )
    for name, before, process in _find_differing_tensors(manifests, "weights/"):
        raise CheckpointError(
            f"{name.removeprefix('weights/')}, or what its optimizer keeps, is not the same in "
            f"processes {before} and {process}: they are no replicas, or gradients were not "
            "reduced",
        )


def _find_differing_tensors(
    manifests: Sequence[RankManifest], prefix: str
) -> Iterator[tuple[str, int, int]]:
    """The tensors whose names begin so of which two processes have other numbers, and which two."""
    told: dict[str, tuple[int, list[int]]] = {}
    for process, one in enumerate(manifests):
        for name, sums in one.checksums.items():
            before, others = told.setdefault(name, (process, sums))
            if name.startswith(prefix) and sums != others:
                yield name, before, process


def warn_of_differing_buffers(peers: CheckpointGroup, manifests: Sequence[RankManifest]) -> None:
    """Say it where a buffer is not the same wherever it is, as of replicas that see other data."""
    for name, *_ in _find_differing_tensors(manifests, "buffers/"):
        warn_once(peers, f"{name} is not the same in all processes: that of the first is saved")
        return


def warn_of_unoptimized(peers: CheckpointGroup, manifests: Sequence[RankManifest]) -> None:
    """Say it where an optimizer has been given, and it does not step all that is trained: another
    one may, and would be lost."""
    if left := [*dict.fromkeys(name for one in manifests for name in one.unoptimized)]:
        warn_once(peers, f"trained, and stepped by no optimizer that is saved: {join_facts(left)}")


def warn_once(peers: CheckpointGroup, fact: str) -> None:
    """Warn, once for all processes."""
    if not peers.process:
        warnings.warn(fact, stacklevel=4)
