"""Exchange descriptions of tensors between processes, before a save or a load."""

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
from schedir.runtime.parameters.buckets import describe_slice, is_expert


class RankManifest(NamedTuple):
    """The description of the tensors of a process, which it sends to the other processes.

    Attributes:
        tensors: The weights and buffers: name in the full model, stage, shape and dtype.
        aliases: Other name of a weight -> the name under which it is saved.
        optimizers: Class name of an optimizer -> the names of the weights that it steps.
        unoptimized: The names of the trained weights that no optimizer steps, if code outside of
            schedir reduces the gradients.
        experts: Name of a weight of experts -> the slice of the experts to which it belongs.
        written_buffers: The names of the buffers that the process writes.
        checksums: When saving, the checksums of each buffer. If code outside of schedir reduces the
            gradients, also the checksums of each weight, its float32 copy and its optimizer state.
    """

    tensors: list[tuple[str, int, TensorMeta]]
    aliases: dict[str, str]
    optimizers: dict[str, list[str]]
    unoptimized: list[str]
    experts: dict[str, str]
    written_buffers: list[str]
    checksums: dict[str, list[int]]


def add_stage_prefix(stage: int, name: str) -> str:
    """Return the name `stages.STAGE.NAME`, for modules without names in a full model.

    Args:
        stage: The stage.
        name: The name in the stage.
    """
    return f"stages.{stage}.{name}"


def get_checkpoint_state(run: object) -> tuple[CheckpointGroup, CheckpointState]:
    """Return the processes of a run, and the state of this process.

    Args:
        run: An Executor, an InProcessExecutor, or a `schedir.torch_pipelining.Schedule`.

    Raises:
        UsageError: `run` is none of these.
    """
    getter = getattr(run, "checkpoint_state", None)
    if getter is None or isinstance(run, type):
        raise UsageError(
            "run must be an Executor, an InProcessExecutor or a schedir.torch_pipelining.Schedule, "
            f"not {describe(run)}"
        )
    state: CheckpointState = getter()
    return CheckpointGroup(state.group, is_single_process=state.is_single_process), state


def gather_checkpoint_states(
    peers: CheckpointGroup,
    state: CheckpointState,
    optimizer: object,
    name_map: NameMap,
    *,
    is_saving: bool,
) -> tuple[list[RankCheckpointState], list[LocalState], list[RankManifest]]:
    """Collect the local states of this process, and the descriptions of all processes.

    All processes call this. An update that is not validated yet is validated first.

    Args:
        peers: The processes that save or load together.
        state: The state of this process.
        optimizer: The optimizer of this process, or RUN_OPTIMIZER.
        name_map: Returns the name in the full model.
        is_saving: True for a save, which also needs checksums.

    Returns:
        The ranks of this process, their local states, and the descriptions of all processes, which
        are the same in all processes.

    Raises:
        CheckpointError: A state cannot be saved, two tensors have the same name, or a tensor has
            another stage, shape or dtype in another process. A save also raises it if code outside
            of schedir reduces the gradients, and replicas differ.
    """
    ranks: list[RankCheckpointState] = []

    def name(stage: int, own: str) -> str:
        found = name_map(stage, own)
        if not isinstance(found, str):
            raise CheckpointError(f"name_map({stage}, {own!r}) is {describe(found)}, not a text")
        return found

    def collect_names_of_tied_weights() -> Any:
        if not callable(name_map):
            raise CheckpointError(
                "name_map must be a function of a stage and a name in it, not "
                f"{describe(name_map)}",
                hint="name_map=lambda stage, name: ...",
            )
        ranks.extend(state.collect_rank_states(optimizer))
        for rank in ranks:
            require_savable(rank)
        return {key: of for rank in ranks for key, of in collect_tied_names(rank, name).items()}

    results = peers.gather_results(collect_names_of_tied_weights)
    tied_names = {key: name for some in results for key, name in some.items()}
    state.validate_last_update()
    local_states: list[LocalState] = []

    def describe_local_states() -> RankManifest:
        for rank in ranks:
            local_states.append(collect_local_state(rank, name, tied_names))
            require_sliceable_state(rank.optimizer, local_states[-1])
        return _build_rank_manifest(ranks, local_states, is_saving=is_saving)

    manifests = peers.gather_results(describe_local_states, [RankManifest, TensorMeta])
    _require_consistent(manifests)
    return ranks, local_states, manifests


