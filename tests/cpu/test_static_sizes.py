"""Tests that the measured static sizes of a stage are those of live tensors after a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from schedir.errors import ModelError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from tests.cases import cases


def _make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": torch.optim.AdamW,
    "plain": torch.optim.SGD,
    "momentum": _make_sgd,
    "main": partial(MainOptimizer, make_optimizer=torch.optim.AdamW),
    "main momentum": partial(MainOptimizer, make_optimizer=_make_sgd),
}
USUAL = ["adamw", "main momentum"]


def _storage_sizes(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    storages = [x.untyped_storage() for x in tensors if not is_lazy(x)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_storage_sizes(tensors).values())


def _find_live_storages() -> dict[StorageWeakRef, int]:
    """Return all tensor storages, also those that a dispatch mode does not see (step counts)."""
    return _storage_sizes(x for x in gc.get_objects() if issubclass(type(x), Tensor))


@pytest.mark.parametrize("name", cases(USUAL, [name for name in OPTIMIZERS if name not in USUAL]))
def test_measured_optimizer_state_equals_live_tensors(name: str) -> None:
    """Sizes of parameters, gradients and optimizer states are those of a step's live tensors."""
    make, dtype = OPTIMIZERS[name], torch.bfloat16 if "main" in name else torch.float32
    stage = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(dtype)
    stage[0].requires_grad_(False)
    use_float32_gradients(stage)
    x = torch.randn(4, 8, dtype=dtype)

    def loss(y: Tensor, _: Tensor) -> Tensor:
        return y.float().square().sum()

    measure: Any = partial(
        measure_sizes, [stage], x, x, loss=loss, boundary=Boundary((4, 8), dtype)
    )
    sizes = measure(optimizer_state=make)
    trained = [p for p in stage.parameters() if p.requires_grad]
    assert sizes.params == (_count_bytes(trained),)
    untrained = [*stage[0].parameters(), *stage.buffers()]
    assert sizes.buffers == (_count_bytes(untrained),)
    loss(stage(x), x).backward()
    grads = [p.grad for p in trained if p.grad is not None]
    assert sizes.grads == (_count_bytes(grads),)
    before = _find_live_storages()
    optimizer = make(trained)
    optimizer.step()
    new_storages = {ref: size for ref, size in _find_live_storages().items() if ref not in before}
    assert sizes.optimizer == (sum(new_storages.values()),)
    with pytest.raises(ModelError):
        measure(optimizer_state=torch.optim.Adafactor)
