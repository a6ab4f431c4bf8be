import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu import stand_in
from tests.gpu.shared import REHEARSED

# Before CUDA begins: queues enough that streams do not share one, and products that may be run
# with deterministic algorithms.
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
    """Of a test that nothing stands in for."""
    if REHEARSED:
        pytest.skip("needs a CUDA device, and no rehearsal")
