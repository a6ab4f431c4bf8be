"""Save a checkpoint of the state of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from schedir.call_errors import explain_wrong_calls
from schedir.checkpoints import dcp_storage
from schedir.checkpoints.checkpoint_directory import (
    CheckpointDirectory,
    Manifest,
    ManifestFile,
    StoredSlice,
    TensorMeta,
    to_python_integer,
)
from schedir.checkpoints.checkpoint_group import CheckpointGroup
from schedir.checkpoints.local_state import LocalState, NameMap, TensorPiece, list_generator_shards
from schedir.checkpoints.manifest_json import find_json_error
from schedir.checkpoints.state_exchange import (
    add_stage_prefix,
    gather_checkpoint_states,
    get_checkpoint_state,
    warn_of_differing_buffers,
    warn_of_unoptimized,
)
from schedir.errors import CheckpointError, describe
from schedir.runtime.checkpoint_state import RUN_OPTIMIZER, Checkpointable


@explain_wrong_calls("save(executor, directory, step=100)")
def save(
    run: Checkpointable,
    directory: str | os.PathLike[str],
    *,
    step: int,
    optimizer: Any = RUN_OPTIMIZER,
    name_map: NameMap = add_stage_prefix,
    extra_state: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint of a run after `step` steps, in a new subdirectory of `directory`.

    All processes call this between two steps. The checkpoint has:

    - weights, and the float32 copies of a MainOptimizer
    - the optimizer state of each weight
    - persistent buffers
    - the number of the next step, and the loss scale
    - the states of torch's random number generators, if the run has no seed
    - `extra_state` of the first process

    `load` does not restore options of optimizers, such as the learning rate. If the last update is
    not validated yet (norm_check "after_step"), `save` first validates it.

    Args:
        run: An Executor, an InProcessExecutor, or a `schedir.torch_pipelining.Schedule`.
        directory: The directory of the checkpoints. The directory is created if it does not exist.
        step: The number of steps that were made.
        optimizer: For a Schedule, the optimizer of this process's stages: one, several in a list,
            or None to save weights and buffers only. By default, this is the optimizer of the
            executor.
        name_map: A function of the index of a stage and the name of a parameter or buffer in this
            stage. It returns the name of the parameter or buffer in the full model. A run with
            other stages finds the tensor by this name. By default the name is `stages.STAGE.NAME`.
        extra_state: More values to save, which must be JSON values.
        keep: The number of newest complete checkpoints to keep. By default all are kept.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: The state cannot be saved correctly, or a process failed. All processes
            raise this error.
        UsageError: `run` is none of these objects, or `directory` is not valid.

    Example:
        >>> import schedir, tempfile, torch
        >>> from schedir.checkpoints import load, save
        >>> from schedir.runtime import InProcessExecutor
        >>> def made(ranks):  # four stages on this number of ranks
        ...     shape = schedir.PipelineShape(ranks, 4, stages_per_rank=4 // ranks)
        ...     program = schedir.compile(schedir.schedules.interleaved, shape)
        ...     stages = [torch.nn.Linear(8, 8) for _ in range(4)]
        ...     how = dict(loss=torch.nn.functional.mse_loss, boundary=(2, 8))
        ...     return InProcessExecutor(program, stages, optimizer=torch.optim.AdamW, **how)
        >>> x, one, other = torch.ones(4, 2, 8), made(ranks=4), made(ranks=2)
        >>> loss = one.step(x, x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     at = save(one, folder, step=1)
        ...     at.name, load(other, folder)
        ('step-00000001', {'step': 1, 'extra': {}})
        >>> bool(one.step(x, x) == other.step(x, x))  # both runs continue with the same loss
        True
    """
    plan = plan_save(
        run, step=step, optimizer=optimizer, name_map=name_map, extra_state=extra_state
    )
    return write_checkpoint(plan, directory, keep=keep)


