"""Anthropic's Messages and OpenAI's Responses: scripted answers, translated requests, errors in their formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import KEYS
from tests.serve.scripted_service import with_service, write_tokenizer
from tests.serve.server_process import NAME, Server

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "C"}}\n</tool_call>'
ANSWER = f"<think>Hm.</think>Look:\n{CALL}"
ASKED = {"model": NAME, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "get_weather", "description": "Return the weather.", "input_schema": SCHEMA}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Look:"},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"unit": "C"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "20"}]},
        {"type": "text", "text": "and now?"},
    ]},
]  # fmt: skip
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:", "annotations": []}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"unit": "C"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "20"},
    {"role": "user", "content": "and now?"},
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "Look:",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "ID", "type": "function", "function": {"name": "get_weather", "arguments": '{"unit": "C"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "ID", "content": "20"},
    {"role": "user", "content": "and now?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("formats") / "hermes", "hermes")


def read_named_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_messages_complete_and_streamed(folder: Path) -> None:
    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {**ASKED, "tools": [TOOL]}
        stop = {**ASKED, "stop_sequences": ["ook", "x"]}
        return [await client.post("/v1/messages", json=each) for each in (body, {**body, "stream": True}, stop)]

    complete, stream, stopped = with_service(folder, [ANSWER, ANSWER, "Look:"], use)
    message = complete.json()
    assert message["type"] == "message" and message["role"] == "assistant" and message["id"].startswith("msg_")
    assert message["stop_reason"] == "tool_use" and message["usage"]["output_tokens"] == len(ANSWER)
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""} and text == {
        "type": "text",
        "text": "Look:",
    }
    assert call["type"] == "tool_use" and call["id"] and (call["name"], call["input"]) == ("get_weather", {"unit": "C"})
    events = read_named_events(stream.text)
    assert events[0]["type"] == "message_start" and events[0]["message"]["usage"]["output_tokens"] == 0
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ANSWER)
    blocks: list[dict[str, Any]] = []
    open_block = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not open_block and event["index"] == len(blocks)
            blocks.append({**event["content_block"], "delta": ""})
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            blocks[event["index"]]["delta"] += event["delta"][key]
        open_block = event["type"] != "content_block_stop"
    assert not open_block and [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert [block["delta"] for block in blocks] == ["Hm.", "Look:", '{"unit": "C"}'] and blocks[2]["input"] == {}
    assert stopped.json()["stop_reason"] == "stop_sequence" and stopped.json()["stop_sequence"] == "ook"
    assert stopped.json()["content"] == [{"type": "text", "text": "L"}]


def test_responses_complete_and_streamed(folder: Path) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}

    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        body: dict[str, Any] = {"input": "hi", "tools": [tool]}
        bodies = (body, {**body, "stream": True}, {"input": "hi", "stream": True})
        return [await client.post("/v1/responses", json=each) for each in bodies]

    complete, stream, cut = with_service(folder, [ANSWER, ANSWER, ("Loo", "length")], use)
    response = complete.json()
    assert response["object"] == "response" and response["status"] == "completed" and response["usage"]["total_tokens"]
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Look:" and message["role"] == "assistant"
    assert (
        call["type"] == "function_call" and call["call_id"].startswith("call_") and call["arguments"] == '{"unit": "C"}'
    )
    events = read_named_events(stream.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and last["status"] == "completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"] and [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("arguments", item.get("content")) for item in added] == [[], [], ""], "their text comes later"
    for name, text in {
        "output_text": "Look:",
        "reasoning_text": "Hm.",
        "function_call_arguments": '{"unit": "C"}',
    }.items():
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{name}.delta") == text
    events = read_named_events(cut.text)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_ollama_complete_and_streamed(folder: Path) -> None:
    function = {"name": "get_weather", "parameters": SCHEMA}
    body = {**ASKED, "tools": [{"type": "function", "function": function}]}

    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        stream = await client.post("/api/chat", json=body)
        complete = await client.post("/api/chat", json={**body, "stream": False})
        generated = await client.post("/api/generate", json={"model": NAME, "prompt": "hi", "stream": False})
        return [stream, complete, generated, await client.post("/api/generate", json={"model": NAME})]

    answers = [ANSWER, ANSWER, ("<think>Hm.</think>Loo", "length")]
    stream, complete, generated, loaded = with_service(folder, answers, use)
    assert stream.headers["content-type"] == "application/x-ndjson"
    *lines, last = [json.loads(line) for line in stream.text.splitlines()]
    calls = [{"function": {"name": "get_weather", "arguments": {"unit": "C"}}}]
    assert "".join(line["message"]["content"] for line in lines) == "Look:"
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm."
    assert [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]] == [calls]
    assert not any(line["done"] for line in lines) and last["done"] and last["done_reason"] == "stop"
    assert last["eval_count"] == len(ANSWER) and last["prompt_eval_count"] > 0
    message = complete.json()["message"]
    assert message == {"role": "assistant", "content": "Look:", "thinking": "Hm.", "tool_calls": calls}
    assert (generated.json()["response"], generated.json()["thinking"]) == ("Loo", "Hm.")
    assert generated.json()["done_reason"] == "length" and loaded.json()["done_reason"] == "load"


def test_conversations_are_translated(folder: Path) -> None:
    """The prompt is that of the same conversation in chat completions."""
    function = {"name": "get_weather", "description": "Return the weather.", "parameters": SCHEMA}
    chat = {"messages": CHAT, "tools": [{"type": "function", "function": function}]}

    async def use(client: httpx.AsyncClient) -> list[int]:
        counts = []
        for call_id in ("toolu_1", "call_1"):
            body = json.loads(json.dumps(chat).replace('"ID"', f'"{call_id}"'))
            counts.append((await client.post("/tokenize", json=body)).json()["count"])
        body = {"messages": HISTORY, "system": [{"type": "text", "text": "be brief"}], "tools": [TOOL]}
        counts.append((await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"])
        items = {"input": ITEMS, "instructions": "be brief", "tools": [{"type": "function", **function}]}
        counts.append((await client.post("/v1/responses", json=items)).json()["usage"]["input_tokens"])
        function_call = {"function": {"name": "get_weather", "arguments": {"unit": "C"}}}
        assistant = {"role": "assistant", "content": "Look:", "thinking": "Hm.", "tool_calls": [function_call]}
        plain = [*CHAT[:2], assistant, {"role": "tool", "content": "20", "tool_name": "get_weather"}, CHAT[4]]
        ollama = {"model": NAME, "messages": plain, "tools": chat["tools"], "stream": False}
        counts.append((await client.post("/api/chat", json=ollama)).json()["prompt_eval_count"])
        return counts

    messages, responses, counted, used, evaluated = with_service(folder, ["x", "x"], use)
    assert counted == messages and evaluated == used == responses and messages == responses + 2


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    """The chat template of the server puts the role before each message, and ends it."""
    chat = [*ASKED["messages"], {"role": "assistant", "content": [{"type": "text", "text": "I s"}]}]
    answer = server.post("/v1/messages", {"messages": chat, "max_tokens": 6, "temperature": 0}).json()
    prompt = server.post(
        "/detokenize",
        {"tokens": server.post("/tokenize", {"messages": chat, "continue_final_message": True}).json()["tokens"]},
    ).json()["prompt"]
    assert prompt.endswith("assistant: I s")
    assert answer["content"][0]["text"] == server.complete(prompt, max_tokens=6)["choices"][0]["text"]
    counted = server.post("/v1/messages/count_tokens", {"messages": chat}).json()["input_tokens"]
    assert counted == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == len(prompt)


def test_sampling_and_log_probabilities_of_responses(server: Server) -> None:
    """They are those of the same chat."""

    def check(entries: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
        assert [entry["token"] for entry in entries] == [entry["token"] for entry in others]
        values = [[pair["logprob"] for pair in (entry, *entry["top_logprobs"])] for entry in entries]
        assert len(values) == 8 and {len(pairs) for pairs in values} == {3}
        for pairs, entry in zip(values, others, strict=True):
            assert pairs == pytest.approx([pair["logprob"] for pair in (entry, *entry["top_logprobs"])], abs=1e-4)

    sampled = {"temperature": 1.5, "seed": 7, "top_k": 30, "repetition_penalty": 1.2}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    expected = server.post("/v1/chat/completions", {**chat, **sampled}).json()["choices"][0]
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream_options": {}}
    body = {"input": "hi", "max_output_tokens": 8, **sampled}
    part = server.post("/v1/responses", {**body, **include}).json()["output"][0]["content"][0]
    assert part["text"] == expected["message"]["content"]
    check(part["logprobs"], expected["logprobs"]["content"])
    events = read_named_events(server.post("/v1/responses", {**body, **include, "stream": True}).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    check([entry for event in deltas for entry in event["logprobs"]], part["logprobs"])
    check(events[-1]["response"]["output"][0]["content"][0]["logprobs"], part["logprobs"])
    assert server.post("/v1/responses", body).json()["output"][0]["content"][0]["logprobs"] == []


def test_messages_in_a_format(server: Server) -> None:
    output = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}, "effort": "max"}
    answer = server.post("/v1/messages", {**ASKED, "output_config": output}).json()
    assert answer["content"][0]["text"] in ('"yes"', '"no"') and answer["stop_reason"] == "end_turn"


BAD_MESSAGES: dict[str, dict[str, Any]] = {
    "no max_tokens": {"max_tokens": None},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
    "a document": {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
    "no tool_use_id": {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "1"}]}]},
    "a call without a name": {
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, *ASKED["messages"]]
    },  # type: ignore[misc]
    "a call at the end": {
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]
    },
    "a choice": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
    "a schema": {"tools": [{"name": "f", "input_schema": {"type": "x"}}]},
    "a server tool": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "an output format": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
    "no output schema": {"output_config": {"format": {"type": "json_schema"}}},
    "mcp": {"mcp_servers": [{"url": "http://x"}]},
    "temperature": {"temperature": 1.5},
    "half a character": {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
}
BAD_RESPONSES: dict[str, dict[str, Any]] = {
    "previous_response_id": {"previous_response_id": "resp_1"},
    "store": {"store": True},
    "background": {"background": True},
    "an image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "a reference": {"input": [{"type": "item_reference", "id": "x"}]},
    "a role": {"input": [{"role": "critic", "content": "x"}]},
    "no call_id": {"input": [{"type": "function_call_output", "output": "x"}]},
    "no items": {"input": []},
    "truncation": {"truncation": "auto"},
    "a tool": {"tools": [{"type": "web_search"}]},
    "an unknown field": {"max_tokens": 3},
    "a field of chats": {"top_k": "all"},
    "a format": {"text": {"format": {"type": "xml"}}},
    "a schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}},
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages(server: Server, name: str) -> None:
    body = {key: value for key, value in {**ASKED, **BAD_MESSAGES[name]}.items() if value is not None}
    response = server.http.post(
        f"{server.url}/v1/messages", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error" and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", BAD_RESPONSES)
def test_bad_responses(server: Server, name: str) -> None:
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 4, **BAD_RESPONSES[name]})
    assert response.status_code == 400 and response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]},
        {"options": {"mirostat": 2}},
        {"model": None},
        {"options": {"temperature": "warm"}},
        {"format": "xml"},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    ],
    ids=str,
)
def test_bad_requests_of_ollama(server: Server, wrong: dict[str, Any]) -> None:
    response = server.post("/api/chat", {"model": NAME, "messages": [{"role": "user", "content": "x"}], **wrong})
    assert response.status_code == 400 and isinstance(response.json()["error"], str), response.text


def test_errors_in_the_format_of_anthropic(server: Server, keyed: Server) -> None:
    unknown = server.post("/v1/messages", {**ASKED, "model": "other"})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
    invalid = server.http.post(f"{server.url}/v1/messages", content="{", headers={"content-type": "application/json"})
    assert invalid.status_code == 400 and invalid.json()["type"] == "error"
    wrong = keyed.post("/v1/messages", ASKED, headers={"x-api-key": "wrong"})
    assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error"
    assert keyed.post("/v1/messages", {**ASKED, "max_tokens": 2}, headers={"x-api-key": KEYS[0]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_of_responses(client: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    asked: dict[str, Any] = {
        "model": NAME,
        "input": "hi",
        "max_output_tokens": 200,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    if stream:
        with client.responses.stream(**asked) as events:
            seen = list(events)
            response: Any = events.get_final_response()
        assert seen[0].type == "response.created"
        deltas = [event.delta for event in seen if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == response.output[0].arguments != ""  # a busy machine merges deltas
    else:
        response = client.responses.create(**asked)
    (call,) = response.output
    assert (
        response.status == "completed" and call.type == "function_call" and json.loads(call.arguments)["unit"] in "CF"
    )
    text: Any = {"format": {"type": "json_schema", "name": "unit", "schema": SCHEMA, "strict": True}}
    items: Any = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True),
                  {"type": "function_call_output", "call_id": call.call_id, "output": "20"}]  # fmt: skip
    final = client.responses.create(model=NAME, input=items, max_output_tokens=200, text=text)
    assert json.loads(final.output_text)["unit"] in "CF" and final.usage is not None and final.usage.input_tokens > 0
