"""Load a checkpoint into the current layout of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from schedir.call_errors import explain_wrong_calls
from schedir.checkpoints import dcp_storage
from schedir.checkpoints.checkpoint_directory import (
    MANIFEST_NAME,
    CheckpointDirectory,
    LatestCheckpoint,
    Manifest,
    to_python_integer,
)
from schedir.checkpoints.checkpoint_group import CheckpointGroup
from schedir.checkpoints.load_plan import LoadPlan, plan_reads
from schedir.checkpoints.local_state import NameMap, list_generator_shards
from schedir.checkpoints.manifest import join_facts
from schedir.checkpoints.state_exchange import (
    add_stage_prefix,
    gather_checkpoint_states,
    get_checkpoint_state,
    warn_once,
)
from schedir.errors import CheckpointError, describe
from schedir.runtime.checkpoint_state import RUN_OPTIMIZER, Checkpointable, RankCheckpointState


@explain_wrong_calls("load(executor, directory)")
def load(
    run: Checkpointable,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    optimizer: Any = RUN_OPTIMIZER,
    name_map: NameMap = add_stage_prefix,
) -> Mapping[str, Any] | None:
    """Load a checkpoint that `save` has written, into any layout of ranks.

    The run may have other ranks, stages, replicas and tensor-parallel sizes than the run that saved
    the checkpoint. All processes call this between two steps. A run without an optimizer loads only
    weights and buffers.

    Before `load` changes a tensor, it verifies all files, and that the checkpoint fits the run. If
    a file cannot be read after this verification, some tensors are already overwritten. Then the
    run refuses further steps and saves.

    The call warns in these cases: a newer checkpoint is incomplete, weights are read from another
    dtype, modules will use other random numbers, or `directory` does not exist and a folder with a
    similar name has checkpoints.

    Args:
        run: See `save`.
        directory: The directory of the checkpoints.
        step: The step to load. By default the newest complete checkpoint is loaded.
        optimizer: See `save`.
        name_map: See `save`.

    Returns:
        A mapping with the `step` and the `extra` state of the checkpoint, or None if there are no
        checkpoints.

    Raises:
        CheckpointError: The checkpoint is of another model, or cannot be read. Or there are
            checkpoints, but none is complete. The error lists the first three differences from the
            model, or the first three reasons why checkpoints are incomplete. All processes raise
            this error.
        UsageError: `run` has no state that checkpoints can load, or `directory` or `step` is not
            valid.

    Example:
        >>> import schedir, tempfile, torch
        >>> from schedir.checkpoints import load
        >>> from schedir.runtime import InProcessExecutor
        >>> program = schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(ranks=2, microbatches=4))
        >>> stages = [torch.nn.Linear(8, 8) for _ in range(2)]
        >>> how = dict(loss=torch.nn.functional.mse_loss, boundary=(2, 8))
        >>> run = InProcessExecutor(program, stages, optimizer=torch.optim.AdamW, **how)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(load(run, folder))  # nothing has been saved there
        None
    """
    peers, checkpoint_state = get_checkpoint_state(run)
    checkpoints = CheckpointDirectory(directory)
    step = None if step is None else to_python_integer(step)
    checkpoint_text = "the newest checkpoint" if step is None else f"step {describe(step)}"
    peers.require_same(lambda: f"loads {checkpoint_text}")
    latest = _find_verified(peers, checkpoints, step)
    for fact in latest.skip_reasons:
        warn_once(peers, f"skipped: {fact}")
    if (manifest := latest.manifest) is None:
        if similar_path := checkpoints.find_similar_directory():
            warn_once(
                peers,
                f"there is no folder {checkpoints.path_text}, so nothing was loaded; "
                f"{similar_path} has checkpoints",
            )
        return None
    _require_valid_state(manifest)
    ranks, local_states, _ = gather_checkpoint_states(
        peers, checkpoint_state, optimizer, name_map, is_saving=False
    )
    plans: list[LoadPlan] = []

    def expect() -> Any:
        local_plan = LoadPlan(
            manifest, local_states, has_optimizer=any(rank.optimizer is not None for rank in ranks)
        )
        plans.append(local_plan)
        unique_facts = (
            [*dict.fromkeys(facts)] for facts in (local_plan.mismatches, local_plan.warnings)
        )
        return local_plan.used_names, *unique_facts, local_plan.trained_names

    results = peers.gather_results(expect)
    (plan,) = plans
    _require_match(plan, manifest, results, is_mapped=name_map is not add_stage_prefix)
    checkpoint_path = checkpoints.locate_step(manifest.step)
    for rank in ranks:
        # Until all tensors are loaded, the rank refuses to step and to save.
        rank.set_loading(True)
    try:
        with torch.no_grad():
            peers.gather_results(lambda: _read_tensors(plan, manifest, checkpoint_path))
    except CheckpointError as error:
        error.hint = error.hint or "create a new executor: this one has only some of the weights"
        raise
    for rank in ranks:
        rank.set_loading(False)
    _restore_run_state(peers, ranks, checkpoint_path, manifest)
    for fact in dict.fromkeys(fact for _, _, facts, _ in results for fact in facts):
        warn_once(peers, fact)
    return {"step": manifest.step, "extra": manifest.state["extra"]}


def _require_match(
    plan: LoadPlan, manifest: Manifest, results: Sequence[Any], *, is_mapped: bool
) -> None:
    """Raise CheckpointError if the model and optimizer do not match the checkpoint.

    Args:
        plan: The plan of this process.
        manifest: The manifest of the checkpoint.
        results: For each process the names it uses, its mismatches, its warnings, and the names of
            the weights that it trains.
        is_mapped: True if the user passes a `name_map`.
    """
    mismatches = [fact for _, facts, _, _ in results for fact in facts]
    if not mismatches:
        mismatches += plan.find_unread(name for used_names, *_ in results for name in used_names)
        mismatches += _describe_untied_weights([trained_names for *_, trained_names in results])
    if mismatches := [*dict.fromkeys(mismatches)]:
        run_stages = _find_stages(name for names, *_ in results for name in names)
        missing_stages = _find_stages(fact.removeprefix("it has no ") for fact in mismatches)
        saved_stages = _find_stages(manifest.tensors)
        has_other_stages = (
            run_stages | missing_stages != saved_stages or not missing_stages <= saved_stages
        )
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} does not fit this model and optimizer: "
            f"{join_facts(mismatches)}",
            hint="for another division into stages, save and load with name_map=lambda stage, "
            "name: ..., which returns the name in the complete model"
            if has_other_stages and not is_mapped
            else _suggest_weights_only(mismatches),
        )


def _suggest_weights_only(mismatches: Sequence[str]) -> str:
    """Return a hint if the checkpoint lacks only optimizer states."""
    if all("has no optimizer state, but its optimizer is" in fact for fact in mismatches):
        return "to load only the weights into a Schedule of torch's stages, pass optimizer=None"
    return ""


def _read_tensors(plan: LoadPlan, manifest: Manifest, directory: Path) -> None:
    """Read the weights, buffers and optimizer states of this process into its tensors."""
    for _, shard in plan.shards:
        shard.memory.detach().zero_()  # The read skips the padding of a shard.
    destinations = [(n, shard.spec.get_all_slices(shard.memory)) for n, shard in plan.shards]
    dcp_storage.read(directory, plan_reads(manifest, destinations))
    for weight, optimizer_state in plan.optimizer_states:
        weight.optimizer.state.pop(weight.optimized_tensor, None)
        if optimizer_state:
            weight.optimizer.state[weight.optimized_tensor] = optimizer_state


def _find_stages(names: Iterable[str]) -> set[str]:
    """Return the numbers of the stages in the names of weights, see `add_stage_prefix`."""
    matches = (re.match(r"weights/stages\.(\d+)\.", name) for name in names)
    return {match[1] for match in matches if match}


def _find_verified(
    peers: CheckpointGroup, directory: CheckpointDirectory, step: int | None
) -> LatestCheckpoint:
    """Return the newest complete checkpoint, or the checkpoint of `step`.

    Each process verifies a part of the files.
    """
    latest = directory.find_checkpoint(
        lambda manifest: manifest.assign_files(peers.process, peers.processes),
        lambda text: peers.gather_results(lambda: text),
        step=step,
    )
    if latest.manifest is None and latest.skip_reasons:
        raise CheckpointError(
            f"no checkpoint in {directory.path_text} is complete: "
            f"{join_facts(latest.skip_reasons)}",
            hint="to begin at the first step, remove these checkpoints or use another folder",
        )
    return latest


def _require_valid_state(manifest: Manifest) -> None:
    """Raise CheckpointError if the state of a manifest is not one that `save` writes.

    The digest cannot detect this, because other code may have written the manifest.
    """
    state = manifest.state
    for key, is_sound in _STATE_CHECKS.items():
        if key not in state or not is_sound(state[key]):
            value_text = describe(state[key]) if key in state else "missing"
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} was not written by a run: its state has "
                f"{key} {value_text}",
                step=manifest.step,
                file=MANIFEST_NAME,
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_loss_scale(value: Any) -> bool:
    """Return whether a value is a list of a loss scale and the number of good steps."""
    if type(value) is not list or len(value) != 2 or type(value[0]) not in (int, float):
        return False
    return 0 < value[0] < 2.0**128 and _is_count(value[1])


_STATE_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "next": _is_count,
    "seed": lambda seed: seed is None or type(seed) is int,
    "world": lambda world: type(world) is list and all(map(_is_count, world)),
    "loss_scale": lambda scale: scale is None or _is_loss_scale(scale),
    "also": lambda aliases: (
        type(aliases) is dict and all(type(target) is str for target in aliases.values())
    ),
    "optimizers": lambda names_by_kind: (
        type(names_by_kind) is dict
        and all(
            type(value) is list and {*map(type, value)} <= {str} for value in names_by_kind.values()
        )
    ),
    "extra": lambda extra: type(extra) is dict,
}


def _describe_untied_weights(trained_names: Sequence[Mapping[str, str]]) -> list[str]:
    """Describe weights that are tied in the checkpoint, but trained separately in this run."""
    first_names: dict[str, str] = {}
    stored_names = {
        name: stored_name for names in trained_names for name, stored_name in names.items()
    }
    return [
        f"{first_names[stored_name]} and {name} are one weight in it, but two weights here"
        for name, stored_name in stored_names.items()
        if first_names.setdefault(stored_name, name) != name
    ]


def _restore_run_state(
    peers: CheckpointGroup,
    ranks: Sequence[RankCheckpointState],
    directory: Path,
    manifest: Manifest,
) -> None:
    """Restore the step number, the loss scale, and the state of random number generators."""
    state = manifest.state
    seed, is_training = ranks[0].random_streams.seed, ranks[0].program.has_backward
    for rank in ranks:
        rank.random_streams.step = state["next"]
        scale, saved_scale = rank.loss_scale, state["loss_scale"]
        if scale is not None and saved_scale is not None:
            scale.value.fill_(saved_scale[0])
            scale.good_steps.fill_(saved_scale[1])
    if seed != state["seed"]:
        if is_training:
            warn_once(peers, f"the seed of modules is {seed}; before, it was {state['seed']}")
    elif seed is None and state["world"] == [*ranks[0].world_shape]:

        def restore() -> None:
            shards = list_generator_shards(ranks[0], peers.process)
            destinations = [
                (shard.name, shard.spec.get_local_slices(shard.memory)) for shard in shards
            ]
            dcp_storage.read(directory, plan_reads(manifest, destinations))
            for generator, part in zip(ranks[0].random_streams.generators, shards, strict=True):
                generator.set_state(part.memory)

        peers.gather_results(restore)
    elif seed is None and is_training:
        warn_once(peers, "seed=None: random numbers depend on the number of processes")
