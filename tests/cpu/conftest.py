from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.training import end_all, write_config

# Bits are compared between processes: each has the same one thread.
torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_config(tmp_path))


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_all()


# Files that take the longest, in seconds of a core or of waiting, the longest first.
LONG = (
    "test_benchmarks", "test_train_ends", "test_resume", "test_deaths", "test_gpu_tests",
    "test_checkpoints",
    "test_nccl_like", "test_train", "test_zero", "test_warmup", "test_train_zero", "test_ends",
    "test_train_memory", "test_faults", "test_torch_huggingface", "test_own_model",
    "test_processes", "test_per_microbatch", "test_results", "test_finite", "test_offload_trains",
    "test_meeting", "test_slots", "test_ahead", "test_measure", "test_tutorial", "test_edges",
    "test_readers", "test_new_row_runs", "test_torch_page", "test_recompute_bytes", "test_kills",
    "test_saver", "test_programs", "test_models", "test_gpt2", "test_torch_own", "test_skips",
    "test_random", "test_corpus",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, so that none is left to one worker alone at the end."""
    at = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: at.get(item.path.stem, len(LONG)))
