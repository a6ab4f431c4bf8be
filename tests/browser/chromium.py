"""Control a headless Chromium over its DevTools pipe, without other packages."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0  # seconds for any answer, so that a hang becomes a failure
_ARROWS = ("ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown")
_KEYS = {"Enter": 13, "Escape": 27} | {name: 37 + k for k, name in enumerate(_ARROWS)}


def found() -> str | None:
    """Return the path of a Chromium, if one is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A tab of the browser, with the messages of its console and the requested addresses."""

    def __init__(self, path: str, width: int = 1400, height: int = 860, ratio: float = 1.0) -> None:
        self.console_messages: list[str] = []
        self.requested_urls: list[str] = []
        self._size = {"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": False}
        self._home = TemporaryDirectory(ignore_cleanup_errors=True)
        command_reader, self._write = os.pipe()
        self._read, answer_writer = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self._home.name}",
        ]  # fmt: skip
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$0" "$@" 3<&{command_reader} 4>&{answer_writer}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *flags, "about:blank"],
            pass_fds=(command_reader, answer_writer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_reader)
        os.close(answer_writer)
        self._number, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **self._size)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.kill()
        self._process.wait()
        self._home.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol, and return its answer."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console_messages.append(str([arg.get("value", arg) for arg in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console_messages.append(
                details.get("exception", {}).get("description", details["text"])
            )
        elif method == "Log.entryAdded":
            self.console_messages.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested_urls.append(params["request"]["url"])

    # ------------------------------------------------------------ user actions

    def open(self, path: Path) -> None:
        """Load a file, and wait until its picture is drawn."""
        self.call("Page.navigate", url=path.as_uri())
        self.until(lambda: self.js("document.documentElement?.dataset.ready") == "true")

    def js(self, code: str) -> Any:
        """Return the value of an expression."""
        answer = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds, and fail after a timeout."""
        end = time.monotonic() + _PATIENCE
        while not holds():
            assert time.monotonic() < end, f"timeout; the console has {self.console_messages}"
            time.sleep(0.02)
        self.frame()

    def frame(self) -> None:
        """Wait until all changes are painted."""
        painted = "requestAnimationFrame(() => requestAnimationFrame(() => done(1)))"
        self.js(f"new Promise((done) => {painted})")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send mouseMoved, mousePressed, mouseReleased or mouseWheel at a point of the page."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def click(self, x: float, y: float) -> None:
        """Click with the left button."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        """Press and release a key."""
        text = {"text": name} if len(name) == 1 else {}
        code = {"windowsVirtualKeyCode": _KEYS[name]} if name in _KEYS else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, **code)
        self.frame()

    def type(self, text: str) -> None:
        """Type a text into the element with the focus."""
        self.call("Input.insertText", text=text)
        self.frame()

    def prefer(self, scheme: str) -> None:
        """Set the preference for a light or a dark scheme."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.frame()

    def picture(self) -> bytes:
        """Return a screenshot as PNG."""
        return b64decode(self.call("Page.captureScreenshot", format="png")["data"])
