"""The live page in a real browser: its counters move when a request is served, and it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path

import pytest

from smelt.serve.server.status import CONTENT_SECURITY_POLICY, PAGE
from tests.serve.browser import CHROMIUM, Browser
from tests.serve.server_process import Server


def test_the_page_is_self_contained(server: Server) -> None:
    answer = server.get("/")
    assert answer.text == PAGE and answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "http://" not in PAGE.replace("http://www.w3.org/2000/svg", "") and "https://" not in PAGE
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY and "unsafe" not in CONTENT_SECURITY_POLICY


def wait_for(browser: Browser, expression: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not browser.ask(expression):
        assert time.monotonic() < until, (expression, browser.ask("document.body.innerText"))
        time.sleep(0.1)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_counters_move(server: Server, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(server.url + "/")
        wait_for(browser, "document.getElementById('status')?.textContent.startsWith('serving for')")
        assert browser.ask("document.getElementById('model').textContent") == "tiny"
        before = int(server.state()["generated_tokens"])
        shown = browser.ask("document.getElementById('generated').textContent")
        server.complete("for the page", max_tokens=500, n=8, ignore_eos=True)
        assert server.state()["generated_tokens"] == before + 4000
        wait_for(browser, f"document.getElementById('generated').textContent !== {shown!r}")
        wait_for(browser, "document.getElementById('speed').textContent !== '0'")
        assert browser.ask("document.querySelectorAll('#inter_token_latency rect').length") >= 8
        assert browser.ask("document.querySelector('#history path') !== null")
        assert browser.ask("document.getElementById('inter_token_latency_summary').textContent").startswith("median ")
        if folder := os.environ.get("SMELT_SCREENSHOTS"):
            for scheme in ("light", "dark"):
                browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                image = browser.call("Page.captureScreenshot")["data"]
                (Path(folder) / f"page-{scheme}.png").write_bytes(base64.b64decode(image))
        urls = [event["params"]["request"]["url"] for event in browser.events
                 if event.get("method") == "Network.requestWillBeSent"]  # fmt: skip
        assert urls and all(url.startswith((server.url, "data:")) for url in urls)
        assert not [
            event for event in browser.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]