@dataclass
class SavePlan:
    """The data that a process writes for a checkpoint.

    Args:
        peers: The processes that save together.
        step: The number of steps that were made.
        tensors: Name of a tensor -> its shape and dtype, and its local slices.
        state: See `Manifest`.
        facts: See `Manifest`.
        stepped_tensors: Name of a tensor that a step changes -> the index of its rank among the
            ranks of this process, and its stage.
    """

    peers: CheckpointGroup
    step: int
    tensors: dict[str, tuple[TensorMeta, list[TensorPiece]]]
    state: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    stepped_tensors: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def plan_save(
    run: Checkpointable,
    *,
    step: int,
    optimizer: Any = RUN_OPTIMIZER,
    name_map: NameMap = add_stage_prefix,
    extra_state: Mapping[str, Any] | None = None,
) -> SavePlan:
    """Collect the data that this process writes, without copying it.

    The next step changes these tensors. Write or copy the tensors before that step. All processes
    call this.

    Args:
        run: See `save`.
        step: See `save`.
        optimizer: See `save`.
        name_map: See `save`.
        extra_state: See `save`.

    Raises:
        CheckpointError: See `save`.
        UsageError: `run` has no state that checkpoints can save.
    """
    peers, checkpoint_state = get_checkpoint_state(run)
    step = to_python_integer(step)
    extra = _require_json_extra(peers, step, extra_state)
    ranks, local_states, manifests = gather_checkpoint_states(
        peers, checkpoint_state, optimizer, name_map, is_saving=True
    )
    warn_of_differing_buffers(peers, manifests)
    warn_of_unoptimized(peers, manifests)
    shards = [shard for local_state in local_states for shard in local_state if shard.should_write]
    stepped_tensors = {
        shard.name: (k, weight.stage)
        for k, local_state in enumerate(local_states)
        for weight in local_state.weights
        if weight.parameter.requires_grad
        for shard in weight.iterate_shards()
        if shard.should_write
    }
    first_rank, seed = ranks[0], ranks[0].random_streams.seed
    if seed is None:
        shards += list_generator_shards(first_rank, peers.process)
    tensors = {
        shard.name: (shard.meta, shard.spec.get_local_slices(shard.memory)) for shard in shards
    }
    program, scale = first_rank.program, first_rank.loss_scale
    optimizers: dict[str, dict[str, None]] = {}
    for manifest in manifests:
        for kind, weights in manifest.optimizers.items():
            optimizers.setdefault(kind, {}).update(dict.fromkeys(weights))
    state = {
        "next": step if seed is None else first_rank.random_streams.step,
        "seed": seed,
        "world": [*first_rank.world_shape],
        "loss_scale": scale and [float(scale.value), int(scale.good_steps)],
        "also": {
            name: target for manifest in manifests for name, target in manifest.aliases.items()
        },
        "optimizers": {kind: [*weights] for kind, weights in optimizers.items()},
        "extra": extra,
    }
    facts = {
        "program": program.name,
        "plan": str(program.shape),
        "tp": first_rank.tp,
        "dp": first_rank.shard_spec.replicas,
        "zero": first_rank.shard_spec.zero,
        "torch": torch.__version__,
        "options": _describe_options(local_states),
    }
    return SavePlan(peers, step, tensors, state, facts, stepped_tensors)


def write_checkpoint(
    save_plan: SavePlan,
    directory: str | os.PathLike[str],
    *,
    keep: int | None = None,
    group: Any = None,
) -> Path:
    """Write the planned checkpoint. All processes call this.

    Args:
        save_plan: The data to write.
        directory: The directory of the checkpoints.
        keep: The number of newest complete checkpoints to keep. By default all are kept.
        group: The group of torch.distributed in which processes communicate. By default the group
            of the run.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: A process failed, or another save writes to this directory. All processes
            raise this error.
    """
    peers = (
        save_plan.peers
        if group is None or save_plan.peers.is_single_process
        else CheckpointGroup(group)
    )
    checkpoints = CheckpointDirectory(directory)
    with ExitStack() as stack:

        def begin() -> str:
            stack.enter_context(_lock_within_process(checkpoints, save_plan.step))
            path = checkpoints.begin(save_plan.step)
            # At the end of the block, `abandon` removes the directory of an unfinished checkpoint.
            # It does not find a complete checkpoint, because its directory was renamed.
            stack.callback(checkpoints.abandon, save_plan.step)
            return str(path)

        path = Path(peers.broadcast_result(begin))
        return _write_and_finish(peers, checkpoints, path, save_plan, keep)


