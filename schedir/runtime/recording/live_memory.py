"""Measure the bytes that are alive on a rank during a step.

It is what `analysis.memory.footprint` predicts: weights, gradients, the optimizer's state, slots,
and what compute keeps for later compute.  What an instruction needs only while it runs is in
neither, nor is what the step is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Self

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedir.ir.isa.table_schema import TIERS
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, innermost
from schedir.runtime.rank_state import Call


class LiveMemory(TorchDispatchMode):
    """Within this context `most` is how many bytes were alive at most before or behind any
    instruction of the executor's steps, each storage counted once; `most_on` says it by tier: also
    how many were in use of the host's memory and of the disk, for what was moved there.

    On a CPU, where memory is given back as soon as nobody needs it.  A step takes longer meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.executor = executor
        self.most_on = dict.fromkeys(TIERS, 0)
        self.made: dict[StorageWeakRef, int] = {}

    def __enter__(self) -> Self:
        self.calls = self.executor.calls
        self.executor.calls = [Call(wait, partial(self._run, run)) for wait, run in self.calls]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *why: Any) -> None:
        self.executor.calls = self.calls
        super().__exit__(*why)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _storages(tree_leaves((args, kwargs)))
        self.made |= {
            ref: size for ref, size in _storages(tree_leaves(out)).items() if ref not in given
        }
        return out

    def _run(self, run: Any) -> None:
        self._look()  # what it waited for, and what it frees
        run()
        self._look()

    def _look(self) -> None:
        device, before = self._alive(), -1
        while device != before:  # threads let go and make memory meanwhile
            device, before = self._alive(), device
        tiers = self.executor.held.tiers
        for tier in TIERS:
            used = device if tier == TIERS[0] else tiers.used_on(tier)
            self.most_on[tier] = max(self.most_on[tier], used)

    def _alive(self) -> int:
        """Bytes that are alive on the device."""
        self.made = {ref: size for ref, size in self.made.items() if not ref.expired()}
        here = self.made | _storages(_static(self.executor))
        states = self.executor.state.held.states
        away = _storages([] if states is None else states.away())
        return sum(size for ref, size in here.items() if ref not in away)

    @property
    def most(self) -> int:
        """The most on the device."""
        return self.most_on[TIERS[0]]


def _static(executor: Executor) -> Iterable[object]:
    """The tensors that a rank has in all steps; some of them have memory only at times."""
    state = executor.state
    for stage in executor.stages.values():
        yield from (*stage.module.parameters(), *stage.module.buffers())
        yield from (*stage.gradients.flat, *stage.gradients.kept)
        if stage.weights is not None:
            yield from (*stage.weights.flat, *stage.weights.own)
    yield from tree_leaves([*getattr(innermost(state.optimizer), "state", {}).values()])
    if isinstance(state.optimizer, MainOptimizer):
        for p in state.optimizer.main:
            yield from (p, p.grad)
    yield from tree_leaves(state.buffers)
    for value in state.away.values.values():  # what threads have made
        yield from value.tensors()


def _storages(values: Iterable[object]) -> dict[StorageWeakRef, int]:
    """The memory of those that are tensors, and its bytes now; a sparse one is made of others."""
    tensors = (x for x in values if isinstance(x, Tensor) and not x.is_sparse)
    return {StorageWeakRef(x): x.nbytes() for x in (t.untyped_storage() for t in tensors)}
