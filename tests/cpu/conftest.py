from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.train_command import kill_processes, write_config

# Bits are compared between processes, so each has one thread.
torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_config(tmp_path))


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    kill_processes()


# Files that take the longest, in seconds of a core or of waiting, the longest first.
LONG = (
    "test_gpu_rehearsal", "test_process_cleanup", "test_checkpoint_kills",
    "test_drop_in_replicas", "test_numeric_law", "test_nccl_stand_in", "test_megatron",
    "test_checkpoint_resharding", "test_fault_injection", "test_resume", "test_tutorials",
    "test_warmup_step", "test_drop_in_huggingface", "test_zero", "test_train",
    "test_train_zero", "test_benchmarks", "test_post_validation", "test_schedir_runtime",
    "test_instrument", "test_optimizer_offload", "test_machine_measurement",
    "test_static_slots", "test_delayed_loss_reads", "test_huggingface_gpt2",
    "test_nonfinite_steps", "test_new_instruction_runs", "test_segments", "test_shared_outputs",
    "test_startup_comparison", "test_transport_matching", "test_train_termination",
    "test_search_execution", "test_model_families", "test_full_disk", "test_background_saver",
    "test_run_results", "test_hangs", "test_gpu_command", "test_own_model_page",
    "test_several_programs", "test_packed_documents",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no worker is left alone with one at the end."""
    at = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: at.get(item.path.stem, len(LONG)))
