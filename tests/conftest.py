import gc
import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cases import ALL

# As `schedir train` says before it imports torch, for the processes that tests fork.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# No deadline: a loaded machine must not fail a right answer.
settings.register_profile("schedir", parent=settings(), deadline=None)
settings.load_profile("schedir")


# Without ALL_CASES=1, a property is tried with this share of its examples, but with no fewer than
# LEAST of them. The numeric law takes all, because it replaces tests of single features.
SHARE, LEAST, WHOLE = 0.4, 12, {"test_numeric_law"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reduce the number of examples of each property."""
    tests = {item.obj for item in items if isinstance(item, pytest.Function)
             and hasattr(item.obj, "hypothesis") and item.path.stem not in WHOLE}  # fmt: skip
    for test in () if ALL else tests:
        every = test._hypothesis_internal_use_settings
        few = min(every.max_examples, max(LEAST, round(SHARE * every.max_examples)))
        test._hypothesis_internal_use_settings = settings(every, max_examples=few)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that cannot have a test that `-k test_name` asks for.

    To import all of them takes several seconds.
    """
    names = {*re.findall(r"\w+", config.option.keyword.lower())} - {"or", "and"}
    if collection_path.suffix != ".py" or not names:
        return None
    text = (collection_path.stem + collection_path.read_text(encoding="utf-8")).lower()
    can_have = any(name in text or not name.startswith("test_") for name in names)
    return None if can_have else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded by its end stays: to look through it for garbage took a tenth of all tests'
    time, and more of those that make many small objects; and a quarter of its own. What tests
    make is looked through seldom, because little of it is garbage that only a search finds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000, 20, 20)
