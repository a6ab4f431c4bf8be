from collections.abc import Iterator
from threading import Thread

import pytest

from schedir.commands.studio import DEFAULTS
from schedir.commands.studio.answers import Studio
from schedir.commands.studio.code_process import CodeRunner
from schedir.commands.studio.server import StudioServer
from schedir.commands.studio.state import StudioState
from schedir.io.source_loader import Source
from tests.browser.chromium import Chromium, found
from tests.browser.studio_controls import ANSWERED, Opener


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    path = found()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with Chromium(path) as browser:
        yield browser


@pytest.fixture(scope="module")
def runner() -> Iterator[CodeRunner]:
    code_runner = CodeRunner(300_000, max_seconds=3)
    yield code_runner
    code_runner.close()


@pytest.fixture
def studio(chromium: Chromium, runner: CodeRunner) -> Iterator[Opener]:
    """Yield a function that opens a studio.

    At the end, check that the browser requested nothing from other hosts and logged nothing.
    """
    servers: list[StudioServer] = []

    def open_studio(
        state: StudioState | None = None, *, run: Source | None = None, code: bool = True,
        address: str = "", scheme: str = "light",
    ) -> Chromium:  # fmt: skip
        studio_state = Studio(run, runner.expand if code else None)
        server = StudioServer(studio_state, (state or StudioState(options=DEFAULTS)).to_json())
        servers.append(server)
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        chromium.prefer(scheme)
        chromium.call("Page.navigate", url=server.url + address)
        chromium.until(lambda: bool(chromium.js(f"{ANSWERED} > 0")))
        return chromium

    chromium.console_messages.clear()
    chromium.requested_urls.clear()
    yield open_studio
    hosts = {f"http://127.0.0.1:{server.server_port}/" for server in servers}
    asked = {
        url.partition("?")[0]
        for url in chromium.requested_urls
        if not url.startswith("data:image/")
    }
    assert asked <= hosts and chromium.console_messages == []
    chromium.call("Page.navigate", url="about:blank")
    for server in servers:
        server.shutdown()
        server.server_close()
