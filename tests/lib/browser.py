"""A real headless browser for tests, driven over the DevTools protocol on loopback.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

START_SECS = 90.0
ANSWER_SECS = 60.0
WAIT_SECS = 20.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",  # /dev/shm of a container may hold 64 MB
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Tab:
    """One page. What it said on its console, and asked of the network, is kept."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: dict[str, Any] = message["result"]
                return answer

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=ANSWER_SECS))
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, page: Path, *, width: int = 1200, height: int = 900, scheme: str = "light"
    ) -> None:
        """Load a page in a window of this size and colour scheme; forget earlier events."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not self.said("Page.loadEventFired"):
            self._receive()

    def run(self, script: str) -> Any:
        """Return what a script returns, as JSON has it."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def said(self, method: str) -> list[dict[str, Any]]:
        return [e["params"] for e in self.events if e["method"] == method]

    @property
    def complaints(self) -> list[str]:
        """Everything on the console, and scripts that failed."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(params) for kind in kinds for params in self.said(kind)]

    @property
    def requests(self) -> list[str]:
        return [params["request"]["url"] for params in self.said("Network.requestWillBeSent")]

    def point_at(self, selector: str, *, x: float = 0.5, y: float = 0.5) -> None:
        """Scroll an element into view and move the pointer to a place in it, in fractions."""
        name = json.dumps(selector)
        left, top, wide, high = self.run(
            f"(async e => {{ e.scrollIntoView({{block: 'center'}});"
            # The event of the scroll comes with the next frame.
            " for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);"
            " const b = e.getBoundingClientRect();"
            f" return [b.left, b.top, b.width, b.height]; }})(document.querySelector({name}))"
        )
        self.call(
            "Input.dispatchMouseEvent", type="mouseMoved", x=left + x * wide, y=top + y * high
        )

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def wait_for(self, script: str) -> Any:
        """Return what a script returns as soon as that is something."""
        end = time.monotonic() + WAIT_SECS
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.02)
        raise AssertionError(f"never true: {script}")

    def screenshot(self, path: Path, *, top: float = 0, height: float | None = None) -> None:
        """Write a part of the page, or all of it, as PNG."""
        wide, high = self.run("[innerWidth, document.documentElement.scrollHeight]")
        height = min(height or high, high - top)
        clip = {"x": 0, "y": top, "width": wide, "height": height, "scale": 1}
        found = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def opened_browser() -> Iterator[Tab]:
    """Start the browser with a profile of its own, and end it."""
    program = shutil.which("chromium")
    if program is None:
        reason = "chromium is not installed: apt-get install --no-install-recommends chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with ExitStack() as stack:
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        log = stack.enter_context((profile / "browser.log").open("wb"))
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        stack.callback(_end, process)
        port = _wait(profile / "profile" / "DevToolsActivePort", process, profile / "browser.log")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            (page,) = (p for p in json.load(answer) if p["type"] == "page")
        url = page["webSocketDebuggerUrl"]
        yield Tab(stack.enter_context(connect(url, max_size=None, proxy=None)))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(port_file: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    """Return the port that the browser chose, once it has written all of it down."""
    end = time.monotonic() + START_SECS
    while time.monotonic() < end and process.poll() is None:
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if len(lines) >= 2:
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start: {log.read_text(errors='replace')[-2000:]}")
