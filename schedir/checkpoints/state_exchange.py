"""Exchange descriptions of tensors between processes, before a save or a load."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from inspect import Signature, signature
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
    """The description of the tensors of a process, for the other processes.

    Attributes:
        tensors: The weights and buffers: name in the full model, stage, shape and dtype.
        aliases: Other name of a weight -> the name under which it is saved.
        optimizers: Class name of an optimizer -> the names of the weights that it steps.
        unoptimized: The names of the trained weights that no optimizer steps, if code outside of
            schedir reduces the gradients.
        experts: Name of a weight of experts -> a text with the slice of the experts that the weight
            has.
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


def _find_parameters(name_map: NameMap) -> Signature | None:
    """Return the parameters of `name_map` if it cannot take a stage and a name, else None."""
    try:
        parameters = signature(name_map)
    except (TypeError, ValueError):
        return None  # a function of an extension module without a signature
    try:
        parameters.bind(0, "")
    except TypeError:
        return parameters
    return None


def gather_checkpoint_states(
    peers: CheckpointGroup,
    state: CheckpointState,
    optimizer: object,
    name_map: NameMap,
    *,
    is_saving: bool,
) -> tuple[list[RankCheckpointState], list[LocalState], list[RankManifest]]:
    """Collect the local states of this process, and the descriptions of all processes.

    All processes call this. The function first validates the last update, if necessary.

    Args:
        peers: The processes that save or load together.
        state: The state of this process.
        optimizer: The optimizer of this process, or RUN_OPTIMIZER.
        name_map: Returns the name in the full model.
        is_saving: True for a save, which also needs checksums.

    Returns:
        The ranks of this process, their local states, and the descriptions of all processes. These
        descriptions are equal in all processes.

    Raises:
        CheckpointError: A state cannot be saved, two tensors have the same name, or a tensor has
            another stage, shape or dtype in another process. A save also raises this error if code
            outside of schedir reduces the gradients, and replicas differ.
    """
    ranks: list[RankCheckpointState] = []

    def map_name(stage: int, local_name: str) -> str:
        full_name = name_map(stage, local_name)
        if not isinstance(full_name, str):
            raise CheckpointError(
                f"name_map({stage}, {local_name!r}) is {describe(full_name)}, not a text"
            )
        return full_name

    def collect_names_of_tied_weights() -> Any:
        if not callable(name_map):
            raise CheckpointError(
                "name_map must be a function of a stage and a name in it, not "
                f"{describe(name_map)}",
                hint="name_map=lambda stage, name: ...",
            )
        if (parameters := _find_parameters(name_map)) is not None:
            raise CheckpointError(
                f"name_map must take (stage, name), but this one takes {parameters}",
                hint="name_map=lambda stage, name: ...",
            )
        ranks.extend(state.collect_rank_states(optimizer))
        for rank in ranks:
            require_savable(rank)
        return {
            key: tied_name
            for rank in ranks
            for key, tied_name in collect_tied_names(rank, map_name).items()
        }

    results = peers.gather_results(collect_names_of_tied_weights)
    tied_names = {key: name for names in results for key, name in names.items()}
    state.validate_last_update()
    local_states: list[LocalState] = []

    def describe_local_states() -> RankManifest:
        for rank in ranks:
            local_states.append(collect_local_state(rank, map_name, tied_names))
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
            shards = [*weight.iterate_shards()]
            manifest.tensors.append((shards[0].name, weight.owner_stage, shards[0].meta))
            manifest.aliases.update(dict.fromkeys(weight.aliases, weight.name))
            if is_expert(weight.parameter):
                manifest.experts[shards[0].name] = describe_slice(weight.parameter, rank.tp_rank)
            if weight.optimizer is not None and weight.parameter.requires_grad:
                optimizer_name = type(weight.optimizer).__name__
                manifest.optimizers.setdefault(optimizer_name, []).append(weight.name)
            elif (
                rank.has_external_reduction
                and rank.optimizer is not None
                and weight.lacks_optimizer
            ):
                manifest.unoptimized.append(weight.name)
            if is_saving and rank.has_external_reduction:
                manifest.checksums[shards[0].name] = [
                    compute_checksum(shard.memory.detach()) for shard in shards
                ]
        for stage, shard in local_state.buffers:
            manifest.tensors.append((shard.name, stage, shard.meta))
            if shard.should_write:
                manifest.written_buffers.append(shard.name)
            if is_saving:
                manifest.checksums[shard.name] = [compute_checksum(shard.memory.detach())]
    return manifest


