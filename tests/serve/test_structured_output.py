"""Structured output over HTTP with the official client: schemas, objects, regular expressions, choices, grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serve.server_process import NAME, Server, language_model, start
from tests.serve.test_adapters import write_adapter

pytest.importorskip("llguidance")
ASKED: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "count"],
    "additionalProperties": False,
}


class Colors(BaseModel):
    """Every answer is finite, so that the test cannot pass by running out of tokens."""

    color: Literal["red", "blue"]
    loud: bool


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema(client: openai.OpenAI, stream: bool) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "colors", "schema": SCHEMA, "strict": True}}
    if stream:
        chunks = client.chat.completions.create(**ASKED, response_format=response_format, max_tokens=200, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        answer = client.chat.completions.create(**ASKED, response_format=response_format, max_tokens=200)
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content or ""
    parsed = json.loads(text)
    assert parsed["color"] in ("red", "blue") and 1 <= parsed["count"] <= 9 and len(parsed) == 2


def test_the_client_parses_into_a_class(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=NAME, messages=[{"role": "user", "content": "hi"}], response_format=Colors, max_tokens=2000, seed=3
    )
    assert parsed.choices[0].finish_reason == "stop" and isinstance(parsed.choices[0].message.parsed, Colors)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[ab]{4}c?"}, "[ab]{4}c?"),
        ({"choice": ["yes", 'say "no"', "a|b"]}, r"yes|say \"no\"|a\|b"),
        ({"grammar": 'start: "x" ("y")? "z"'}, "xy?z"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
    ids=str,
)
def test_other_formats(client: openai.OpenAI, constraint: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model=NAME, prompt="hi", max_tokens=200, n=3, seed=5, extra_body={"structured_outputs": constraint}
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.text), choice.text


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object", "schema": {"const": "a"}}},
        {"response_format": {"type": "json_schema", "schema": {"const": "a"}}},
        {"json_schema": {"const": "a"}},
    ],
    ids=str,
)
def test_schemas_of_other_servers(server: Server, constraint: dict[str, Any]) -> None:
    assert server.complete("hi", max_tokens=200, **constraint)["choices"][0]["text"] == '"a"'


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_format": "json"},
        {"response_format": {"type": "json_object", "schema": 1}},
        {"response_format": {"type": "json_object"}, "json_schema": {"const": "a"}},
        {"json_schema": {"type": "strange"}},
        {"json_schema": "{}"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a" * 70_000}},
        {"structured_outputs": {"regex": "[^\\s\\S]"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        {"structured_outputs": {"regex": 3}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a", ""]}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"xml": "a"}},
        {"structured_outputs": []},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_formats_are_refused_before_anything_is_sent(
    server: Server, wrong: dict[str, Any], stream: bool
) -> None:
    body = {"model": NAME, "prompt": "hi", "stream": stream, **wrong}
    response = server.http.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_completed_is_an_error(server: Server, stream: bool) -> None:
    """The first token can be chosen; the next step takes more work than is allowed."""
    wrong = {"regex": "(((a{50,200}){50,200}){50,200}){50,200}"}
    body = {"model": NAME, "prompt": "hi", "stream": stream, "max_tokens": 100, "structured_outputs": wrong}
    response = server.http.post(f"{server.url}/v1/completions", json=body)
    if stream:
        assert response.status_code == 200
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and 'finish_reason":"stop' not in response.text
        error = json.loads(events[-2])["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert "too complex" in error["message"]
    server.wait_until_idle()


def test_adapters_are_models(model_folder: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", language_model(), 1, rank=8)
    server = start(model_folder, tmp_path, "--kv-cache-gib", "0.02", "--lora-modules", f"poet={folder}")
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            cards = [(model.id, model.model_dump()["parent"]) for model in client.models.list()]
            assert cards == [(NAME, None), ("poet", NAME)]
            answers = [
                client.completions.create(model=name, prompt="hello", max_tokens=24, temperature=0, extra_body={})
                for name in (NAME, "poet", NAME)
            ]
            assert [answer.model for answer in answers] == [NAME, "poet", NAME]
            texts = [answer.choices[0].text for answer in answers]
            assert texts[0] == texts[2] != texts[1]
            with pytest.raises(openai.NotFoundError, match="poet"):
                client.completions.create(model="painter", prompt="hello")
    finally:
        server.end()
