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
    "test_gpu_tests", "test_ends", "test_checkpoints", "test_nccl_like", "test_resume", "test_zero",
    "test_faults", "test_warmup", "test_torch_huggingface", "test_tutorial", "test_own_model",
    "test_per_microbatch", "test_finite", "test_train", "test_train_zero", "test_benchmarks",
    "test_meeting", "test_slots", "test_ahead", "test_measure", "test_edges", "test_train_ends",
    "test_readers", "test_new_row_runs", "test_torch_page", "test_recompute_bytes", "test_kills",
    "test_saver", "test_programs", "test_models", "test_results", "test_hangs", "test_gpu_run",
    "test_gpt2", "test_torch_own", "test_skips", "test_random", "test_corpus",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, so that none is left to one worker alone at the end."""
    at = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: at.get(item.path.stem, len(LONG)))
