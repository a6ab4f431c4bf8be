"""Measure the bytes of live tensors on a rank during a step.

`schedir.analysis.memory.footprint` predicts the same bytes: weights, gradients, optimizer state,
slots, and the values that instructions keep for later instructions. The measured and the predicted
bytes exclude the inputs of the step, and memory that an instruction needs only while it runs.
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
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.parameters.optimizer_inspection import unwrap_optimizer
from schedir.runtime.program_state import Call


class LiveMemory(TorchDispatchMode):
    """A context that measures the peak of live memory in the steps of an executor.

    The context counts the bytes before and after each instruction. Each storage counts once. The
    measurement works only on a CPU, where unused memory is freed immediately. Steps within the
    context are slower.

    Args:
        executor: The executor to measure.

    Attributes:
        peak_by_tier: The largest number of bytes in each memory tier. On the host and the disk,
            only offloaded values count.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.executor = executor
        self.peak_by_tier = dict.fromkeys(TIERS, 0)
        self.created_storages: dict[StorageWeakRef, int] = {}

    def __enter__(self) -> Self:
        self.calls = self.executor.runner.calls
        self.executor.runner.calls = [
            Call(wait, partial(self._run, run)) for wait, run in self.calls
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error_info: Any) -> None:
        self.executor.runner.calls = self.calls
        super().__exit__(*error_info)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        input_storages = _measure_storages(tree_leaves((args, kwargs)))
        self.created_storages |= {
            ref: size
            for ref, size in _measure_storages(tree_leaves(output)).items()
            if ref not in input_storages
        }
        return output

    def _run(self, run: Any) -> None:
        self._update_peaks()  # also counts inputs that `run` frees
        run()
        self._update_peaks()

    def _update_peaks(self) -> None:
        device_bytes, previous_bytes = self._count_live_bytes(), -1
        # Repeat until two counts agree, because other threads may allocate and free memory.
        while device_bytes != previous_bytes:
            device_bytes, previous_bytes = self._count_live_bytes(), device_bytes
        services = self.executor.state.list_services()
        for tier in TIERS:
            if tier == TIERS[0]:
                used_bytes = device_bytes
            else:
                used_bytes = sum(service.count_bytes(tier) for service in services)
            self.peak_by_tier[tier] = max(self.peak_by_tier[tier], used_bytes)

    def _count_live_bytes(self) -> int:
        self.created_storages = {
            ref: size for ref, size in self.created_storages.items() if not ref.expired()
        }
        storages = self.created_storages | _measure_storages(_list_static_tensors(self.executor))
        services = self.executor.state.list_services()
        host_storages = _measure_storages(
            t for service in services for t in service.list_host_tensors()
        )
        return sum(size for ref, size in storages.items() if ref not in host_storages)

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes on the device."""
        return self.peak_by_tier[TIERS[0]]


def _list_static_tensors(executor: Executor) -> Iterable[object]:
    """Yield the tensors that a rank keeps in all steps, including those with freed memory."""
    state = executor.state
    for stage in executor.stages.values():
        yield from stage.list_static_tensors()
    yield from tree_leaves(
        [*getattr(unwrap_optimizer(state.resources.optimizer), "state", {}).values()]
    )
    if isinstance(state.resources.optimizer, MainOptimizer):
        for p in state.resources.optimizer.main_parameters:
            yield from (p, p.grad)
    for service in state.list_services():
        yield from service.list_device_tensors()


def _measure_storages(values: Iterable[object]) -> dict[StorageWeakRef, int]:
    """Return a dict: storage -> bytes, for all dense tensors in `values`."""
    tensors = (x for x in values if isinstance(x, Tensor) and not x.is_sparse)
    return {StorageWeakRef(x): x.nbytes() for x in (t.untyped_storage() for t in tensors)}