def _build_rank_manifest(
    ranks: Sequence[RankCheckpointState], local_states: Sequence[LocalState], *, is_saving: bool
) -> RankManifest:
    manifest = RankManifest([], {}, {}, [], {}, [], {})
    for rank, local_state in zip(ranks, local_states, strict=True):
        for weight in local_state.weights:
            parts = [*weight.iterate_shards()]
            manifest.tensors.append((parts[0].name, weight.owner_stage, parts[0].meta))
            manifest.aliases.update(dict.fromkeys(weight.aliases, weight.name))
            if is_expert(weight.parameter):
                manifest.experts[parts[0].name] = describe_slice(weight.parameter, rank.tp_rank)
            if weight.optimizer is not None and weight.parameter.requires_grad:
                by = type(weight.optimizer).__name__
                manifest.optimizers.setdefault(by, []).append(weight.name)
            elif (
                rank.has_external_reduction
                and rank.optimizer is not None
                and weight.lacks_optimizer
            ):
                manifest.unoptimized.append(weight.name)
            if is_saving and rank.has_external_reduction:
                manifest.checksums[parts[0].name] = [
                    compute_checksum(part.memory.detach()) for part in parts
                ]
        for stage, part in local_state.buffers:
            manifest.tensors.append((part.name, stage, part.meta))
            if part.should_write:
                manifest.written_buffers.append(part.name)
            if is_saving:
                manifest.checksums[part.name] = [compute_checksum(part.memory.detach())]
    return manifest


def _require_consistent(manifests: Sequence[RankManifest]) -> None:
    every: dict[str, tuple[int, TensorMeta]] = {}
    for process, one in enumerate(manifests):
        for name, stage, kind in one.tensors:
            other, there = every.setdefault(name, (stage, kind))
            if other != stage:
                raise CheckpointError(
                    f"stages {other} and {stage} both have a tensor with the name {name}",
                    hint="pass name_map=..., a function that gives each tensor of the complete "
                    "model a different name",
                )
            if there != kind:
                raise CheckpointError(
                    f"{name} has shape {list(there.shape)} and dtype {there.dtype} in one process, "
                    f"but shape {list(kind.shape)} and dtype {kind.dtype} in process {process}"
                )
    _require_complete_experts(manifests)
    for name, before, process in _find_differing_tensors(manifests, "weights/"):
        raise CheckpointError(
            f"{name.removeprefix('weights/')}, or its optimizer state, differs between processes "
            f"{before} and {process}: these are not replicas, or gradients were not reduced",
        )


def _require_complete_experts(manifests: Sequence[RankManifest]) -> None:
    """Raise CheckpointError if two experts have one name, or no process writes a buffer."""
    slices: dict[str, str] = {}
    for process, one in enumerate(manifests):
        for name, own in one.experts.items():
            if slices.setdefault(name, own) != own:
                raise CheckpointError(
                    f"{name} has {slices[name]} in one process, but {own} in process {process}",
                    hint="pass name_map=..., a function that gives each expert of the complete "
                    "model a different name",
                )
    written = {name for one in manifests for name in one.written_buffers}
    for one in manifests:
        for name, *_ in one.tensors:
            if name.startswith("buffers/") and name not in written:
                raise CheckpointError(
                    f"the first replica does not have {name}, which belongs to an expert",
                    hint="set `expert_slice` of this buffer, as for the parameters of the expert",
                )


def _find_differing_tensors(
    manifests: Sequence[RankManifest], prefix: str
) -> Iterator[tuple[str, int, int]]:
    """Yield each tensor with this prefix that differs between two processes, and the processes."""
    first_checksums: dict[str, tuple[int, list[int]]] = {}
    for process, one in enumerate(manifests):
        for name, sums in one.checksums.items():
            before, others = first_checksums.setdefault(name, (process, sums))
            if name.startswith(prefix) and sums != others:
                yield name, before, process


def warn_of_differing_buffers(peers: CheckpointGroup, manifests: Sequence[RankManifest]) -> None:
    """Warn if a buffer differs between processes, because replicas use different microbatches.

    Args:
        peers: The processes that save together.
        manifests: The descriptions of all processes.
    """
    for name, *_ in _find_differing_tensors(manifests, "buffers/"):
        warn_once(peers, f"{name} differs between processes: the checkpoint has the first value")
        return


def warn_of_unoptimized(peers: CheckpointGroup, manifests: Sequence[RankManifest]) -> None:
    """Warn of trained weights that no saved optimizer steps.

    Another optimizer may step them, and its state would be lost.

    Args:
        peers: The processes that save together.
        manifests: The descriptions of all processes.
    """
    if left := [*dict.fromkeys(name for one in manifests for name in one.unoptimized)]:
        warn_once(peers, f"no saved optimizer has these trained weights: {join_facts(left)}")


def warn_once(peers: CheckpointGroup, fact: str) -> None:
    """Warn in the first process only.

    Args:
        peers: The processes that save or load together.
        fact: The warning.
    """
    if not peers.process:
        warnings.warn(fact, stacklevel=4)