def _require_consistent(manifests: Sequence[RankManifest]) -> None:
    first_metas: dict[str, tuple[int, TensorMeta]] = {}
    for process, manifest in enumerate(manifests):
        for name, stage, meta in manifest.tensors:
            first_stage, first_meta = first_metas.setdefault(name, (stage, meta))
            if first_stage != stage:
                raise CheckpointError(
                    f"stages {first_stage} and {stage} both have a tensor with the name {name}",
                    hint="pass name_map=..., a function that gives each tensor of the complete "
                    "model a different name",
                )
            if first_meta != meta:
                raise CheckpointError(
                    f"{name} has shape {list(first_meta.shape)} and dtype {first_meta.dtype} in "
                    f"one process, but shape {list(meta.shape)} and dtype {meta.dtype} in process "
                    f"{process}"
                )
    _require_complete_experts(manifests)
    for name, first_process, process in _find_differing_tensors(manifests, "weights/"):
        raise CheckpointError(
            f"{name.removeprefix('weights/')}, or its optimizer state, differs between processes "
            f"{first_process} and {process}: these are not replicas, or gradients were not reduced",
        )


def _require_complete_experts(manifests: Sequence[RankManifest]) -> None:
    """Raise CheckpointError if two experts have one name, or if no process writes some buffer."""
    slices: dict[str, str] = {}
    for process, manifest in enumerate(manifests):
        for name, expert_slice in manifest.experts.items():
            if slices.setdefault(name, expert_slice) != expert_slice:
                raise CheckpointError(
                    f"{name} has {slices[name]} in one process, but {expert_slice} in process "
                    f"{process}",
                    hint="pass name_map=..., a function that gives each expert of the complete "
                    "model a different name",
                )
    written_buffers = {name for manifest in manifests for name in manifest.written_buffers}
    for manifest in manifests:
        for name, *_ in manifest.tensors:
            if name.startswith("buffers/") and name not in written_buffers:
                raise CheckpointError(
                    f"only the first replica writes buffers, and it does not have {name}",
                    hint="if the buffer belongs to an expert, set its `expert_slice`, as for the "
                    "parameters of the expert",
                )


def _find_differing_tensors(
    manifests: Sequence[RankManifest], prefix: str
) -> Iterator[tuple[str, int, int]]:
    """Yield each tensor with this prefix that differs between two processes, and the processes."""
    first_checksums: dict[str, tuple[int, list[int]]] = {}
    for process, manifest in enumerate(manifests):
        for name, sums in manifest.checksums.items():
            first_process, first_sums = first_checksums.setdefault(name, (process, sums))
            if name.startswith(prefix) and sums != first_sums:
                yield name, first_process, process


def warn_of_differing_buffers(peers: CheckpointGroup, manifests: Sequence[RankManifest]) -> None:
    """Warn if a buffer differs between processes.

    Replicas process different microbatches, so their buffers can differ.

    Args:
        peers: The processes that save together.
        manifests: The descriptions of all processes.
    """
    for name, *_ in _find_differing_tensors(manifests, "buffers/"):
        warn_once(peers, f"{name} differs between processes: the checkpoint has the first value")
        return


def warn_of_unoptimized(peers: CheckpointGroup, manifests: Sequence[RankManifest]) -> None:
    """Warn of trained weights that no saved optimizer steps.

    Another optimizer may step these weights, and its state would be lost.

    Args:
        peers: The processes that save together.
        manifests: The descriptions of all processes.
    """
    if names := [*dict.fromkeys(name for manifest in manifests for name in manifest.unoptimized)]:
        warn_once(peers, f"no saved optimizer has these trained weights: {join_facts(names)}")


def warn_once(peers: CheckpointGroup, fact: str) -> None:
    """Warn in the first process only.

    Args:
        peers: The processes that save or load together.
        fact: The warning.
    """
    if not peers.process:
        warnings.warn(fact, stacklevel=4)
