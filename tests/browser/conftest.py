from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium, found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    path = found()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with Chromium(path) as browser:
        yield browser
