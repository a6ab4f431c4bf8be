import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu import stand_in
from tests.gpu.shared import REHEARSED

# Set before CUDA starts: enough queues that streams do not share one, and a workspace for
# deterministic products.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    if REHEARSED:
        with pytest.MonkeyPatch.context() as patch, stand_in.installed(patch):
            yield
    elif torch.cuda.is_available():
        yield
    else:
        pytest.skip("needs a CUDA device")


@pytest.fixture
def real_gpu() -> None:
    """Skip a test that needs a real GPU during a rehearsal."""
    if REHEARSED:
        pytest.skip("needs a CUDA device, and no rehearsal")
