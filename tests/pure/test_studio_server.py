"""Tests of the server of `schedir studio`: its requests, its command and its export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from threading import Thread
from typing import Any

import numpy as np
import pytest

from schedir.__main__ import main
from schedir.commands.studio import DEFAULTS
from schedir.commands.studio.server import TOKEN_HEADER, StudioServer
from schedir.commands.studio.state import StudioState
from schedir.commands.studio.studio_page import export_page
from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.ir.text_format import from_text, to_text
from tests.pure.test_studio import CODE, STUDIO, make_state


@pytest.fixture(scope="module")
def server() -> Iterator[StudioServer]:
    started = StudioServer(STUDIO, StudioState(options=DEFAULTS).to_json())
    thread = Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield started
    started.shutdown()
    started.server_close()
    thread.join()


def send_request(
    server: StudioServer, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    header_values = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, header_values)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_foreign_requests_are_refused(server: StudioServer) -> None:
    page, body = f"/?token={server.token}", json.dumps({"state": make_state()}).encode()
    token = {TOKEN_HEADER.replace("-", "_"): server.token}
    page_origin = f"http://127.0.0.1:{server.server_port}"
    assert server.server_address[0] == "127.0.0.1"
    assert send_request(server, "GET", page)[0] == 200
    assert send_request(server, "POST", "/", body, **token)[0] == 200
    assert send_request(server, "POST", "/", body, Origin=page_origin, **token)[0] == 200
    assert send_request(server, "POST", "/", b"{", **token)[0] == 400
    assert send_request(server, "GET", f"/other{page[1:]}")[0] == 404
    refused = [
        send_request(server, "GET", "/"),
        send_request(server, "GET", f"{page}x"),
        send_request(server, "POST", "/", body),
        send_request(server, "POST", "/", body, X_Studio_Token="é"),
        send_request(server, "POST", "/", body, Origin="http://example.org", **token),
        send_request(server, "POST", "/", body, Origin="null", **token),
        send_request(server, "GET", page, Host="example.org"),
        send_request(server, "GET", page, Host=f"example.org:{server.server_port}"),
    ]
    assert [status for status, _ in refused] == [403] * len(refused)
    assert not any("one_f_one_b" in text for _, text in refused)
    assert send_request(server, "POST", "/", b"x", Content_Length="99999999999")[0] == 413
    assert send_request(server, "POST", "/", b"x", Content_Length="-5")[0] == 413


def test_command_line_mistake_is_one_error(
    server: StudioServer, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "bad.sched").write_text("abc")
    (tmp_path / "good.sched").write_text(to_text(compile("gpipe", ranks=2, microbatches=2)))
    for arguments in (
        ["none.sched"], ["none.timeline"], ["none.py:f"], ["no_schedule"], ["--relower"],
        ["--port", str(server.server_port)], ["--port", "-1"], ["--port", "99999"],
        ["--no-code", f"{tmp_path}/mine.py:mine"], ["--ranks", "x"], [f"{tmp_path}/bad.sched"],
        [f"{tmp_path}/mine.py:nope"], [f"{tmp_path}/good.sched", "--ranks", "3"],
    ):  # fmt: skip
        assert main(["studio", "--no-browser", *arguments]) == 2
        output = capsys.readouterr()
        assert "Error" in output.err and "Traceback" not in output.err and not output.out


def test_exported_page_has_schedules_of_shape(tmp_path: Any) -> None:
    first_state = StudioState("zb_h1", options=DEFAULTS | {"ranks": "3"})
    line = export_page(STUDIO, first_state, str(tmp_path / "site"))
    page = (tmp_path / "site" / "index.html").read_text()
    assert line.startswith("wrote ") and "connect-src" not in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    answers = json.loads(data.group(1))["precomputed_answers"]
    # Chimera needs an even number of ranks.
    assert {
        "zb_h1",
        "gpipe",
        "zb_v",
    } <= answers.keys() and "chimera" not in answers
    for wrong_state in (
        StudioState("chimera", options=first_state.options),
        StudioState(code="x = 1"),
    ):
        with pytest.raises(UsageError):
            export_page(STUDIO, wrong_state, str(tmp_path))
    # The export replaces a page that schedir wrote.
    assert export_page(STUDIO, first_state, str(tmp_path / "site")) == line
    (tmp_path / "index.html").write_text("<title>mine</title>")
    with pytest.raises(UsageError, match="did not write it"):
        export_page(STUDIO, first_state, str(tmp_path))
    assert (tmp_path / "index.html").read_text() == "<title>mine</title>"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        export_page(STUDIO, first_state, str(tmp_path / "file"))


def test_names_are_escaped_in_page() -> None:
    name = "</script><img src=x onerror=alert(1)>"
    program = from_text(to_text(compile("gpipe", ranks=2, microbatches=2)))
    hostile_program = type(program)(name, program.shape, program.streams)
    hostile = {"schedule": name, "options": {"costs": name, name: name}}
    built = StudioServer(STUDIO, hostile)
    text = built.build_page()
    built.server_close()
    assert name not in text
    assert np.array_equal(hostile_program.streams[0].words, program.streams[0].words)
