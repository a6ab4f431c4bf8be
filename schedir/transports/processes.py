"""Processes over torch.distributed: mesh, transport, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from schedir.analysis.models import Model
from schedir.errors import ModelError
from schedir.ir.ops import Lane, Token
from schedir.ir.program import Program
from schedir.ir.ties import meets, ranks_of
from schedir.transports import groups
from schedir.transports.collectives import COLLECTIVES, Group, Kind
from schedir.transports.transport import Work, buffers


def require(processes: int) -> None:
    """Every machine has a CPU for its processes."""


def initialise(timeout: float, **how: Any) -> torch.device:
    """Initialise torch.distributed over Gloo, as torchrun says, or as `how` tells
    `init_process_group`; returns where the tensors of its processes are."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **how)
    return torch.device("cpu")


class Processes:
    """Processes of torch.distributed, and what they do together: all but messages.

    Ranks lie in a mesh (dp, pp, tp), tp innermost, so that tensor-parallel groups are
    neighbours.  Groups for tensors on a GPU are NCCL's.

    The tensor-parallel group of collectives is another one than that of the layers, and there is a
    CUDA stream for it: a gather that waits for its message holds up no layer.

    `timeout` is how many seconds its groups wait for each other, NCCL's longer; as torch has it
    unless told.  `device` is where tensors are, and `message` how many bytes one has at most, 0 if
    that is not known.

    `torch.distributed` must be initialised with pp * tp * dp processes.
    Raises ModelError otherwise.

    One that `schedir train` may choose has a row in `registry`.
    """

    model: Model
    grouped = False
    blocks = True
    has_pipeline = False  # whether messages go through a group of the pipeline's ranks
    aside: Callable[[], AbstractContextManager[object]] = staticmethod(nullcontext)

    def __init__(
        self,
        program: Program,
        timeout: float | None = None,
        *,
        device: torch.device | str = "cpu",
        message: int = 0,
    ) -> None:
        self.static = torch.device(device).type != "cpu"
        self.tp, self.dp, pp = program.tp, program.dp, program.plan.ranks
        world = dist.get_world_size()
        if world != pp * self.tp * self.dp:
            raise ModelError(
                f"{world} processes do not make pp {pp} x tp {self.tp} x dp {self.dp} = "
                f"{pp * self.tp * self.dp}",
                program=program.name,
            )
        self.mesh = mesh = np.arange(world).reshape(self.dp, pp, self.tp)
        self.dp_rank, self.rank, self.tp_rank = (
            int(k) for k in np.unravel_index(dist.get_rank(), mesh.shape)
        )
        self.make = partial(groups.make, timeout=timeout, device=device)
        self.name = program.name
        groups.level(
            self.agree(
                {"the program": program.digest[:12], "the transport": type(self).__name__},
                groups.count(),
            )
        )
        if self.has_pipeline:
            self.pipeline = self._group(mesh.swapaxes(1, 2).reshape(-1, pp))
        self.groups: dict[Group, Any] = {"model": self._group(mesh.reshape(self.dp, -1))}
        self.tp_group = None  # that of the layers
        if self.tp > 1:
            self.tp_group = self._group(mesh.reshape(-1, self.tp))
            self.groups["tp"] = self._group(mesh.reshape(-1, self.tp))
            if self.static:
                self.aside = partial(torch.cuda.stream, torch.cuda.Stream(device))
        if self.dp > 1:
            self.groups["dp"] = self._group(mesh.reshape(self.dp, -1).T)
        if program.plan.two_way:
            pairs = np.stack([mesh, mesh[:, ::-1]], -1)[:, : pp // 2]
            self.groups["holders"] = self._group(pairs.reshape(-1, 2))
        for stages in program.tied:
            ranks = ranks_of(stages, program.plan)
            if ranks not in self.groups and meets(stages, program.plan):
                rows = mesh[:, ranks].swapaxes(1, 2).reshape(-1, len(ranks))
                self.groups[ranks] = self._group(rows)

    @classmethod
    def fits(cls, program: Program) -> bool:
        """Whether these processes can run the program so; all must ask."""
        return True

    def _group(self, members: NDArray[np.int64]) -> Any:
        """The group of the row that this process is in; None if it is in none."""
        return self.make(members.tolist())

    def agree(self, facts: Mapping[str, str], tell: object = None) -> list[Any]:
        """As Transport.agree: all processes must call this."""
        all_of: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of, (dict(facts), tell))
        everyone: list[dict[str, str]] = [own for own, _ in all_of]
        # In sorted order, so that all processes say the same of several differences.
        for fact in sorted({fact for own in everyone for fact in own}):
            values = {k: own[fact] for k, own in enumerate(everyone) if fact in own}
            first = next(iter(values))
            for other, value in values.items():
                if value != values[first]:
                    raise ModelError(
                        f"processes {first} and {other} do not agree on {fact}: {values[first]} "
                        f"and {value}",
                        program=self.name,
                    )
        return [told for _, told in all_of]

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.send."""
        raise NotImplementedError

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.recv."""
        raise NotImplementedError

    def buffers(self, slots: Mapping[Token, int], like: Tensor) -> dict[tuple[Token, int], Tensor]:
        """As Transport.buffers."""
        return buffers(slots, like)

    def step_ended(self) -> None:
        """Nobody needs to know."""

    def start_group(self) -> None:
        """Only a transport that is `grouped` is told."""

    def end_group(self) -> None:
        """As `start_group`."""

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """As Transport.collective."""
        return cast(Work, COLLECTIVES[kind].start(self.groups[group], out, own))


class Gloo(Processes):
    """The transport of CPU processes.  Its progress model is `edge`.

    Gloo honours tags: one tag per lane makes each directed edge a queue of its own, which nothing
    else can hold up.

    >>> import schedir
    >>> from torch import distributed
    >>> from schedir.runtime import Gloo
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> one = schedir.compile(schedir.schedules.gpipe, schedir.Plan(ranks=1, microbatches=4))
    >>> Gloo(one).model
    'edge'
    >>> Gloo(schedir.compile(schedir.schedules.gpipe, schedir.Plan(ranks=4, microbatches=4), dp=2))
    Traceback (most recent call last):
        ...
    schedir.errors.ModelError: gpipe: 1 processes do not make pp 4 x tp 1 x dp 2 = 8
    >>> distributed.destroy_process_group()
    """

    model: Model = "edge"
    has_pipeline = True

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to send; Gloo's sends run on their own."""
        # The group itself: dist.isend would look up each time what is known here.
        return cast(Work, self.pipeline.send([tensor], peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Start to receive."""
        return cast(Work, self.pipeline.recv([tensor], peer, lane))
