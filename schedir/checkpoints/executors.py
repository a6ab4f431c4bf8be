"""Save and load: the state of an executor, in the folder of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from schedir.checkpoints import storage
from schedir.checkpoints.drawn import draw_on, generators, world
from schedir.checkpoints.folder import File, Folder, Kind, Manifest, Stored
from schedir.checkpoints.known import known_of, peers_of, ranks_of, say, warn_of_buffers
from schedir.checkpoints.own import Names, Own, Piece
from schedir.checkpoints.peers import Peers
from schedir.checkpoints.wanted import Wanted
from schedir.errors import CheckpointError, said
from schedir.runtime.executor import Executor
from schedir.runtime.inprocess import InProcess


def of_stages(stage: int, name: str) -> str:
    """A name that a number of stages makes, for modules that have none for the whole model."""
    return f"stages.{stage}.{name}"


def save(
    executor: Executor | InProcess,
    folder: str | os.PathLike[str],
    *,
    step: int,
    names: Names = of_stages,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write what an executor is after `step` steps to a folder of its own in `folder`, and return
    that; all processes call this, between steps.

    Saved are weights, float32 copies of a MainOptimizer, what optimizers keep of each weight,
    persistent buffers, the number of the next step, the scale of a loss, without a seed torch's
    generators, and of the first process `extra`, which is JSON.  Options of optimizers, as a
    learning rate, are the caller's.  `names` gives the name that a parameter or buffer of a stage
    has in the whole model: that is how a run with other stages finds it.  Of the checkpoints in the
    folder the newest `keep` stay, or all.

    A last update that is not validated (validate "after") is settled first.  Raises
    CheckpointError, in all processes, for what could not be saved right, and where one fails.

    >>> import schedir, tempfile, torch
    >>> from schedir.checkpoints import load, save
    >>> from schedir.runtime import InProcess
    >>> def made(ranks):  # four stages on so many ranks
    ...     plan = schedir.Plan(ranks, 4, stages_per_rank=4 // ranks)
    ...     program = schedir.compile(schedir.schedules.interleaved, plan)
    ...     stages = [torch.nn.Linear(8, 8) for _ in range(4)]
    ...     how = dict(loss=torch.nn.functional.mse_loss, boundary=(2, 8))
    ...     return InProcess(program, stages, optimizer=torch.optim.AdamW, **how)
    >>> x, one, other = torch.ones(4, 2, 8), made(ranks=4), made(ranks=2)
    >>> loss = one.step(x, x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     at = save(one, folder, step=1)
    ...     at.name, load(other, folder)
    ('step-00000001', {'step': 1, 'extra': {}})
    >>> bool(one.step(x, x) == other.step(x, x))  # as if nothing had been between
    True
    """
    return write(take(executor, step=step, names=names, extra=extra), folder, keep=keep)


@dataclass
class Taken:
    """What a process is to write, and where it is in memory: of tensors by name what they are, and
    boxes; of those that a step changes the rank's number in this process, and the stage."""

    peers: Peers
    step: int
    tensors: dict[str, tuple[Kind, list[Piece]]]
    state: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    stepped: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def take(
    executor: Executor | InProcess,
    *,
    step: int,
    names: Names = of_stages,
    extra: Mapping[str, Any] | None = None,
) -> Taken:
    """What a process is to write of an executor after `step` steps, in the memory in which it is:
    the next step changes that.  All processes call this.  Raises as `save`."""
    peers, ranks = peers_of(executor), ranks_of(executor)
    plain = dict(extra or {})
    _require_plain(peers, plain)
    owns, known = known_of(peers, executor, names)
    warn_of_buffers(peers, known)
    tensors: dict[str, tuple[Kind, list[Piece]]] = {}
    for own in owns:
        for part in own:
            if part.writes:
                tensors[part.name] = part.kind, part.cut.own(part.memory)
    stepped = {
        part.name: (k, weight.stage)
        for k, own in enumerate(owns)
        for weight in own.weights
        if weight.parameter.requires_grad
        for part in weight.parts()
        if part.writes
    }
    state, program = ranks[0].state, ranks[0].program
    if state.draws.seed is None:
        tensors |= generators(peers, ranks[0])
    scale = state.loss_scale
    optimizers: dict[str, dict[str, None]] = {}
    for one in known:
        for kind, weights in one.optimizers.items():
            optimizers.setdefault(kind, {}).update(dict.fromkeys(weights))
    told = {
        "next": state.draws.step,
        "seed": state.draws.seed,
        "world": world(ranks[0]),
        "loss_scale": scale and [float(scale.value), int(scale.good)],
        "also": {name: of for one in known for name, of in one.also.items()},
        "optimizers": {kind: [*weights] for kind, weights in optimizers.items()},
        "extra": plain,
    }
    facts = {
        "program": program.name,
        "plan": str(program.plan),
        "tp": program.tp,
        "dp": program.dp,
        "zero": program.zero,
        "torch": torch.__version__,
        "options": _options(owns),
    }
    return Taken(peers, step, tensors, told, facts, stepped)


