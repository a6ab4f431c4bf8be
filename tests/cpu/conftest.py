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


# The files that take the longest. Files whose tests wait alternate with files whose tests compute,
# so that the workers do not all wait at the same time.
LONG = (
    "test_megatron", "test_hangs", "test_drop_in_huggingface", "test_checkpoint_kills",
    "test_resume", "test_shared_memory", "test_numeric_law", "test_gloo_processes",
    "test_three_d_parallelism", "test_fault_injection", "test_nccl_stand_in", "test_gpu_command",
    "test_segments", "test_same_gradients_errors", "test_train", "test_run_results",
    "test_transport_matching", "test_process_cleanup", "test_search_execution", "test_warmup_step",
    "test_checkpoint_resharding", "test_expert_parallel_runs", "test_tutorials",
    "test_drop_in_hooks", "test_background_saver", "test_full_disk", "test_new_instruction_runs",
    "test_checkpoints_in_process", "test_offload_training", "test_gradient_reduction",
    "test_delayed_loss_reads", "test_drop_in_checkpoints", "test_drop_in_errors",
    "test_model_families", "test_sequence_parallel", "test_drop_in", "test_boundary_tensors",
    "test_drop_in_replicas", "test_gloo_executor", "test_shared_outputs", "test_schedir_runtime",
    "test_startup_comparison",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that no worker is left alone with one at the end."""
    at = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: at.get(item.path.stem, len(LONG)))
