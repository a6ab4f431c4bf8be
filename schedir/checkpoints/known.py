"""Known: what all processes know of each other's state, before any of it is written or read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from schedir.checkpoints.folder import Kind
from schedir.checkpoints.own import Names, Own, own_of, tied_names
from schedir.checkpoints.peers import Peers
from schedir.checkpoints.savable import expect_at_rest, expect_cut
from schedir.errors import CheckpointError
from schedir.runtime.executor import Executor
from schedir.runtime.inprocess import InProcess
from schedir.transports.processes import Processes
from schedir.transports.transport import Around


class Known(NamedTuple):
    """What a process tells of what it has: by name in the whole model, what it is and of which
    stage; other names of the same; the weights of each optimizer; and digests of buffers."""

    parts: dict[str, tuple[int, Kind]]
    also: dict[str, str]
    optimizers: dict[str, list[str]]
    buffers: dict[str, str]


def ranks_of(executor: Executor | InProcess) -> Sequence[Executor]:
    """The ranks that are in this process."""
    return executor.ranks if isinstance(executor, InProcess) else [executor]


def peers_of(executor: Executor | InProcess) -> Peers:
    """The processes that run a program together."""
    if isinstance(executor, InProcess):
        return Peers(alone=True)
    transport: Any = executor.state.transport
    while isinstance(transport, Around):
        transport = transport.inner
    return Peers(transport.within) if isinstance(transport, Processes) else Peers(alone=True)


def known_of(
    peers: Peers, executor: Executor | InProcess, names: Names
) -> tuple[list[Own], list[Known]]:
    """What a process has, and what all tell of theirs, the same in all.

    Raises CheckpointError for what cannot be saved, or where two have one name.
    """
    ranks = ranks_of(executor)

    def tied() -> Any:
        for rank in ranks:
            expect_at_rest(rank)
        return {key: name for rank in ranks for key, name in tied_names(rank, names).items()}

    first = {key: name for some in peers.told(tied) for key, name in some.items()}
    executor.settle()
    owns: list[Own] = []

    def own() -> Known:
        for rank in ranks:
            owns.append(own_of(rank, names, first))
            expect_cut(rank.state.optimizer, owns[-1])
        return _told_of(owns)

    known = peers.told(own, [Known, Kind])
    _expect_one_of_each(known)
    return owns, known


def _told_of(owns: Sequence[Own]) -> Known:
    known = Known({}, {}, {}, {})
    for own in owns:
        for weight in own.weights:
            _note(known.parts, f"weights/{weight.name}", weight.of, next(weight.numbers()).kind)
            known.also.update(dict.fromkeys(weight.also, weight.name))
            if weight.optimizer is not None and weight.parameter.requires_grad:
                by = type(weight.optimizer).__name__
                known.optimizers.setdefault(by, []).append(weight.name)
        for stage, part in own.buffers:
            _note(known.parts, part.name, stage, part.kind)
            numbers = part.memory.detach().cpu().resolve_conj().resolve_neg().contiguous()
            numbers = numbers.view(-1).view(torch.uint8)
            known.buffers[part.name] = sha256(numbers.numpy().tobytes()).hexdigest()[:16]
    return known


def _note(parts: dict[str, tuple[int, Kind]], name: str, stage: int, kind: Kind) -> None:
    if parts.setdefault(name, (stage, kind))[0] != stage:
        raise _two(name, parts[name][0], stage)
    parts[name] = stage, kind


def _expect_one_of_each(known: Sequence[Known]) -> None:
    every: dict[str, tuple[int, Kind]] = {}
    for process, one in enumerate(known):
        for name, (stage, kind) in one.parts.items():
            other, there = every.setdefault(name, (stage, kind))
            if other != stage:
                raise _two(name, other, stage)
            if there != kind:
                raise CheckpointError(
                    f"{name} is {list(there.shape)} of {there.dtype} in one process, and "
                    f"{list(kind.shape)} of {kind.dtype} in process {process}"
                )


def _two(name: str, one: int, other: int) -> CheckpointError:
    return CheckpointError(
        f"stages {one} and {other} both have {name}",
        hint="names=..., which gives each its name in the whole model",
    )


def warn_of_buffers(peers: Peers, known: Sequence[Known]) -> None:
    """Say it where a buffer is not the same wherever it is, as of replicas that see other data."""
    digests: dict[str, str] = {}
    for one in known:
        for name, digest in one.buffers.items():
            if digests.setdefault(name, digest) != digest:
                say(peers, f"{name} is not the same in all processes: that of the first is saved")
                return


def say(peers: Peers, fact: str) -> None:
    """Warn, once for all processes."""
    if not peers.number:
        warnings.warn(fact, stacklevel=4)