def write(
    taken: Taken, folder: str | os.PathLike[str], *, keep: int | None = None, group: Any = None
) -> Path:
    """Write what has been taken; all processes call this, and tell each other by a `group` of
    torch.distributed, that of the executor unless given.  Returns and raises as `save`."""
    peers = taken.peers if group is None or taken.peers.alone else Peers(group)
    place = Folder(folder)
    with ExitStack() as stack:

        def begin() -> str:
            stack.enter_context(_alone(place, taken.step))
            at = place.begin(taken.step)
            stack.callback(place.abandon, taken.step)  # which finds nothing of one that is whole
            return str(at)

        return _write(peers, place, Path(peers.first(begin)), taken, keep)


@contextmanager
def _alone(place: Folder, step: int) -> Iterator[None]:
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


def _write(peers: Peers, place: Folder, at: Path, taken: Taken, keep: int | None) -> Path:
    def own() -> Any:
        boxes, files = storage.write(at, peers.number, taken.tensors)
        return {name: kind for name, (kind, _) in taken.tensors.items()}, boxes, files

    told = peers.told(own, [Stored, File, Kind])

    def finish() -> str:
        tensors = {name: kind for kinds, _, _ in told for name, kind in kinds.items()}
        boxes = tuple(box for _, some, _ in told for box in some)
        files = {name: file for _, _, some in told for name, file in some.items()}
        files |= storage.write_metadata(at, tensors, boxes)
        manifest = Manifest(taken.step, files, tensors, boxes, taken.facts, taken.state)
        return str(place.finish(manifest, keep))

    return Path(peers.first(finish))


def load(
    executor: Executor | InProcess,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    names: Names = of_stages,
) -> Mapping[str, Any] | None:
    """Be what a checkpoint says that `save` has written, whatever ranks, stages, replicas and
    slices wrote it: that of a `step`, or the newest whole one; all processes call this, between
    steps.  Returns a mapping with its `step` and `extra`, or None where there are no checkpoints.

    An executor without an optimizer takes weights and buffers alone.  It is said in a warning where
    a newer checkpoint is not whole, where numbers are of another type than the checkpoint's, and
    where modules will draw others.

    Raises CheckpointError, in all processes, for a checkpoint of another model, or one that cannot
    be read, and where there are some and none is whole: the first three things that do not fit are
    said, and nothing has been changed.  Where a file cannot be read any more when all has been
    verified, a part of the numbers is: neither a step nor a save of this executor goes on from
    that.

    >>> import schedir, tempfile, torch
    >>> from schedir.checkpoints import load
    >>> from schedir.runtime import InProcess
    >>> program = schedir.compile(schedir.schedules.gpipe, schedir.Plan(ranks=2, microbatches=4))
    >>> stages = [torch.nn.Linear(8, 8) for _ in range(2)]
    >>> how = dict(loss=torch.nn.functional.mse_loss, boundary=(2, 8))
    >>> run = InProcess(program, stages, optimizer=torch.optim.AdamW, **how)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(load(run, folder))  # nothing has been saved there
    None
    """
    peers, ranks, place = peers_of(executor), ranks_of(executor), Folder(folder)
    found, passed = peers.first(lambda: _newest(place) if step is None else _of(place, step))
    if found is None:
        return None
    for fact in passed:
        say(peers, f"passed over: {fact}")
    owns, _ = known_of(peers, executor, names)
    wanted: list[Wanted] = []

    def expect() -> Any:
        one = Wanted(place.read(found), owns)
        wanted.append(one)
        return one.taken, [*one.wrong], [*one.said], _trained(owns, one)

    told = peers.told(expect)
    (want,) = wanted
    wrong = [fact for _, facts, _, _ in told for fact in facts]
    if not wrong:
        wrong += want.unread(name for taken, *_ in told for name in taken)
        wrong += _one_for_two([trained for *_, trained in told])
    if wrong := [*dict.fromkeys(wrong)]:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"the checkpoint of step {found} does not fit: {'; '.join(wrong[:3])}{more}"
        )

    def read() -> None:
        for _, part in want.wants:
            if part.cut.is_padded:
                part.memory.detach().zero_()
        storage.read(
            place.of(found),
            want.manifest,
            [(n, part.cut.all(part.memory)) for n, part in want.wants],
        )
        for weight, kept in want.state:
            weight.optimizer.state.pop(weight.stepped, None)
            if kept:
                weight.optimizer.state[weight.stepped] = kept

    for rank in ranks:
        rank.state.held.snapshots.forget()
        rank.state.held.under_way = True  # until all is read: nobody goes on with a part of it
    try:
        with torch.no_grad():
            peers.told(read)
    except CheckpointError as error:
        error.hint = error.hint or "make the executor anew: a part of its weights has been read"
        raise
    for rank in ranks:
        rank.state.held.under_way = False
    state = want.manifest.state
    _go_on(peers, ranks, state, place.of(found), want.manifest)
    for fact in dict.fromkeys(fact for _, _, facts, _ in told for fact in facts):
        say(peers, fact)
    return {"step": want.manifest.step, "extra": state["extra"]}


