"""Rank: what one rank of a program holds while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.ops import Lane
from schedir.program import Program
from schedir.runtime.arrivals import arrived
from schedir.runtime.gradients import Gradients
from schedir.runtime.split import Tape
from schedir.runtime.transport import Transport, Work

Loss = Callable[[Tensor, Tensor], Tensor]
Microbatches = Sequence[Tensor] | Tensor  # one tensor each, or stacked


class Steps(Protocol):
    """What is asked of an optimizer."""

    def step(self) -> object: ...


@dataclass(frozen=True)
class Boundary:
    """Shape and type of what passes between stages, for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def expect(self, value: object, maker: str) -> None:
        """Raise ModelError for what cannot pass: the other side has made room for this shape."""
        if not isinstance(value, Tensor):
            got = type(value).__name__
        elif (tuple(value.shape), value.dtype) != (self.shape, self.dtype):
            got = f"{list(value.shape)} of {value.dtype}"
        else:
            return
        raise ModelError(f"{maker} gives {got}, the boundary is {list(self.shape)} of {self.dtype}")


class Call(NamedTuple):
    """A linked instruction: first wait for what must have arrived, if anything, then run."""

    wait: Callable[[], None] | None
    run: Callable[[], None]


class Stage:
    """One own stage: its module, and the slots of its values, one per microbatch."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self.module = module
        self.gradients = Gradients(module)
        self.act_in: list[Tensor | None] = [None] * microbatches
        self.act_out: list[Tensor | None] = [None] * microbatches
        self.saved: list[tuple[Tensor, Tensor] | None] = [None] * microbatches
        self.grad_in: list[Tensor | None] = [None] * microbatches
        self.grad_out: list[Tensor | None] = [None] * microbatches
        self.tape: list[Tape | None] = [None] * microbatches
        self.arriving: dict[tuple[Lane, int], Work] = {}
        self.warned = False  # that the module cannot be split

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The copy of the tied weight that this stage holds, if it says so."""
        weight: nn.Parameter | None = getattr(self.module, "tied_weight", None)
        return weight


class Rank:
    """Own stages, what is on its way, and what the step was given.

    `where` finds an instruction (op, stage, mb) in the rank's Stream; `began` and `ended` are
    when each one last ran, in seconds of this process's clock, if `record` says so.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        loss: Loss,
        boundary: Boundary,
        optimizer: Steps | None,
        max_norm: float,
        record: bool,
    ) -> None:
        self.program, self.plan, self.rank = program, program.plan, rank
        self.transport, self.loss, self.boundary = transport, loss, boundary
        self.optimizer, self.max_norm = optimizer, max_norm
        m = self.plan.microbatches
        self.stages = {s: Stage(stages[s], m) for s in self.plan.stages_of[rank]}
        self.inputs: Microbatches = ()
        self.targets: Microbatches = ()
        self.scale = 1.0
        self.device = _device(self.stages)
        self.losses = [torch.zeros((), device=self.device)] * m
        self.norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self.stream = program.streams[rank]
        # Under way, by index in the Stream: what is sent, as long as it may not have arrived,
        # and reductions that nobody has waited for.
        self.sending: dict[int, tuple[Work, Tensor]] = {}
        self.reducing: list[tuple[int, Work]] = []
        self.known = arrived(program, rank)
        self.where: dict[tuple[int, ...], int] = {i: k for k, i in enumerate(self.stream)}
        self.record = record
        self.began, self.ended = [0.0] * len(self.stream), [0.0] * len(self.stream)

    def beside(self, stage: int, mb: int) -> Stage | None:
        """The stage if this rank runs it for the microbatch: then values are handed over."""
        if stage not in self.stages or self.plan.rank_at(stage, mb) != self.rank:
            return None
        return self.stages[stage]

    def ends(self, k: int) -> None:
        """Note that the instruction at an index of the Stream has ended now."""
        if self.record:
            self.ended[k] = perf_counter()


def _device(stages: Mapping[int, Stage]) -> torch.device:
    """Where a rank's stages are: where their parameters are.

    Raises ModelError if they are in several places.
    """
    found = {p.device for stage in stages.values() for p in stage.module.parameters()}
    if len(found) > 1:
        raise ModelError(
            f"the parameters of one rank are on {' and '.join(sorted(map(str, found)))}"
        )
    return next(iter(found), torch.device("cpu"))
