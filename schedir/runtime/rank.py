"""Rank: what one rank of a program holds while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedir.analysis.slots import KINDS, assign, counts, reuses
from schedir.errors import ExecutionError, ModelError, Site, in_words
from schedir.ir.ops import RECEIVES, ROWS, SENDS, Instr, Token
from schedir.ir.program import Program
from schedir.runtime import reduction
from schedir.runtime.ahead import Ahead
from schedir.runtime.batch import Batch
from schedir.runtime.implied_acks import implied_acks
from schedir.runtime.layout import Share
from schedir.runtime.parts import cut_state
from schedir.runtime.per_microbatch import Passing
from schedir.runtime.precision import LossScale, Steps, step_if
from schedir.runtime.random import Draws
from schedir.runtime.reduction import Reduction, last_to_add
from schedir.runtime.slots import Slot, Slots
from schedir.runtime.stage import Stage
from schedir.runtime.tied import Weight, is_apart, stand_ins
from schedir.runtime.unchanged import Unchanged
from schedir.transports.transport import Transport, Work, bytes_on, has_left

_APART = (
    "an optimizer draws random numbers, others for each copy of a tied weight: they drift apart"
)

Loss = Callable[[Any, Any], Tensor]  # of what the last stage gives, and a target


class Call(NamedTuple):
    """A linked instruction: first wait for what must have arrived, if anything, then run."""

    wait: Callable[[], None] | None
    run: Callable[[], None]


Handler = Callable[["State", Instr], Call]  # links an instruction


class State:
    """Own stages, the slots of their values, what is on its way, and what the step was given.

    This is what handlers link instructions to.  `index_of` finds an instruction (op, stage, mb) in
    the rank's Stream.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        loss: Loss,
        passing: Passing,
        optimizer: Steps | None,
        max_norm: float,
        loss_scale: LossScale | None,
        seed: int | None,
        weights: Sequence[Weight] = (),
        copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
        adds: bool = False,
        debug: bool = False,
    ) -> None:
        self.debug = debug  # the host may look at what is computed, wherever that is
        self.adds = adds  # gradients, to what is there, as autograd does
        self.program, self.plan, self.rank = program, program.plan, rank
        self.transport, self.loss, self.passing = transport, loss, passing
        self.optimizer, self.max_norm, self.loss_scale = optimizer, max_norm, loss_scale
        m = self.plan.microbatches
        self.stream, self.trains = program.streams[rank], program.trains
        self.tied, self.copies = weights, copies
        instead, self.aliases = stand_ins(weights, copies)
        self.apart = any(is_apart(weight, self.plan) for weight in weights)
        self.share = Share(program.dp, transport.dp_rank, program.zero)
        self.stages = {
            s: Stage(
                stages[s],
                self.plan,
                (i for i in self.stream if i.stage == s),
                instead.get(s, {}),
                several=self.trains and self.plan.updates > 1 and s >= program.frozen,
                most=None if adds else reduction.BUCKET if self.share != Share() else inf,
                share=self.share if s >= program.frozen else Share(program.dp, transport.dp_rank),
                tied=[weight.own[s] for weight in weights if s in weight.own],
                aliases=self.aliases,
            )
            for s in self.plan.stages_of[rank]
        }
        self.unchanged = Unchanged({s: stages[s] for s in self.stages})
        self.batch = Batch()
        self.scale: float | Tensor = 1.0  # by which sums of gradients are multiplied
        self.may_step = True  # else the optimizer is held back
        self.loss_gradient: Tensor | None = None  # with which backwards begin, where it is not 1
        self.device = device_of(stages)
        first = transport.dp_rank * m  # of all replicas' microbatches
        self.draws = Draws(seed, self.device, m, first=first, updates=self.plan.updates)
        self.losses = [torch.zeros((), device=self.device)] * m
        self.norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self.finite = torch.ones(self.plan.updates, dtype=torch.bool, device=self.device)
        self.ahead: Ahead | None = None
        if program.validate == "after" and self.trains:
            own = self.stages.values()
            self.ahead = Ahead(
                [stage.gradients for stage in own], [stage.module for stage in own],
                optimizer, loss_scale, self.draws, self.device, debug,
            )  # fmt: skip
        # Under way: what is sent, by index in the Stream, as long as it may not have arrived, and
        # reductions that nobody has waited for.
        self.sending: dict[int, tuple[Work, Tensor]] = {}
        self.reducing: list[Work] = []
        self.scattering: deque[tuple[int, list[Work]]] = deque()  # by index, the first first
        # Sums over replicas, and what each begins under, unless they are `late`.
        self.reductions: dict[Instr, Reduction] = {}
        self.last_to_add = last_to_add(self.stream) if program.dp > 1 else {}
        self.late = False
        # Within `as_of(k)` the recorder counts what is started as instruction k's.
        self.as_of: Callable[[int], AbstractContextManager[object]] = nullcontext
        # For receives, by index in the Stream, the sends that have arrived when they have.
        self.implied_acks = implied_acks(program, rank)
        self.index_of: dict[tuple[int, ...], int] = {i: k for k, i in enumerate(self.stream)}
        self.assigned = assign(program, rank)
        self.slots = dict(zip(KINDS, map(Slots, counts(program)[rank].tolist()), strict=True))
        # Static memory of what is received, by kind and slot: bytes.
        rooms = {kind: self._rooms(kind) for op in RECEIVES for kind in ROWS[op].gives}
        self.buffers = transport.buffers(rooms, self.device)
        self._outgoing: dict[tuple[Token, int, bool], Tensor] = {}  # and of what is sent
        self.reuse_after_send = _reuse_after_send(program, rank)
        # For what adds to a gradient that is whole anew, the reduction whose room that takes.
        self.room_after = {fill: free for _, fill, free in _reuses(program, rank, Token.WGRAD)}

    def cut(self) -> None:
        """Keep of what replicas share no more than the own part: the end of what can be undone."""
        parts: dict[nn.Parameter, Tensor] = {}
        pieces: dict[nn.Parameter, tuple[torch.Size, int, int]] = {}
        for stage in self.stages.values():
            if (weights := stage.weights) is not None:
                weights.cut(parts)
                for bucket, own in zip(weights.buckets, weights.own, strict=True):
                    parts |= dict.fromkeys(bucket.parameters[:1], own)
                    ranges = bucket.ranges(self.share.replica)
                    for p, shape, (low, high, _) in zip(
                        bucket.parameters, bucket.shapes, ranges, strict=True
                    ):
                        pieces[p] = shape, low, high
        cut_state(self.optimizer, pieces)

    def expect(self, batch: Batch) -> None:
        """Raise ExecutionError where the rank takes microbatches, and is not given all."""
        first, last = (s in self.stages for s in (0, self.plan.stages - 1))
        batch.expect(self.program, self.rank, first=first, last=last)

    def begin(self, batch: Batch) -> None:
        """Make ready for a step."""
        self.draws.begin()
        self.batch, self.scale = batch, batch.scale
        if self.loss_scale is not None:
            gradient = (self.loss_scale.value * self.scale).float()
            if self.loss_gradient is None:
                self.loss_gradient = gradient
            else:  # in its place, where a graph reads it
                self.loss_gradient.copy_(gradient)
            self.scale = self.loss_scale.inverse
        for shared, copy in self.copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())
        self.begin_update(0)

    def finish(self) -> Tensor | None:
        """End a step: wait for what is still on its way out; returns the sum of losses on the rank
        of the last stage, and None elsewhere."""
        for work, _ in self.sending.values():
            work.wait()
        self.sending.clear()
        total = None
        if self.plan.stages - 1 in self.stages:
            # By microbatch, whatever their order was; a loss may lie in what was received.
            total = sum(self.losses, torch.zeros((), device=self.device))
        self.transport.step_ended()
        self.restore()
        return total

    def begin_update(self, update: int) -> None:
        """Make ready for an update: no gradients, and the weights as they are now."""
        for alias, one in self.aliases.items():
            if not self.share.zero and alias.data_ptr() != one.data_ptr():  # its `data` is another
                alias.data = one.data
            if self.adds:
                alias.grad = None
        for stage in self.stages.values():
            if stage.weights is not None:
                stage.weights.begin()
            stage.gradients.zero()
            if stage.versions is not None and update:
                stage.versions.keep(update)
            elif stage.versions is not None:
                stage.versions.begin()

    def let_step(self, finite: Tensor) -> None:
        """Let the optimizer step if `finite`, 0-dim bool, is true."""
        finite = finite if self.may_step else torch.zeros_like(finite)
        if self.optimizer is not None:
            with self.draws.warning(_APART) if self.apart else nullcontext():
                step_if(finite, self.optimizer)

    def norm_and_finite(self) -> tuple[Tensor, Tensor]:
        """Of the last step, as `Executor.norm` and `Executor.finite` have it."""
        if self.ahead is None:
            return self.norm, self.finite
        norm = self.ahead.last_norm()
        return norm, norm.isfinite().view(1)

    def slot(self, kind: Token, stage: int, mb: int, at: int | None = None) -> Slot:
        """Where a value lives; as the instruction at an index of the Stream finds or fills it."""
        fills = self.assigned[kind, stage, mb]
        last = max(fill for fill in fills if at is None or fill <= at)
        return Slot(self.slots[kind], fills[last])

    def _rooms(self, kind: Token) -> list[int]:
        """The bytes of each slot of a kind that messages leave or come into: of the largest."""
        rooms = [0] * len(self.slots[kind].values)
        for (one, stage, mb), fills in self.assigned.items():
            if one is kind and self.program.other(kind, stage) >= 0:
                size = self.passing[mb].carried(kind, stage).nbytes
                for number in fills.values():
                    rooms[number] = max(rooms[number], size)
        return rooms

    def outgoing(self, kind: Token, number: int, *, part: bool) -> Tensor | None:
        """Memory, made once, from which the value in a slot is sent, or the `part` of it that a
        scatter leaves: bytes; None where the transport sends from wherever a value is.

        Whoever fills the slot next has waited for the send, or the step has ended.
        """
        if self.transport.static and (kind, number, part) not in self._outgoing:
            size = self._rooms(kind)[number] // (self.program.tp if part else 1)
            self._outgoing[kind, number, part] = bytes_on(self.device, size)
        return self._outgoing.get((kind, number, part))

    def tensors_out(self, kind: Token, stage: int, mb: int) -> Sequence[Tensor]:
        """The tensors of a value in its slot, that is handed over or about to be sent."""
        value = self.slot(kind, stage, mb).look()
        if isinstance(value, tuple):
            return value
        carried = self.passing[mb].carried(kind, stage)
        return (value,) if carried.alone else carried.lay(value)[1]

    def loss_gradient_of(self, mb: int) -> Tensor:
        """The gradient of a loss: NaN where it is not finite, so that all who step with it know;
        where gradients are added to others and nothing is scaled later, the scale."""
        loss = self.losses[mb]
        if self.adds:
            return torch.as_tensor(self.scale, dtype=loss.dtype, device=loss.device)
        return loss - loss + (1.0 if self.loss_gradient is None else self.loss_gradient)

    def let_go(self, send: int) -> None:
        """Wait for a send, unless somebody has, and then let go what was sent."""
        if send in self.sending:
            work, tensor = self.sending.pop(send)
            work.wait()
            del tensor  # not before: on a GPU what comes next may take its memory

    def wait_for_reductions(self) -> None:
        """Wait until every reduction that was begun has ended."""
        while self.scattering:
            self._wait_for_parts()
        for work in self.reducing:
            work.wait()
        self.reducing.clear()

    def make_room(self, stage: int, at: int) -> None:
        """Let there be a stage's whole gradient, for the instruction at an index to add to: when
        that is reduced whose slot it takes."""
        gradients = self.stages[stage].gradients
        if gradients.made:
            return
        while self.scattering and self.scattering[0][0] <= self.room_after.get(at, -1):
            self._wait_for_parts()
        gradients.make()

    def _wait_for_parts(self) -> None:
        """Wait for the first reduction to parts that nobody has waited for."""
        _, works = self.scattering.popleft()
        for work in works:
            work.wait()

    def restore(self) -> None:
        """Let the modules have their parameters as between steps."""
        for stage in self.stages.values():
            stage.restore()

    def fail(self, *, begun: bool) -> None:
        """After an error, where a step was `begun` or was to begin: no module keeps what stands in,
        and nobody takes an update for right that is not validated."""
        self.restore()
        if self.ahead is not None:
            self.ahead.fail(begun=begun)

    def failed(self, k: int, error: Exception) -> ExecutionError:
        """An error as that of the instruction at index k of the Stream."""
        return ExecutionError(
            has_left(error) or in_words(error),
            program=self.program.name,
            sites=[Site(self.rank, k, self.stream[k], "failed")],
            hint=getattr(error, "hint", ""),
        )

    def local_stage(self, stage: int, mb: int) -> Stage | None:
        """The stage if this rank runs it for the microbatch: then values are handed over."""
        if stage not in self.stages or self.plan.rank_at(stage, mb) != self.rank:
            return None
        return self.stages[stage]


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where a rank's stages are: where their parameters are.

    Raises ModelError if they are in several places.
    """
    found = {p.device for stage in stages.values() for p in stage.parameters()}
    if len(found) > 1:
        raise ModelError(
            f"the parameters of one rank are on {' and '.join(sorted(map(str, found)))}"
        )
    return next(iter(found), torch.device("cpu"))


def _reuse_after_send(program: Program, rank: int) -> dict[int, list[int]]:
    """For what fills slots that sends must have left, these sends; by index in the Stream."""
    found: dict[int, list[int]] = {}
    stream = program.streams[rank]
    for _, fill, free in _reuses(program, rank):
        if stream[free].op in SENDS:
            found.setdefault(fill, []).append(free)
    return found


def _reuses(program: Program, rank: int, *kinds: Token) -> Iterator[tuple[Token, int, int]]:
    """Who fills a slot that had a value before, and who frees it, by index in a rank's Stream; of
    some kinds, or of all."""
    lo, end = map(int, program.offsets[rank : rank + 2])
    for kind, (fills, frees) in reuses(program).items():
        for fill, free in zip(fills.tolist(), frees.tolist(), strict=True):
            if lo <= fill < end and (kind in kinds or not kinds):
                yield kind, fill - lo, free - lo
