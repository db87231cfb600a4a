"""The pages in a real browser: a chat with streamed answers, the live figures beside it, and the API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from smelt.serve.server.pages import CHAT_PAGE, DOCS_PAGE, security_policy
from tests.serve.browser import CHROMIUM, Browser
from tests.serve.conftest import KEYS
from tests.serve.scripted_service import scripted_server, write_tokenizer
from tests.serve.server_process import Server

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
READY = "document.activeElement?.id === 'text'"
ANSWERED = "running === null && document.querySelectorAll('.turn.assistant:not(.streaming)').length"
ATTACK = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script> **no** &amp;"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        yield opened


def send(browser: Browser, text: str) -> None:
    browser.type(text)
    browser.press("Enter", 13)


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.ask(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))


@pytest.mark.parametrize(("path", "page"), [("/", CHAT_PAGE), ("/docs", DOCS_PAGE)])
def test_pages_are_self_contained(server: Server, path: str, page: str) -> None:
    answer = server.get(path)
    policy = answer.headers["content-security-policy"]
    assert answer.text == page and policy == security_policy(page)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "{{" not in page


@needs_chromium
def test_a_chat_with_live_figures(server: Server, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    assert text_of(browser, "#model") == "tiny"
    browser.ask("document.getElementById('temperature').value = 0; document.getElementById('max_tokens').value = 40")
    browser.ask("document.getElementById('system').value = 'be brief'")
    send(browser, "hi")
    browser.wait_for(ANSWERED)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
    answer = server.post("/v1/chat/completions", body).json()
    assert text_of(browser, ".turn.assistant .text") == answer["choices"][0]["message"]["content"]
    summary = text_of(browser, ".turn.assistant .meta")
    assert summary.startswith(f"{answer['usage']['completion_tokens']} tokens · ") and "first token after" in summary

    shown = text_of(browser, "#generated")
    server.complete("for the page", max_tokens=500, n=8, ignore_eos=True)
    browser.wait_for(f"document.getElementById('generated').textContent !== {shown!r}")
    browser.wait_for("document.getElementById('speed').textContent !== '0'")
    assert browser.ask("document.querySelectorAll('#inter_token_latency rect').length") >= 8
    assert browser.ask("document.querySelector('#history path') !== null")
    assert text_of(browser, "#inter_token_latency_summary").startswith("median ")
    if folder := os.environ.get("SMELT_SCREENSHOTS"):
        for scheme in ("light", "dark"):
            browser.screenshot(Path(folder) / f"chat-{scheme}.png", scheme)
    requests = [event for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    urls = [event["params"]["request"]["url"] for event in requests]
    assert urls and all(url.startswith((server.url, "data:")) for url in urls)
    assert not browser.complaints


@needs_chromium
def test_stopping_an_answer_before_its_first_token(server: Server, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    with server.paused():
        send(browser, "hello")
        browser.wait_for("document.getElementById('send').hidden")
        server.wait_until(lambda state: state["admitted"])
        browser.ask("document.getElementById('stop').click()")
        browser.wait_for(ANSWERED)
        server.wait_until(lambda state: not state["admitted"])
    assert text_of(browser, ".turn.assistant .meta") == "stopped"
    assert browser.ask("document.getElementById('text').value") == "hello" and browser.ask("messages.length") == 0
    server.wait_until_idle()


@needs_chromium
def test_a_key_is_asked_for(keyed: Server, browser: Browser) -> None:
    browser.open(keyed.url + "/")
    browser.wait_for("document.activeElement?.id === 'key'")
    assert browser.ask("document.getElementById('content').hidden")
    send(browser, "wrong-key-of-somebody")
    browser.wait_for("document.getElementById('keyerror').textContent")
    assert text_of(browser, "#keyerror") == "The server does not accept this API key."
    browser.ask("document.getElementById('key').select()")
    send(browser, KEYS[0])
    browser.wait_for(READY)
    browser.ask("document.getElementById('max_tokens').value = 5")
    send(browser, "hi")
    browser.wait_for(ANSWERED)
    assert "first token after" in text_of(browser, ".turn.assistant .meta")
    assert browser.ask("sessionStorage.length") == 1 and browser.ask("localStorage.length") == 0
    assert not browser.ask("document.cookie")


@needs_chromium
def test_answers_are_text_and_never_markup(tmp_path: Path, browser: Browser) -> None:
    folder = write_tokenizer(tmp_path / "model", "hermes")
    call = '<tool_call>{"name": "paint", "arguments": {"color": "<b>red</b>"}}</tool_call>'
    answers = [f"<think>{ATTACK}</think>{ATTACK}", call, ("cut off", "length")]
    with scripted_server(folder, answers, root_path="/llm") as url:
        browser.open(f"{url}/llm/")
        browser.wait_for(READY)
        send(browser, ATTACK)
        browser.wait_for(ANSWERED)
        assert text_of(browser, ".turn.user .text") == ATTACK
        assert text_of(browser, ".turn.assistant > .text") == ATTACK
        assert text_of(browser, ".turn.assistant .reasoning .text") == ATTACK
        assert browser.ask("document.querySelector('.reasoning').open") is False
        tool = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
        browser.ask(f"document.getElementById('tools').value = {json.dumps(json.dumps([tool]))}")
        send(browser, "paint")
        browser.wait_for(f"{ANSWERED} === 2")
        assert text_of(browser, ".call") == 'paint({"color": "<b>red</b>"})'
        send(browser, "and now?")  # with the call in the history
        browser.wait_for(f"{ANSWERED} === 3")
        assert "cut off at the token limit" in text_of(browser, ".turn:last-child .meta")
        assert browser.ask("document.title").startswith("tiny") and not browser.complaints
        assert browser.ask("document.querySelectorAll('#messages img, #messages b, #messages script').length") == 0
        browser.ask("document.getElementById('tools').value = '[nonsense'")
        send(browser, "again")
        browser.wait_for(f"{ANSWERED} === 4")
        assert text_of(browser, ".turn:last-child .error").startswith("The tools are not valid JSON")


@needs_chromium
def test_stopping_in_the_middle_keeps_what_came(tmp_path: Path, browser: Browser) -> None:
    """Without a chat template the page continues texts."""
    folder = write_tokenizer(tmp_path / "model", "plain")
    (folder / "chat_template.jinja").unlink()
    with scripted_server(folder, ["word " * 1000], pause=0.01) as url:
        browser.open(f"{url}/")
        browser.wait_for(READY)
        assert "no chat template" in text_of(browser, "#hint")
        send(browser, "Once upon a time")
        browser.wait_for("document.querySelector('.turn.assistant .text')?.textContent.length > 20")
        browser.press("Escape", 27)
        browser.wait_for(ANSWERED)
        assert text_of(browser, ".turn.assistant .meta").endswith("stopped")
        assert "word word" in browser.ask("messages[1].content") and browser.ask("messages[1].content.length") < 5000
        assert httpx.get(f"{url}/state").json()["finished"]["abort"] == 1


@needs_chromium
def test_the_api_page_shows_every_route(server: Server, browser: Browser) -> None:
    browser.open(server.url + "/docs")
    browser.wait_for("document.querySelectorAll('#operations section').length")
    openapi = server.get("/openapi.json").json()
    headings = browser.ask("Array.from(document.querySelectorAll('#operations h3'), heading => heading.textContent)")
    for path, methods in openapi["paths"].items():
        assert {f"{method.upper()} {path}" for method in methods} <= set(headings)
    command = text_of(browser, "#post-v1-completions pre")
    assert command.startswith(f"curl {server.url}/v1/completions ") and '"prompt": "Water is"' in command
    assert "messages required" in text_of(browser, "#post-v1-chat-completions tbody tr")
    links = browser.ask("Array.from(document.querySelectorAll('#operations a'), link => link.getAttribute('href'))")
    assert links and all(browser.ask(f"document.querySelector('{link}') !== null") for link in set(links))
    assert not browser.complaints


def test_examples_of_the_api_page_are_valid(server: Server) -> None:
    """The examples are answered, or refused only because the tiny model is no encoder or the route is off."""
    openapi = server.get("/openapi.json").json()
    tried = 0
    for path, methods in openapi["paths"].items():
        reference = methods.get("post", {}).get("requestBody", {})
        if reference:
            name = reference["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            example = openapi["components"]["schemas"][name]["examples"][0]
            example |= {"model": "tiny"} if "model" in example else {}
            answer = server.post(path, example)
            refused = ("is an encoder", "generates text", "this route is off", "encoder")
            assert answer.status_code == 200 or any(words in answer.text for words in refused), (path, answer.text)
            tried += 1
    assert tried >= 18
