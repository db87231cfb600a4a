"""Chromium through its DevTools protocol over a pair of pipes: just enough to open a page and evaluate scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

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
