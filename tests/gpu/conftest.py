import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
