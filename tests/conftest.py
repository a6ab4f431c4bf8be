import gc
import os

import pytest
from hypothesis import settings

# As `schedir train` says before it imports torch, for the processes that tests fork.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# No deadline: a loaded machine must not fail a right answer.
settings.register_profile("schedir", parent=settings(), deadline=None)
settings.load_profile("schedir")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays: to look through it for garbage took a tenth of all tests' time,
    and more of those that make many small objects."""
    gc.collect()
    gc.freeze()
