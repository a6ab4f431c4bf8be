"""Checkpoint: what a forward keeps of a microbatch until it is run again, and what it found then.

A forward that is run again must do the same again.  Its weights are the microbatch's version, its
random numbers are seeded as for the first time, and its keywords are the batch's.  What else it may
find changed are buffers that forwards write to, as running statistics, and generators that nobody
seeds: of these it keeps what they were.  The second run has them in their places, and leaves all as
it finds it, for what a forward changes it has changed the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.ir.ops import Instr
from schedir.runtime.buffers import same_bits, versions_of
from schedir.runtime.rank import State

_Buffers = dict[str, Tensor | None]  # of a module, by name
_Ran = tuple[Sequence[Tensor], Sequence[Tensor]]  # what a stage puts out, and its leaves

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checkpoint(NamedTuple):
    """The inputs of a stage for a microbatch, and what else its forward found.

    `buffers` are those that it has changed, as they were, each with its place; `generators` are the
    states of those that nobody seeds.  `sums` are of what it gave, by which that is known again.
    """

    xs: Sequence[Tensor]
    buffers: Sequence[tuple[_Buffers, str, Tensor]]
    generators: Sequence[Tensor]
    sums: Sequence[int]


class Checkpoints:
    """Makes the checkpoint of a stage for a microbatch, and runs its forward again."""

    def __init__(self, state: State, i: Instr) -> None:
        self.state, self.stage, self.mb = state, i.stage, i.mb
        self.module, self.written = state.stages[i.stage].module, state.stages[i.stage].written
        self.last = i.stage == state.plan.stages - 1
        modules = [self.module]
        if self.last and isinstance(state.loss, nn.Module):
            modules.append(state.loss)
        self.tables = [
            (f"{path}.{name}" if path else name, m._buffers, name)
            for each in modules
            for path, m in each.named_modules()
            for name in m._buffers
        ]

    def first(self, run: Callable[[], _Ran], xs: Sequence[Tensor]) -> tuple[_Ran, Checkpoint]:
        """What a forward makes of these inputs, and the checkpoint; autograd keeps nothing of it.

        Raises ModelError where it changes what it would find changed the second time.
        """
        own = [(f, t, n, b) for f, t, n in self.tables if (b := t.get(n)) is not None]
        known = self.written.get(self.module.training)
        was = [b.detach().clone() if known is None or f in known else b for f, _, _, b in own]
        versions, generators = versions_of([b for *_, b in own]), self._states()
        target = self._target()
        # As if for a backward: without gradients some kernels round otherwise.
        with saved_tensors_hooks(_nothing, _nothing):
            ran = run()
        if self._target() != target:
            raise ModelError(
                f"the loss changes the target of microbatch {self.mb} in place, and needs it again "
                "when the last stage is recomputed",
                hint="let it begin with target = target.clone()",
            )
        into = [x != y for x, y in zip(versions, versions_of([b for *_, b in own]), strict=True)]
        other = [t.get(n) is not b for _, t, n, b in own]
        if known is None:
            known = self.written[self.module.training] = {
                f
                for (f, _, _, b), x, wrote, new in zip(own, was, into, other, strict=True)
                if wrote or new or not same_bits(b, x)
            }
        kept = []
        for (full, table, name, _), x, wrote, new in zip(own, was, into, other, strict=True):
            if wrote and full not in known:
                raise ModelError(
                    f"stage {self.stage} writes to its buffer {full}, which its first forward left "
                    "alone, and is to be recomputed with what it was",
                    hint="write to it in every forward, or put another in its place",
                )
            if new or full in known:
                kept.append((table, name, x))
        return ran, Checkpoint(xs, kept, generators, self._sums(ran[0]))

    def again(self, run: Callable[[], _Ran], checkpoint: Checkpoint) -> _Ran:
        """What the forward makes when it is run again.

        Raises ModelError if that is something else, as far as the host may look: on a CPU.
        """
        with self._as_found(checkpoint):
            ran = run()
        if self._sums(ran[0]) != checkpoint.sums:
            raise ModelError(
                f"stage {self.stage} gives something else for microbatch {self.mb} when it is "
                "recomputed",
                hint="what it draws must come from torch's default generators, and what else its "
                "output depends on be an input, a Parameter or a buffer",
            )
        return ran

    @contextmanager
    def _as_found(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Within this context buffers and generators are what the first run found."""
        now = [(table, name, table.get(name)) for table, name, _ in checkpoint.buffers]
        states = self._states()
        for table, name, was in checkpoint.buffers:
            table[name] = was  # in its place, not into it: others may have saved that
        self._set(checkpoint.generators)
        try:
            yield
        finally:
            for table, name, buffer in now:
                table[name] = buffer
            self._set(states)

    def _states(self) -> Sequence[Tensor]:
        draws = self.state.draws
        return [] if draws.seed is not None else [g.get_state() for g in draws.generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self.state.draws.generators, states, strict=False):
            generator.set_state(state)

    def _target(self) -> list[int]:
        """How often the target that the loss is taken against has been written to."""
        if not self.last:
            return []
        leaves: list[Any] = tree_leaves(self.state.batch.targets[self.mb])
        return versions_of([x for x in leaves if isinstance(x, Tensor)])

    def _sums(self, ys: Sequence[Tensor]) -> list[int]:
        """Of the bits of each tensor, as numbers, the sum: whatever its order is.  On a CPU."""
        if self.state.device.type != "cpu" and not self.state.debug:
            return []
        return [_sum(y.detach()) for y in ys]


def _sum(y: Tensor) -> int:
    flat = torch.view_as_real(y) if y.is_complex() else y
    return int(flat.contiguous().view(_WORDS[flat.element_size()]).sum(dtype=torch.int64))


def _nothing(_: object) -> Any:
    """What autograd keeps of a tensor, or gets back, where there will be no backward."""
