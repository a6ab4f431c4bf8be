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
from schedir.runtime.parameters.mixed_precision import MainOptimizer, unwrap_optimizer
from schedir.runtime.rank_state import Call


class LiveMemory(TorchDispatchMode):
    """Within this context `peak_bytes` is how many bytes were alive at most before or behind any
    instruction of the executor's steps, each storage counted once; `peak_by_tier` says it by tier:
    also how many were in use of the host's memory and of the disk, for what was moved there.

    On a CPU, where memory is given back as soon as nobody needs it.  A step takes longer meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.executor = executor
        self.peak_by_tier = dict.fromkeys(TIERS, 0)
        self.created_storages: dict[StorageWeakRef, int] = {}

    def __enter__(self) -> Self:
        self.calls = self.executor.calls
        self.executor.calls = [Call(wait, partial(self._run, run)) for wait, run in self.calls]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error_info: Any) -> None:
        self.executor.calls = self.calls
        super().__exit__(*error_info)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _measure_storages(tree_leaves((args, kwargs)))
        self.created_storages |= {
            ref: size
            for ref, size in _measure_storages(tree_leaves(out)).items()
            if ref not in given
        }
        return out

    def _run(self, run: Any) -> None:
        self._update_peaks()  # what it waited for, and what it frees
        run()
        self._update_peaks()

    def _update_peaks(self) -> None:
        device, before = self._count_live_bytes(), -1
        while device != before:  # threads let go and make memory meanwhile
            device, before = self._count_live_bytes(), device
        tiers = self.executor.resources.memory_tiers
        for tier in TIERS:
            used = device if tier == TIERS[0] else tiers.count_used_bytes(tier)
            self.peak_by_tier[tier] = max(self.peak_by_tier[tier], used)

    def _count_live_bytes(self) -> int:
        """Bytes that are alive on the device."""
        self.created_storages = {
            ref: size for ref, size in self.created_storages.items() if not ref.expired()
        }
        here = self.created_storages | _measure_storages(_list_static_tensors(self.executor))
        states = self.executor.state.resources.host_optimizer_state
        away = _measure_storages([] if states is None else states.list_host_memory())
        return sum(size for ref, size in here.items() if ref not in away)

    @property
    def peak_bytes(self) -> int:
        """The most on the device."""
        return self.peak_by_tier[TIERS[0]]


def _list_static_tensors(executor: Executor) -> Iterable[object]:
    """The tensors that a rank has in all steps; some of them have memory only at times."""
    state = executor.state
    for stage in executor.stages.values():
        yield from (*stage.module.parameters(), *stage.module.buffers())
        yield from (*stage.gradients.flat, *stage.gradients.reduced_flat)
        if stage.sharded_parameters is not None:
            yield from (*stage.sharded_parameters.flat, *stage.sharded_parameters.shards)
    yield from tree_leaves([*getattr(unwrap_optimizer(state.optimizer), "state", {}).values()])
    if isinstance(state.optimizer, MainOptimizer):
        for p in state.optimizer.main_parameters:
            yield from (p, p.grad)
    yield from tree_leaves(state.receive_buffers)
    for value in state.offload_moves.values.values():  # what threads have made
        yield from value.list_device_tensors()


def _measure_storages(values: Iterable[object]) -> dict[StorageWeakRef, int]:
    """The memory of those that are tensors, and its bytes now; a sparse one is made of others."""
    tensors = (x for x in values if isinstance(x, Tensor) and not x.is_sparse)
    return {StorageWeakRef(x): x.nbytes() for x in (t.untyped_storage() for t in tensors)}
