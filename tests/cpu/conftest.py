from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.training import end_all, write_config

# Bits are compared between processes, so each has one thread.
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
    "test_gpu_tests", "test_ends", "test_kills", "test_torch_face_replicas", "test_numeric_law",
    "test_nccl_like", "test_megatron", "test_checkpoints", "test_faults", "test_resume",
    "test_tutorial", "test_warmup", "test_torch_huggingface", "test_zero", "test_train",
    "test_train_zero", "test_benchmarks", "test_ahead", "test_torch_own", "test_instrument",
    "test_states_runs", "test_measure", "test_slots", "test_steps", "test_gpt2", "test_finite",
    "test_new_row_runs", "test_pieces", "test_aliasing", "test_meeting", "test_edges",
    "test_train_ends", "test_search_runs", "test_models", "test_full_disk", "test_saver",
    "test_results", "test_hangs", "test_gpu_run", "test_own_model", "test_programs", "test_corpus",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no worker is left alone with one at the end."""
    at = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: at.get(item.path.stem, len(LONG)))