@contextmanager
def _lock_within_process(directory: CheckpointDirectory, step: int) -> Iterator[None]:
    """Raise CheckpointError if another thread of this process is saving to the directory.

    The lock of the directory excludes only other processes.
    """
    key = os.path.realpath(directory.path)
    own_step = [step]
    written_step = _steps_being_written.setdefault(key, own_step)
    if written_step is not own_step:
        raise CheckpointError(
            f"cannot save step {step}: this process still writes step {written_step[0]} to "
            f"{directory.path_text}",
            hint="call saver.wait() first",
        )
    try:
        yield
    finally:
        del _steps_being_written[key]


# Real path of a directory -> the step that this process is writing to it.
_steps_being_written: dict[str, list[int]] = {}


def _write_and_finish(
    peers: CheckpointGroup,
    directory: CheckpointDirectory,
    path: Path,
    save_plan: SavePlan,
    keep: int | None,
) -> Path:
    def write_local_slices() -> Any:
        pieces = (piece for _, parts in save_plan.tensors.values() for piece in parts)
        with directory.translate_write_errors(
            save_plan.step, sum(piece.memory.nbytes for piece in pieces)
        ):
            slices, files = dcp_storage.write(path, peers.process, save_plan.tensors)
        return {name: meta for name, (meta, _) in save_plan.tensors.items()}, slices, files

    results = peers.gather_results(write_local_slices, [StoredSlice, ManifestFile, TensorMeta])

    def finish() -> str:
        tensors = {name: meta for metas, _, _ in results for name, meta in metas.items()}
        slices = tuple(stored for _, process_slices, _ in results for stored in process_slices)
        files = {
            name: file for _, _, file_by_name in results for name, file in file_by_name.items()
        }
        with directory.translate_write_errors(save_plan.step):
            files |= dcp_storage.write_metadata(path, tensors, slices)
        manifest = Manifest(
            save_plan.step, files, tensors, slices, save_plan.facts, save_plan.state
        )
        return str(directory.finish(manifest, keep))

    return Path(peers.broadcast_result(finish))


def _require_json_extra(
    peers: CheckpointGroup, step: int, extra_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the extra state of this process.

    All processes raise an error if the extra state of a process is not JSON, or if the steps
    differ.
    """

    def plain() -> str:
        if not isinstance(extra_state, Mapping | None):
            raise CheckpointError(f"extra_state must be a mapping, not {describe(extra_state)}")
        for name, value in (extra_state or {}).items():
            if not isinstance(name, str):
                raise CheckpointError(
                    f"the keys of extra_state must be text, not {describe(name)}",
                    hint=f"extra_state={{{str(name)!r:.60}: ...}}",
                )
            if reason := find_json_error(value):
                is_value_itself = reason.startswith(f"{describe(value)} ")
                raise CheckpointError(
                    f"extra_state must contain JSON values only, but {name!r:.60} is "
                    f"{describe(value)}{'' if is_value_itself else f': {reason}'}",
                    hint="finite numbers, texts, true or false, None, lists of them, and "
                    "dictionaries with texts as keys; a tensor has tolist()",
                )
        return f"saves step {describe(step)}"

    peers.require_same(plain)
    return dict(extra_state or {})


def _describe_options(local_states: Sequence[LocalState]) -> list[str]:
    """Describe the optimizer options of the weights in the first process."""
    groups = {
        id(w.param_group): {
            k: v for k, v in w.param_group.items() if isinstance(v, bool | int | float | str)
        }
        for local_state in local_states
        for w in local_state.weights
        if w.optimizer is not None
    }
    return [", ".join(f"{k} {v}" for k, v in group.items()) for group in groups.values()]
