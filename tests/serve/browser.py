"""Chromium through its DevTools protocol over a pair of pipes: just enough to open a page and evaluate scripts."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 120.0  # seconds, even on a slow machine
CHROMIUM = shutil.which("chromium")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


class Browser:
    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        their_input, self._output = os.pipe()
        self._input, their_output = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4, whatever our own numbers are.
        moves = f"exec {CHROMIUM} {' '.join(OPTIONS)} --user-data-dir={folder} 3<&{their_input} 4>&{their_output}"
        self.process = subprocess.Popen(
            ["bash", "-c", moves], pass_fds=(their_input, their_output), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(their_input)
        os.close(their_output)
        self._read, self._number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._output)
        os.close(self._input)

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Log.enable")
        self.call("Runtime.enable")
        self.call("Network.enable")
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return reply["result"].get("value")

    def wait_for(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Wait until an expression is true; return its value."""
        until = time.monotonic() + seconds
        while not (value := self.ask(expression)):
            assert time.monotonic() < until, (expression, self.ask("document.body.innerText"))
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press and release a key that is no character, by its name and its virtual key code."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        self.call("Emulation.clearDeviceMetricsOverride")

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What the page logged: exceptions, violations of its policy, responses with an error status."""
        return [event for event in self.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._output, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._input, 1 << 16)
            assert part, "the browser has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded
