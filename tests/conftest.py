import gc
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# pytest explains a failed `assert` of a helper module only if the module is registered before its
# import.
pytest.register_assert_rewrite(
    *(f"tests.{path.stem}" for path in Path(__file__).parent.iterdir() if path.stem != "conftest")
)

from tests.cases import ALL  # noqa: E402

# `schedir train` sets this before it imports torch. Here it is for processes that tests fork.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# Without ALL_CASES=1, a property is tried with this share of its examples, but with no fewer than
# MIN_EXAMPLES. A property without a number, and a property in a docstring, have MIN_EXAMPLES. The
# numeric law sets its own numbers, because it replaces tests of single features.
EXAMPLE_SHARE, MIN_EXAMPLES = 0.1, 12
FILES_WITH_OWN_NUMBERS = {"test_numeric_law"}

# A normal run draws the same examples each time, so its result depends only on the source. A
# campaign draws new ones. A slow machine must not fail a correct test, so there is no deadline.
settings.register_profile(
    "schedir",
    parent=settings(),
    deadline=None,
    derandomize=not ALL,
    max_examples=100 if ALL else MIN_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("schedir")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reduce the number of examples of each property.

    hypothesis has no public way to change the settings of a test: its own pytest plugin uses the
    same attribute.
    """
    if ALL:
        return
    tests = {
        item.obj
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item.obj, "hypothesis")
        and item.path.stem not in FILES_WITH_OWN_NUMBERS
    }
    for test in tests:
        own = test._hypothesis_internal_use_settings
        share = max(MIN_EXAMPLES, round(EXAMPLE_SHARE * own.max_examples))
        number = min(own.max_examples, share)
        test._hypothesis_internal_use_settings = settings(own, max_examples=number)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that cannot have a test that `-k test_name` asks for.

    Importing all of them takes several seconds.
    """
    names = {*re.findall(r"\w+", config.option.keyword.lower())} - {"or", "and"}
    if collection_path.suffix != ".py" or not names:
        return None
    text = (collection_path.stem + collection_path.read_text(encoding="utf-8")).lower()
    can_have = any(name in text or not name.startswith("test_") for name in names)
    return None if can_have else True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report a test file that cannot be imported as an error.

    pytest imports a file for its doctests first. If this import fails, pytest skips the doctests
    and keeps the incomplete module. Without this hook, it would find no tests in the module.
    """
    report = yield
    if report.skipped:
        for name, module in [*sys.modules.items()]:
            if getattr(module, "__dict__", {}).get("__file__") == str(collector.path):
                del sys.modules[name]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the objects that exist when all tests are collected.

    They stay until the end. Searching them took a tenth of the time of all tests. Tests leave
    little garbage that only a search finds, so the thresholds are high.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000, 20, 20)
