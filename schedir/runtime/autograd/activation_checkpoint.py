"""Save the inputs of a forward, and run it again before its backward.

A forward that is run again must do the same again.  Its weights are the microbatch's version, its
random numbers are seeded as for the first time, and its keywords are the batch's.  What else it may
find changed are buffers that forwards write to, as running statistics; Parameters that nobody
trains, if forwards write to them, as to a mean of others; and generators that nobody seeds.  Of
these it keeps what they were: the second run has them in their places, and leaves all as it finds
it, for what a forward changes it has changed the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Instr
from schedir.runtime.model_checks.tensor_fingerprint import (
    same_bits,
    sum_of_bits,
    sums_of,
    traces_of,
    versions_of,
)
from schedir.runtime.rank_state import State

_Table = dict[str, Any]  # of a module: buffers or Parameters, by name
_Ran = tuple[Sequence[Tensor], Sequence[Tensor]]  # what a stage puts out, and its leaves


class Checkpoint(NamedTuple):
    """The inputs of a stage for a microbatch, and what else its forward found.

    `buffers` are those that it has changed, and Parameters, as they were, each with its place;
    `generators` are the states of those that nobody seeds.  `sums` are of what it gave, by
    which that is known again.  `versions` are the version counters of the inputs; they are
    empty after the first step, and after the inputs were offloaded.
    """

    xs: Sequence[Tensor]
    buffers: Sequence[tuple[_Table, str, Tensor]]
    generators: Sequence[Tensor]
    sums: Sequence[int]
    versions: Sequence[int]

    def require_unwritten(self, stage: int, mb: int) -> None:
        """Raise ModelError if an input was written to since the first forward."""
        if self.versions and self.versions != versions_of(self.xs):
            raise ModelError(
                f"the input of stage {stage} for microbatch {mb} was written to before the stage "
                "was recomputed",
                hint="let the stage before it return a new tensor: self.buffer.clone()",
            )


class Checkpoints:
    """Makes the checkpoint of a stage for a microbatch, and runs its forward again."""

    def __init__(self, state: State, i: Instr) -> None:
        self.state, self.stage, self.mb = state, i.stage, i.mb
        self.module, self.written = state.stages[i.stage].module, state.stages[i.stage].written
        self.looked = state.stages[i.stage].run_again
        self.last = i.stage == state.shape.stages - 1
        modules = [self.module]
        if self.last and isinstance(state.loss, nn.Module):
            modules.append(state.loss)
        tables: list[tuple[str, _Table]] = [
            (path, table)
            for each in modules
            for path, m in each.named_modules()
            for table in (m._buffers, m._parameters)
        ]
        self.tables = [
            (f"{path}.{name}" if path else name, table, name)
            for path, table in tables
            for name in table
        ]

    def first(self, run: Callable[[], _Ran], xs: Sequence[Tensor]) -> tuple[_Ran, Checkpoint]:
        """What a forward makes of these inputs, and the checkpoint; autograd keeps nothing of it.

        Raises ModelError where it changes what it would find changed the second time.
        """
        own: list[tuple[str, _Table, str, Tensor]] = [
            (f, t, n, b)
            for f, t, n in self.tables
            if (b := t.get(n)) is not None and _may_change(b)
        ]
        known = self.written.get(self.module.training)
        was = _copies([(b, known is None or f in known, known is None) for f, _, _, b in own])
        traces, generators = traces_of([b for *_, b in own]), self._states()
        target = self._target()
        versions = versions_of(xs) if self.state.checks.active else ()
        # As if for a backward: without gradients some kernels round otherwise.
        with saved_tensors_hooks(_nothing, self._refuse_backward):
            ran = run()
        if self._target() != target:
            raise ModelError(
                f"the loss changes the target of microbatch {self.mb} in place, and needs it again "
                "when the last stage is recomputed",
                hint="let it begin with target = target.clone()",
            )
        into = [x != y for x, y in zip(traces, traces_of([b for *_, b in own]), strict=True)]
        other = [t.get(n) is not b for _, t, n, b in own]
        if known is None:
            known = self.written[self.module.training] = {
                f
                for (f, _, _, b), x, wrote, new in zip(own, was, into, other, strict=True)
                if wrote or new or not same_bits(b.detach().to(x.device), x)
            }
        kept = []
        for (full, table, name, b), x, wrote, new in zip(own, was, into, other, strict=True):
            if wrote and full not in known:
                raise ModelError(
                    f"stage {self.stage} writes to its {_kind(b)} {full}, which its first "
                    "forward left alone, and is to be recomputed with what it was",
                    hint="write to it in every forward, or put another in its place",
                )
            if new or full in known:
                kept.append((table, name, _like(x, b)))
        return ran, Checkpoint(xs, kept, generators, self._sums(ran[0]), versions)

    def again(self, run: Callable[[], _Ran], checkpoint: Checkpoint) -> _Ran:
        """What the forward makes when it is run again.

        Raises ModelError if that is something else, as far as the host may look: on a CPU.
        """
        checkpoint.require_unwritten(self.stage, self.mb)
        trained = self._trained()
        sums = sums_of(trained)
        with self._as_found(checkpoint):
            ran = run()
        if sums_of(trained) != sums:
            raise ModelError(
                f"stage {self.stage} writes to Parameters that it trains, and twice where it is "
                "recomputed",
                hint="write to them between steps",
            )
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
        real = [b for *_, b in now if b is not None]
        traces = traces_of(real)
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
        if traces_of(real) != traces:
            raise ModelError(
                f"stage {self.stage} writes to a buffer by another name than its module's, and "
                "twice where it is recomputed",
                hint="write to self.name, and keep no buffers in lists",
            )

    def _refuse_backward(self, _: object) -> Tensor:
        """Called for a saved tensor where a forward runs a backward of its own."""
        raise ModelError(
            f"stage {self.stage} runs a backward within its forward, as by torch.autograd.grad, "
            "and is to be recomputed: its first forward keeps no tensor for a backward",
            hint=f"recompute other stages only: recompute=lambda stage, mb: stage != {self.stage}",
        )

    def _trained(self) -> list[Tensor]:
        """What the stage trains, when it is run again for the first time: then values tell whether
        a forward writes to it, which may leave no trace."""
        look = self.module.training
        if look in self.looked:
            return []
        self.looked.add(look)
        return [p for p in self.module.parameters() if p.requires_grad]

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
        return [sum_of_bits(y.detach()) for y in ys]


def _may_change(one: Tensor) -> bool:
    """Whether a forward may write to it: a buffer, or a Parameter that nobody trains."""
    return not (isinstance(one, nn.Parameter) and one.requires_grad)


def _copies(of: Sequence[tuple[Tensor, bool, bool]]) -> list[Tensor]:
    """Of tensors those that are `wanted` copied, each once, so that who shares one shares its copy;
    of Parameters in the host's memory where it is asked for: all of them may be much."""
    made: dict[Tensor, Tensor] = {}
    for one, wanted, on_host in of:
        if wanted and one not in made:
            to_host = on_host and isinstance(one, nn.Parameter)
            made[one] = one.detach().to("cpu", copy=True) if to_host else one.detach().clone()
    return [made[one] if wanted else one for one, wanted, _ in of]


def _like(was: Tensor, one: Tensor) -> Tensor:
    """What was there, as what is there: a Parameter, and where it is."""
    if isinstance(one, nn.Parameter):
        return nn.Parameter(was.to(one.device), requires_grad=False)
    return was.detach()  # offloading frees the memory of this tensor; the module may keep `was`


def _kind(one: Tensor) -> str:
    return "Parameter" if isinstance(one, nn.Parameter) else "buffer"


def _nothing(_: object) -> None:
    """What autograd keeps of a tensor where there will be no backward."""
