"""Save a checkpoint of the state of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from schedir.checkpoints import dcp_storage
from schedir.checkpoints.checkpoint_directory import (
    CheckpointDirectory,
    Manifest,
    ManifestFile,
    StoredSlice,
    TensorMeta,
)
from schedir.checkpoints.checkpoint_group import CheckpointGroup
from schedir.checkpoints.local_state import LocalState, Names, TensorPiece, generators
from schedir.checkpoints.state_exchange import (
    kept_of,
    known_of,
    of_stages,
    warn_of_buffers,
    warn_of_left,
)
from schedir.errors import CheckpointError, describe
from schedir.runtime.checkpoint_state import ITS_OWN, Checkpointable


def save(
    run: Checkpointable,
    folder: str | os.PathLike[str],
    *,
    step: int,
    optimizer: Any = ITS_OWN,
    names: Names = of_stages,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write what a run is after `step` steps to a folder of its own in `folder`, and return that;
    all processes call this, between steps.

    A run is an Executor, an InProcessExecutor, or a `schedir.torch_pipelining.Schedule`, which is
    told the `optimizer` of this process's stages: one, several in a list, or None for weights
    alone.

    Saved are weights, float32 copies of a MainOptimizer, what optimizers keep of each weight,
    persistent buffers, the number of the next step, the scale of a loss, without a seed torch's
    generators, and of the first process `extra`, which is JSON.  Options of optimizers, as a
    learning rate, are the caller's.  `names` gives the name that a parameter or buffer of a stage
    has in the whole model: that is how a run with other stages finds it.  Of the checkpoints in the
    folder the newest `keep` stay, or all.

    A last update that is not validated (norm_check "after_step") is settled first.  Raises
    CheckpointError, in all processes, for what could not be saved right, and where one fails.

    >>> import schedir, tempfile, torch
    >>> from schedir.checkpoints import load, save
    >>> from schedir.runtime import InProcessExecutor
    >>> def made(ranks):  # four stages on so many ranks
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
    >>> bool(one.step(x, x) == other.step(x, x))  # as if nothing had been between
    True
    """
    taken = take(run, step=step, optimizer=optimizer, names=names, extra=extra)
    return write(taken, folder, keep=keep)


@dataclass
class SavePlan:
    """What a process is to write, and where it is in memory: of tensors by name what they are, and
    boxes; of those that a step changes the rank's number in this process, and the stage."""

    peers: CheckpointGroup
    step: int
    tensors: dict[str, tuple[TensorMeta, list[TensorPiece]]]
    state: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    stepped: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def take(
    run: Checkpointable,
    *,
    step: int,
    optimizer: Any = ITS_OWN,
    names: Names = of_stages,
    extra: Mapping[str, Any] | None = None,
) -> SavePlan:
    """What a process is to write of a run after `step` steps, in the memory in which it is: the
    next step changes that.  All processes call this.  Raises as `save`."""
    peers, kept = kept_of(run)
    plain = _plain(peers, step, extra)
    ranks, owns, known = known_of(peers, kept, optimizer, names, saves=True)
    warn_of_buffers(peers, known)
    warn_of_left(peers, known)
    parts = [part for own in owns for part in own if part.writes]
    stepped = {
        part.name: (k, weight.stage)
        for k, own in enumerate(owns)
        for weight in own.weights
        if weight.parameter.requires_grad
        for part in weight.parts()
        if part.writes
    }
    first, seed = ranks[0], ranks[0].draws.seed
    if seed is None:
        parts += generators(first, peers.number)
    tensors = {part.name: (part.kind, part.cut.own(part.memory)) for part in parts}
    program, scale = first.program, first.loss_scale
    optimizers: dict[str, dict[str, None]] = {}
    for one in known:
        for kind, weights in one.optimizers.items():
            optimizers.setdefault(kind, {}).update(dict.fromkeys(weights))
    told = {
        "next": step if seed is None else first.draws.step,
        "seed": seed,
        "world": [*first.world],
        "loss_scale": scale and [float(scale.value), int(scale.good)],
        "also": {name: of for one in known for name, of in one.also.items()},
        "optimizers": {kind: [*weights] for kind, weights in optimizers.items()},
        "extra": plain,
    }
    facts = {
        "program": program.name,
        "plan": str(program.shape),
        "tp": first.tp,
        "dp": first.share.replicas,
        "zero": first.share.zero,
        "torch": torch.__version__,
        "options": _options(owns),
    }
    return SavePlan(peers, step, tensors, told, facts, stepped)


