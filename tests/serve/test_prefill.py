"""Assistant prefill and other fields that change the prompt: as transformers' `apply_chat_template` renders it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.server_process import Server, language_model, read_events, start, tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content | trim if strip else m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if style is defined %}{{ style | tojson }}{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am "}]


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prefill")
    text_tokenizer = _tokenizer()
    language_model().save_pretrained(folder / "model")
    text_tokenizer.save_pretrained(folder / "model")
    running = start(folder / "model", folder, "--kv-cache-gib", "0.01")
    yield running
    assert running.end() == 0


def _tokenizer() -> Any:
    text_tokenizer = tokenizer()
    text_tokenizer.add_special_tokens({"bos_token": "<end>"})
    text_tokenizer.chat_template = TEMPLATE
    return text_tokenizer


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"continue_final_message": True, "chat_template_kwargs": {"strip": True}},
        {"chat_template_kwargs": {"style": {"a": [1, "x"]}}},
    ],
    ids=str,
)
def test_prompts_are_those_of_transformers(prefill: Server, fields: dict[str, Any]) -> None:
    settings = {name: value for name, value in fields.items() if name != "chat_template_kwargs"}
    settings.setdefault("add_generation_prompt", not fields.get("continue_final_message"))
    kwargs = fields.get("chat_template_kwargs", {})
    text = _tokenizer().apply_chat_template(CHAT, tokenize=False, **settings, **kwargs)
    expected = _tokenizer()(text, add_special_tokens=False)["input_ids"]
    tokens = prefill.post("/tokenize", {"messages": CHAT, **fields}).json()["tokens"]
    assert tokens == expected
    body = {"messages": CHAT, "max_tokens": 5, "temperature": 0, "return_token_ids": True, **fields}
    answer = prefill.post("/v1/chat/completions", body).json()
    alone = prefill.complete(expected, max_tokens=5, return_token_ids=True)["choices"][0]
    assert answer["choices"][0]["token_ids"] == alone["token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(expected)


def test_a_message_is_continued_or_followed_by_another(prefill: Server) -> None:
    body = {"messages": CHAT, "max_tokens": 1, "continue_final_message": True, "add_generation_prompt": True}
    response = prefill.post("/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "continue_final_message"


def test_special_tokens_in_prompt_and_answer(prefill: Server) -> None:
    text = "ab"
    plain = prefill.complete(text, max_tokens=0)["usage"]["prompt_tokens"]
    assert prefill.complete(text, max_tokens=0, add_special_tokens=False)["usage"]["prompt_tokens"] <= plain
    bias = {"logit_bias": {"256": 100}, "max_tokens": 3}
    shown = prefill.complete(text, **bias, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "<end><end><end>"
    assert prefill.complete(text, **bias, ignore_eos=True)["choices"][0]["text"] == ""
    ended = prefill.complete(text, **bias, skip_special_tokens=False, return_token_ids=True)["choices"][0]
    assert (ended["text"], ended["token_ids"], ended["finish_reason"]) == ("", [256], "stop")
    kept = prefill.complete(text, **bias, skip_special_tokens=False, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "<end>"


def test_a_prompt_is_truncated(prefill: Server) -> None:
    whole = prefill.complete("cdef", max_tokens=4)["choices"]
    cut = prefill.complete("abcdef", max_tokens=4, truncate_prompt_tokens=4)
    assert cut["choices"][0]["text"] == whole[0]["text"] and cut["usage"]["prompt_tokens"] == 4
    right = prefill.complete("abcdef", max_tokens=0, truncate_prompt_tokens=4, truncation_side="right", echo=True)
    assert right["choices"][0]["text"] == "abcd"
    echoed = prefill.complete("abcdef", max_tokens=0, truncate_prompt_tokens=4, echo=True)["choices"][0]
    assert echoed["text"] == "cdef"
    longest = prefill.complete("x" * 5000, max_tokens=8, truncate_prompt_tokens=-1)
    assert longest["usage"]["prompt_tokens"] == prefill.state()["max_model_len"] - 8
    assert prefill.complete("ab", max_tokens=1, truncate_prompt_tokens=100)["usage"]["prompt_tokens"] == 2
    body = {"messages": CHAT, "max_tokens": 1, "truncate_prompt_tokens": 3}
    assert prefill.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == 3
    assert prefill.post("/v1/completions", {"prompt": "ab", "truncate_prompt_tokens": 0}).status_code == 400


def test_an_answer_begins_with_the_message_it_continues(prefill: Server) -> None:
    body = {"messages": CHAT, "max_tokens": 5, "temperature": 0, "continue_final_message": True}
    plain = prefill.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    echoed = prefill.post("/v1/chat/completions", {**body, "echo": True}).json()["choices"][0]["message"]["content"]
    assert echoed == "I am " + plain
    with prefill.http.stream(
        "POST", f"{prefill.url}/v1/chat/completions", json={**body, "echo": True, "stream": True}
    ) as answer:
        deltas = [event["choices"][0]["delta"] for event in read_events(answer)]
    assert "".join(delta.get("content", "") for delta in deltas) == echoed
    asked = prefill.post(
        "/v1/chat/completions", {"messages": CHAT[:1], "max_tokens": 5, "temperature": 0, "echo": True}
    )
    assert not asked.json()["choices"][0]["message"]["content"].startswith("hi")