def _newest(folder: Folder) -> tuple[int | None, list[str]]:
    """The newest step that is whole, and why those after it are not; None where there are none."""
    found = folder.find()
    passed = [*found.passed]
    if found.manifest is not None or not passed:
        return None if found.manifest is None else found.manifest.step, passed
    more = f"; and {len(passed) - 3} more" if len(passed) > 3 else ""
    raise CheckpointError(
        f"of the checkpoints in {folder.given} none is whole: {'; '.join(passed[:3])}{more}",
        hint="to begin at the first step, remove them or take another folder",
    )


def _of(folder: Folder, step: int) -> tuple[int | None, list[str]]:
    """A step that is asked for, when it is whole."""
    return folder.verify(step).step, []


def _require_plain(peers: Peers, extra: Mapping[str, Any]) -> None:
    def plain() -> None:
        try:
            json.dumps(extra)
        except (TypeError, ValueError):
            raise CheckpointError(f"extra is {said(extra)}, which JSON cannot say") from None

    peers.told(plain)


def _options(owns: Sequence[Own]) -> list[str]:
    """The options with which weights of the first process are stepped."""
    groups = {
        id(w.group): {k: v for k, v in w.group.items() if isinstance(v, bool | int | float | str)}
        for own in owns
        for w in own.weights
        if w.optimizer is not None
    }
    return [", ".join(f"{k} {v}" for k, v in group.items()) for group in groups.values()]


def _trained(owns: Sequence[Own], wanted: Wanted) -> dict[str, str]:
    """Of weights that are trained, by name, under which name a checkpoint has them."""
    every = (weight for own in owns for weight in own.weights)
    return {w.name: wanted.name_of(w) for w in every if w.parameter.requires_grad}


def _one_for_two(told: Sequence[Mapping[str, str]]) -> list[str]:
    """What a checkpoint has once, and a run trains twice: a weight that was tied."""
    whose: dict[str, str] = {}
    every = {name: stored for one in told for name, stored in one.items()}
    return [
        f"{whose[stored]} and {name} are one weight in it, and two here"
        for name, stored in every.items()
        if whose.setdefault(stored, name) != name
    ]


def _go_on(
    peers: Peers,
    ranks: Sequence[Executor],
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
) -> None:
    """Let steps, draws and scale go on from what they were."""
    seed, trains = ranks[0].draws.seed, ranks[0].program.trains
    for rank in ranks:
        rank.draws.step = state["next"]
        scale, told = rank.state.loss_scale, state["loss_scale"]
        if scale is not None and told is not None:
            scale.value.fill_(told[0])
            scale.good.fill_(told[1])
    if seed != state["seed"]:
        if trains:
            say(peers, f"modules draw by the seed {seed}, and drew by {state['seed']}")
    elif seed is None:
        draw_on(peers, ranks[0], state, folder, manifest, warn=trains)
