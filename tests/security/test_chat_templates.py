"""Chat templates are programs of a model's author: they may loop for ever or write gigabytes, and must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from smelt.errors import RequestError
from smelt.models.chat_template import ChatTemplateRenderer, TemplateLimitError
from smelt.models.load import load
from smelt.serve.chat import Conversation
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.server_process import Server, start, tokenizer, write_model

_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)
_DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
_TIME, _MEMORY, _LENGTH = "too much time or memory", "of memory", "characters"
_BOMBS = {
    "nested loops": (_LOOPS, (_TIME,)),
    "power": ("{{ (messages | length + 8) ** (9 ** 9) }}", (_TIME, _MEMORY, "does not accept")),
    "recursion": ("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", (_TIME,)),
    "doubled text": (_DOUBLE, (_MEMORY,)),
    "doubled list": (_DOUBLE.replace("'ab'", "[1]").replace("~", "+"), (_MEMORY,)),
    "multiplied text": ("{{ 'a' * 9999999999 }}", (_MEMORY,)),
    "format width": ("{{ '%9999999999d' | format(1) }}", (_MEMORY, "does not accept")),
    "center": ("{{ 'a' | center(9999999999) }}", (_MEMORY,)),
    "replace": ("{% set x = 'a' * 100000 %}{{ x | replace('', x) | length }}", (_MEMORY,)),
    "many pieces": ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", (_LENGTH,)),
    "one long piece": ("{{ 'a' * (99999998 + messages | length) }}", (_LENGTH,)),
    "nested parentheses": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", ("does not accept",)),
}  # fmt: skip
_MESSAGES = [
    {"role": "system", "content": "Be brief. <b>é</b> \ud83d"},
    {"role": "user", "content": "  hi\n"},
    {"role": "assistant", "content": "{{ 7 * 7 }}"},
]
_TEMPLATES = {
    "chatml": "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}\n"
    "  {% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "tokens and filters": "{{ bos_token }}{{ eos_token }}{% for m in messages %}{{ loop.index0 }}{{ m.content | trim | "
    "upper }}{{ m | tojson }}{{ m | tojson(indent=2, ensure_ascii=true) }}{% endfor %}{{ messages | length }}",
    "namespace and macros": "{% set ns = namespace(n=0, last='') %}{% macro say(m) %}[{{ m.role }}]{% endmacro %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{{ say(m) }}{% endfor %}"
    "{{ ns.n }}{{ ns.last }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}"
    "{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys('ab', 2) | tojson }}{{ tools is none }}{{ documents is none }}"
    "{{ nothing is defined }}",
    "date": "{{ strftime_now('%Y') }}",
    "methods": "{{ messages[1].content.strip().split('i') }}{{ messages[-1]['content'][:3] }}"
    "{{ messages[::-1][0].role }}",
}  # fmt: skip
_REFUSING = {
    "roles": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
    "undefined": "{{ messages[0].nothing.more }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "private namespace": "{% set ns = namespace(__init__=1) %}",
    "changes": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
}


def _renderer(template: Any) -> ChatTemplateRenderer:
    with_template = tokenizer()
    with_template.chat_template = template
    return ChatTemplateRenderer(with_template, cpu_seconds=1)


@pytest.mark.parametrize("name", _BOMBS)
def test_a_template_that_would_not_end(name: str) -> None:
    template, causes = _BOMBS[name]
    renderer = _renderer("{% if messages[0].content == '' %}" + template + "{% endif %}fine")
    with pytest.raises(RequestError) as caught:
        renderer.render([{"role": "user", "content": ""}])
    sentence = str(caught.value)
    assert any(cause in sentence for cause in causes) and "\n" not in sentence, sentence
    if name != "nested parentheses":  # which is not compiled at all
        assert renderer.render([{"role": "user", "content": "x"}]) == "fine"
    renderer.close()


@pytest.mark.parametrize("name", _TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    renderer = _renderer(_TEMPLATES[name])
    expected = renderer._tokenizer.apply_chat_template(_MESSAGES, tokenize=False, add_generation_prompt=True)
    assert renderer.render(_MESSAGES) == expected
    renderer.close()


@pytest.mark.parametrize("name", _REFUSING)
def test_templates_refuse_as_in_transformers(name: str) -> None:
    renderer = _renderer(_REFUSING[name])
    with pytest.raises(Exception):  # noqa: B017 - any
        renderer._tokenizer.apply_chat_template(_MESSAGES, tokenize=False)
    with pytest.raises(RequestError, match="does not accept this conversation") as caught:
        renderer.render(_MESSAGES)
    assert not isinstance(caught.value, TemplateLimitError)
    renderer.close()


def test_a_long_prompt_is_not_cut() -> None:
    """A template may repeat its messages; the limit grows with them."""
    renderer = _renderer("{{ messages[0].content }}{{ messages[0].content }}")
    text = "a b\n" * 10**6
    assert renderer.render([{"role": "user", "content": text}]) == text * 2
    renderer.close()


def test_several_templates_without_a_default() -> None:
    renderer = _renderer({"a": "1", "b": "2"})
    with pytest.raises(RequestError):
        renderer.render(_MESSAGES)


def test_a_changed_template_is_used() -> None:
    renderer = _renderer("1")
    assert renderer.render(_MESSAGES) == "1"
    renderer._tokenizer.chat_template = "2"
    assert renderer.render(_MESSAGES) == "2"
    renderer.close()


# ---- in `smelt chat` and in the server ----


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template loops when a message is empty, as the smallest request to the server could be."""
    folder = write_model(tmp_path_factory.mktemp("hostile") / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == '' %}" + _LOOPS + "{% endif %}{{ m.content }}{% endfor %}"
    )
    return folder


def test_a_conversation_goes_on_after_a_template_was_stopped(hostile: Path) -> None:
    talk = Conversation(Engine(load(hostile)), SamplingParams(max_tokens=3, temperature=0))
    with pytest.raises(RequestError, match="was stopped"):
        list(talk.answer(""))
    assert "".join(talk.answer("hello")) and talk.messages[0]["content"] == "hello"


@pytest.fixture(scope="module")
def server(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(hostile, tmp_path_factory.mktemp("log"))
    yield running
    if running.process.poll() is None:
        running.end()


def _chat(server: Server, content: str) -> httpx.Response:
    return server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    )


def test_the_server_answers_while_a_template_loops(server: Server) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(_chat(server, "")))
    thread.start()
    while thread.is_alive():  # each would wait for ever if the template ran on the event loop
        assert server.complete(max_tokens=1)["choices"]
    assert answers[0].status_code == 500
    assert "chat template was stopped" in answers[0].json()["error"]["message"]
    assert _chat(server, "hello").status_code == 200


def test_sigterm_ends_a_server_whose_template_loops(server: Server) -> None:
    """Last: it ends the server."""

    def ask() -> None:
        with suppress(httpx.HTTPError):  # answered with an error, or not at all
            _chat(server, "")

    thread = threading.Thread(target=ask)
    thread.start()
    server.complete(max_tokens=1)
    assert server.end() == 0
    thread.join()