def write(
    taken: SavePlan, folder: str | os.PathLike[str], *, keep: int | None = None, group: Any = None
) -> Path:
    """Write what has been taken; all processes call this, and tell each other by a `group` of
    torch.distributed, that of the run unless given.  Returns and raises as `save`."""
    peers = taken.peers if group is None or taken.peers.alone else CheckpointGroup(group)
    place = CheckpointDirectory(folder)
    with ExitStack() as stack:

        def begin() -> str:
            stack.enter_context(_alone(place, taken.step))
            at = place.begin(taken.step)
            stack.callback(place.abandon, taken.step)  # which finds nothing of one that is whole
            return str(at)

        return _write(peers, place, Path(peers.first(begin)), taken, keep)


@contextmanager
def _alone(place: CheckpointDirectory, step: int) -> Iterator[None]:
    """Refuse a second writer of a folder in this process, as a Saver's thread: other processes are
    kept out by the folder's lock."""
    key = os.path.realpath(place.path)
    if (other := _writing.setdefault(key, own := [step])) is not own:
        raise CheckpointError(
            f"step {other[0]} is being written to {place.given} by this process, and step {step} "
            "must wait for it",
            hint="saver.ended() before",
        )
    try:
        yield
    finally:
        del _writing[key]


_writing: dict[str, list[int]] = {}  # the steps that this process is writing, by folder


def _write(
    peers: CheckpointGroup, place: CheckpointDirectory, at: Path, taken: SavePlan, keep: int | None
) -> Path:
    def own() -> Any:
        pieces = (piece for _, some in taken.tensors.values() for piece in some)
        with place.writing(taken.step, sum(piece.memory.nbytes for piece in pieces)):
            boxes, files = dcp_storage.write(at, peers.number, taken.tensors)
        return {name: kind for name, (kind, _) in taken.tensors.items()}, boxes, files

    told = peers.told(own, [StoredSlice, ManifestFile, TensorMeta])

    def finish() -> str:
        tensors = {name: kind for kinds, _, _ in told for name, kind in kinds.items()}
        boxes = tuple(box for _, some, _ in told for box in some)
        files = {name: file for _, _, some in told for name, file in some.items()}
        with place.writing(taken.step):
            files |= dcp_storage.write_metadata(at, tensors, boxes)
        manifest = Manifest(taken.step, files, tensors, boxes, taken.facts, taken.state)
        return str(place.finish(manifest, keep))

    return Path(peers.first(finish))


def _plain(peers: CheckpointGroup, step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the caller gave; refused in all processes where one's is no JSON, or of another step."""

    def plain() -> str:
        if not isinstance(extra, Mapping | None):
            raise CheckpointError(f"extra is {describe(extra)}, and no mapping")
        try:
            json.dumps(dict(extra or {}))
        except (TypeError, ValueError):
            raise CheckpointError(f"extra is {describe(extra)}, which JSON cannot say") from None
        return f"saves step {describe(step)}"

    peers.expect_alike(plain)
    return dict(extra or {})


def _options(owns: Sequence[LocalState]) -> list[str]:
    """The options with which weights of the first process are stepped."""
    groups = {
        id(w.group): {k: v for k, v in w.group.items() if isinstance(v, bool | int | float | str)}
        for own in owns
        for w in own.weights
        if w.optimizer is not None
    }
    return [", ".join(f"{k} {v}" for k, v in group.items()) for group in groups.values()]
