"""Chromium without a screen, spoken to through two pipes in the words of its DevTools: no driver and no package stands between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0
"""Seconds that an answer may take on a busy machine."""


class Browser:
    """One page of a browser."""

    def __init__(self, to: int, back: int) -> None:
        self._to = to
        self._back = back
        self._unread = b""
        self._last = 0
        self._session = ""
        self.events: list[Mapping[str, Any]] = []
        """What the page has reported since it was opened: requests, messages of the console, exceptions."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> Mapping[str, Any]:
        """The result of a command. Events that come before it are kept."""
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps({"id": self._last, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._last:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.events.append(message)

    def _receive(self) -> Mapping[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select([self._back], [], [], PATIENCE)
            assert ready, "the browser is silent"
            data = os.read(self._back, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        return json.loads(text)

    def open(self, url: str) -> None:
        """Load a page whole."""
        self.events = []
        loader = self.call("Page.navigate", url=url)["loaderId"]
        while not any(_loaded(event, loader) for event in self.events):
            self.events.append(self._receive())

    def size(self, width: int, height: int = 900) -> None:
        """Of the screen, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def scheme(self, name: str) -> None:
        """What the reader prefers: ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, target: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **({"clip": self._clip()} if whole else {}))
        target.write_bytes(base64.b64decode(found["data"]))

    def _clip(self) -> Mapping[str, float]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}

    def requests(self) -> list[str]:
        """All that the page has asked for."""
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests that have failed."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(json.dumps(params["entry"]))
                case "Network.loadingFailed":
                    found.append(json.dumps(params))
        return found


def _loaded(event: Mapping[str, Any], loader: str) -> bool:
    params = event.get("params", {})
    return event.get("method") == "Page.lifecycleEvent" and (params["loaderId"], params["name"]) == (loader, "load")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, which forgets everything."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, f"got no browser, expected one of {', '.join(NAMES)}; tests/site.sh installs it"
    own, theirs = os.pipe(), os.pipe()

    def as_three_and_four() -> None:
        # The browser reads commands from 3 and writes to 4. First out of their way, as either may be one of these.
        commands, answers = os.dup(own[0]), os.dup(theirs[1])
        while commands < 5 or answers < 5:
            commands, answers = os.dup(commands), os.dup(answers)
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(program, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb"),
                *("--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"),
            ],
            preexec_fn=as_three_and_four,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(own[0])
        os.close(theirs[1])
        try:
            yield Browser(own[1], theirs[0])
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)
            os.close(own[1])
            os.close(theirs[0])
