import os

import pytest
import torch

# Before CUDA begins: queues enough that streams do not share one, and products that may be run
# with deterministic algorithms.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
