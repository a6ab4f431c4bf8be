import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# As `schedir train` says before it imports torch, for the processes that tests fork.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# No deadline: a loaded machine must not fail a right answer.
settings.register_profile("schedir", parent=settings(), deadline=None)
settings.load_profile("schedir")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded by its end stays: to look through it for garbage took a tenth of all tests'
    time, and more of those that make many small objects; and a quarter of its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
