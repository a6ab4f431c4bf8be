"""Tests of the start-up of many processes: requests to the store, and created groups."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.schedules import dualpipe, interleaved, one_f_one_b
from schedir.transports import process_groups
from schedir.transports.gpu_selection import HOST_ID_VARIABLE, require_distinct_gpus
from schedir.transports.p2p_groups import EdgeGroups
from schedir.transports.process_transport import ProcessTransport
from tests.cases import ALL

WORLD = 1024
STORE_CLIENTS = 1024 if ALL else 256  # each is a thread
import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend "fake"


class CountingStore:
    """A store that counts calls, and keys that are read."""

    def __init__(self) -> None:
        self.inner, self.calls, self.num_keys_read = dist.HashStore(), Counter[str](), 0  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        self.calls["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        self.num_keys_read += 1
        return bytes(self.inner.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        self.num_keys_read += len(keys)
        return list(self.inner.multi_get(keys))


def _find_shared_gpu(store: CountingStore, process: int, card: str) -> str:
    try:
        require_distinct_gpus(store, process, STORE_CLIENTS, card, f"host {process // 8}")
    except ModelError as error:
        assert HOST_ID_VARIABLE in error.hint
        return error.fact
    return ""


@pytest.mark.parametrize("twin", [None, 9])
def test_shared_gpu_is_found_with_few_store_reads(twin: int | None) -> None:
    """Each host has 8 GPUs. With `twin`, two processes use the same GPU."""
    store = CountingStore()
    cards = [f"GPU {k % 8 if k != twin else 0}" for k in range(STORE_CLIENTS)]
    with ThreadPoolExecutor(STORE_CLIENTS) as pool:
        errors = {*pool.map(_find_shared_gpu, [store] * STORE_CLIENTS, range(STORE_CLIENTS), cards)}
    assert sum(store.calls.values()) <= 3 * STORE_CLIENTS
    assert store.num_keys_read <= 2 * STORE_CLIENTS
    if twin is None:
        assert errors == {""}
    else:
        (fact,) = errors
        assert "processes 8 and 9 use the same GPU" in fact


def _record_groups(
    process: int, program: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[Any]]:
    """Return the rows of each `make_group` call of a process, and the groups that it created."""
    created: list[Any] = []
    own_groups: list[Any] = []
    with monkeypatch.context() as patch:
        make, new_group = process_groups.make_group, dist.new_group

        def record_rows(rows: Any, **options: Any) -> Any:
            created.append(sorted(map(tuple, rows)))
            return make(rows, **options)

        def record_group(ranks: list[int], **options: Any) -> Any:
            own_groups.append(tuple(ranks))
            return new_group(ranks, **options)

        patch.setattr(process_groups, "make_group", record_rows)
        patch.setattr(dist, "new_group", record_group)
        patch.setattr(ProcessTransport, "check_agreement", lambda self, facts, tell=None: [tell])
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=store, rank=process, world_size=WORLD)
        try:
            EdgeGroups(program)
        finally:
            dist.destroy_process_group()
    return created, own_groups


@pytest.mark.parametrize(
    ("schedule", "shape", "most"),
    [
        (one_f_one_b, PipelineShape(16, 32), 9),
        (interleaved, PipelineShape(16, 32, 2), 9),
        (dualpipe, PipelineShape(16, 32, placement="mirror"), 13),
    ],
)
def test_process_creates_few_groups(
    schedule: Any, shape: PipelineShape, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes create equally many groups in the same order, from disjoint rows."""
    program = compile(
        schedule, shape, tp=8, dp=8, progress_model="per_edge", tied_weights=True,
        clip_grad_norm=True, overlap=True,
    )  # fmt: skip
    first, _ = _record_groups(0, program, monkeypatch)
    for process in (0, 1, 8, 127, 511, 1023):
        created, own_groups = _record_groups(process, program, monkeypatch)
        assert created == first and len(own_groups) == len(created) <= most
        for rows, row in zip(created, own_groups, strict=True):
            assert row in rows or row == (process,)
    for rows in first:
        members = [process for row in rows for process in row]
        assert len({*members}) == len(members)
