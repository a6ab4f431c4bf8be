"""Serve the page of a studio over HTTP, on this machine only.

A request needs the token of the studio. A page of another site in the same browser cannot read the
token. The server also refuses requests with the origin or the host name of another site.
"""

from __future__ import annotations

import hmac
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_urlsafe
from socketserver import TCPServer
from traceback import print_exc
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from schedir.commands.studio.answers import Studio
from schedir.commands.studio.studio_page import build_studio_page
from schedir.errors import UsageError

HOST: Final = "127.0.0.1"
TOKEN_HEADER: Final = "X-Studio-Token"
_MAX_BODY: Final = 20_000_000  # The largest number of bytes of a request.
_OWN_NAMES: Final = {HOST, "localhost"}


class StudioServer(ThreadingHTTPServer):
    """Serves the page of a studio, and its answers.

    Args:
        studio: The studio.
        state: The state that the page shows first.
        port: The port, or 0 for a free port.

    Raises:
        UsageError: The port cannot be used.
    """

    daemon_threads = True  # An open connection must not delay the end of the process.
    allow_reuse_address = True

    def __init__(self, studio: Studio, state: dict[str, Any], port: int = 0) -> None:
        self.studio = studio
        self.token = token_urlsafe(16)
        self._state = state
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"--port {port} cannot be used: {reason}",
                hint="leave out --port: the studio then takes a free port",
            ) from None

    def server_bind(self) -> None:
        """Bind the socket, without the lookup of the host name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def build_page(self) -> str:
        """Return the page with the data of the first state."""
        return build_studio_page(self.studio, self._state)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # This version keeps connections open.
    disable_nagle_algorithm = True
    server: StudioServer
    server_version = "schedir"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the page."""
        url = urlsplit(self.path)
        if self._is_allowed(parse_qs(url.query).get("token", [""])[0]):
            if url.path != "/":
                self._send(404, "no such page", "text/plain")
            else:
                self._send(200, self.server.build_page(), "text/html")

    def do_POST(self) -> None:
        """Send the answer to a question."""
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > _MAX_BODY:
            self.close_connection = True
            self._send(413, f"a request has at most {_MAX_BODY} bytes", "text/plain")
            return
        body = self.rfile.read(int(size))
        if not self._is_allowed(self.headers.get(TOKEN_HEADER, "")):
            return
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            self._send(400, "a request must be JSON", "text/plain")
            return
        try:
            answer = json.dumps(self.server.studio.answer(question), separators=(",", ":"))
        except Exception:
            print("this is a bug of schedir", file=sys.stderr)
            print_exc()
            self._send(500, "this is a bug of schedir: see the terminal", "text/plain")
            return
        self._send(200, answer, "application/json")

    def _is_allowed(self, token: str) -> bool:
        """Return whether a request has the token and comes from the page. If not, send an error."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        if host.rpartition(":")[0] not in _OWN_NAMES or origin not in (None, f"http://{host}"):
            self._send(403, "refused: the request comes from another site", "text/plain")
            return False
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            reason = "refused: the address lacks the token that `schedir studio` printed"
            self._send(403, reason, "text/plain")
            return False
        return True

    def _send(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the address of a request contains the token."""
