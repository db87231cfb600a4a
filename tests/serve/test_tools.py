"""Tools and reasoning over HTTP: scripted answers in the formats of models, and forced calls of a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.scripted_service import with_service, write_tokenizer
from tests.serve.server_process import NAME, Server, read_events

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "now": {"type": "boolean"}},
            "required": ["unit", "now"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
HELLO: Any = [{"role": "user", "content": "hi"}]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "C", "now": true}}\n</tool_call>'
ARGUMENTS = {"unit": "C", "now": True}
ANSWERS = {
    "hermes": f"<think>\nHm.\n</think>\n\nLook:\n{HERMES}",
    "mistral": 'Look: [TOOL_CALLS]get_weather[ARGS]{"unit": "C", "now": true}',
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"unit": "C", "now": true}<|call|>',
    "plain": 'Look: {"name": "get_weather", "arguments": {"unit": "C", "now": true}}',
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("formats")
    return {name: write_tokenizer(root / name, name) for name in ANSWERS}


async def post(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {"messages": HELLO, **fields}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return read_events(response) if fields.get("stream") else response.json()


def assemble(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the message of a stream, as OpenAI's clients put it together, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reasons = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning_content") == delta.get("reasoning")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["id"].startswith("call_") and call["type"] == "function"
                message["calls"].append((call["function"]["name"], ""))
            name, arguments = message["calls"][call["index"]]
            message["calls"][call["index"]] = name, arguments + call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    return message, reason


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_and_reasoning_of_each_format(folders: dict[str, Path], name: str) -> None:
    """A complete answer and its stream say the same."""

    async def use(client: httpx.AsyncClient) -> tuple[Any, Any]:
        return await post(client, tools=[WEATHER]), await post(client, tools=[WEATHER], stream=True)

    complete, chunks = with_service(folders[name], [ANSWERS[name]] * 2, use)
    (choice,) = complete["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Look:"
    assert call["id"].startswith("call_") and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    reasoning = "Hm." if name in ("hermes", "openai") else None
    assert choice["message"].get("reasoning_content") == reasoning == choice["message"].get("reasoning")
    message, reason = assemble(chunks)
    assert message == {
        "content": "Look:",
        "reasoning": reasoning or "",
        "calls": [("get_weather", call["function"]["arguments"])],
    }
    assert reason == "tool_calls"


def test_reasoning_is_left_out_on_request(folders: dict[str, Path]) -> None:
    async def use(client: httpx.AsyncClient) -> tuple[Any, Any]:
        fields = {"tools": [WEATHER], "include_reasoning": False}
        return await post(client, **fields), await post(client, **fields, stream=True)

    complete, chunks = with_service(folders["hermes"], [ANSWERS["hermes"]] * 2, use)
    assert not any("reasoning" in name for name in complete["choices"][0]["message"]) and "Hm." not in str(chunks)
    message, _ = assemble(chunks)
    assert message["content"] == complete["choices"][0]["message"]["content"] == "Look:" and len(message["calls"]) == 1


def test_several_calls_and_none(folders: dict[str, Path]) -> None:
    both = HERMES + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'

    async def use(client: httpx.AsyncClient) -> list[Any]:
        tools = [WEATHER, TIME]
        return [
            await post(client, tools=tools),
            await post(client, tools=tools, parallel_tool_calls=False),
            await post(client, tools=tools, stream=True),
            await post(client, tools=tools, parallel_tool_calls=False, stream=True),
            await post(client, tools=tools, tool_choice="none"),
            await post(client),
            await post(client, tools=[TIME]),
        ]

    parallel, single, stream, single_stream, none, without, other = with_service(folders["hermes"], [both] * 7, use)
    names = [call["function"]["name"] for call in parallel["choices"][0]["message"]["tool_calls"]]
    ids = {call["id"] for call in parallel["choices"][0]["message"]["tool_calls"]}
    assert names == ["get_weather", "get_time"] and len(ids) == 2
    assert len(single["choices"][0]["message"]["tool_calls"]) == 1
    assert [name for name, _ in assemble(stream)[0]["calls"]] == names
    assert [name for name, _ in assemble(single_stream)[0]["calls"]] == names[:1]
    for plain in (none, without):
        assert plain["choices"][0]["message"]["content"] == both and plain["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in plain["choices"][0]["message"]
    assert other["choices"][0]["message"]["content"].rstrip() == HERMES  # no function of this name was offered
    assert [call["function"]["name"] for call in other["choices"][0]["message"]["tool_calls"]] == ["get_time"]


def test_an_answer_that_is_cut_off(folders: dict[str, Path]) -> None:
    cut = HERMES[: HERMES.index("now")]

    async def use(client: httpx.AsyncClient) -> list[Any]:
        return [
            await post(client, tools=[WEATHER]),
            await post(client, tools=[WEATHER], tool_choice="required"),
            await post(client, tools=[WEATHER], tool_choice="required", stream=True),
        ]

    free, forced, stream = with_service(folders["hermes"], [(cut, "length")] * 3, use)
    assert free["choices"][0]["message"]["content"] == cut and free["choices"][0]["finish_reason"] == "length"
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"unit": "C", "' and forced["choices"][0]["finish_reason"] == "length"
    message, reason = assemble(stream)
    assert message["calls"] == [("get_weather", '{"unit": "C", "')] and reason == "length"


def test_the_template_gets_tools_and_history(folders: dict[str, Path]) -> None:
    """Arguments are objects, content is a string, and the developer is the system unless the template knows it."""
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "weather"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"unit": "C"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "20"},
    ]

    async def use(client: httpx.AsyncClient) -> str:
        tokens = (await post(client, "/tokenize", messages=history, tools=[WEATHER, TIME]))["tokens"]
        text: str = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        return text

    tools, *lines = with_service(folders["hermes"], [], use).splitlines()
    messages = [json.loads(line) for line in lines[:-1]]
    assert json.loads(tools) == [
        WEATHER,
        {
            "type": "function",
            "function": {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    assert messages[0] == {"role": "system", "content": "be brief"}
    function = {"name": "get_weather", "arguments": {"unit": "C"}}
    assert messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        "reasoning_content": "Hm.",
    }
    assert messages[3] == {"role": "tool", "content": "20", "tool_call_id": "call_1"}
    _, *lines = with_service(folders["mistral"], [], use).splitlines()
    ids = json.loads(lines[2])["tool_calls"][0]["id"], json.loads(lines[3])["tool_call_id"]
    assert ids[0] == ids[1] and len(ids[0]) == 9 and ids[0].isalnum()
    _, *lines = with_service(folders["openai"], [], use).splitlines()
    assert json.loads(lines[0])["role"] == "developer" and json.loads(lines[2])["thinking"] == "Hm."
    plain = with_service(folders["plain"], [], use)
    system, *_ = plain.split("user: weather")
    assert system.startswith("system: be brief\n\nYou can call these functions") and '"get_time"' in system
    assert 'assistant: {"name": "get_weather", "arguments": {"unit": "C"}}\nuser: Result of the function: 20\n' in plain


def test_reasoning_that_the_prompt_opens(folders: dict[str, Path]) -> None:
    async def use(client: httpx.AsyncClient) -> list[Any]:
        return [
            await post(client, reasoning_effort="high"),
            await post(client, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high"),
            await post(client),
        ]

    opened, closed, default = with_service(folders["hermes"], ["Hm.</think>Yes.", "Hm.</think>Yes.", "<think>Hm."], use)
    assert (
        opened["choices"][0]["message"]["reasoning_content"] == "Hm."
        and opened["choices"][0]["message"]["content"] == "Yes."
    )
    assert closed["choices"][0]["message"]["content"] == "Hm.</think>Yes."
    assert default["choices"][0]["message"]["reasoning"] == "Hm." and default["choices"][0]["message"]["content"] == ""


def test_parsers_chosen_by_name(folders: dict[str, Path]) -> None:
    async def use(client: httpx.AsyncClient) -> list[Any]:
        required = await client.post(
            "/v1/chat/completions", json={"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"}
        )
        return [await post(client, tools=[WEATHER]), required]

    text = f"<think>Hm.</think>{HERMES}"
    answer, refused = with_service(folders["hermes"], [text], use, tool_call_parser="none", reasoning_parser="none")
    assert answer["choices"][0]["message"]["content"] == text
    assert refused.status_code == 400 and "--tool-call-parser none" in refused.text
    named, _ = with_service(folders["plain"], [HERMES] * 2, use, tool_call_parser="hermes")
    assert named["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a type": (function(parameters={"type": "x"}), "tools.0.function.parameters"),
    "a nested type": (function(parameters={"properties": {"type": {"type": "text"}}}), "tools.0.function.parameters"),
    "no object": (function(parameters={"type": "string"}), "tools.0.function.parameters"),
    "deep": (function(parameters=json.loads('{"items":' * 70 + "{}" + "}" * 70)), "tools.0.function.parameters"),
    "half a character": (function(parameters={"description": "\ud800"}), "tools.0.function.parameters"),
    "a name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    "the same name": ({"tools": [TIME, TIME]}, "tools"),
    "no function": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "many": ({"tools": [TIME] * 200}, "tools"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "another function": (
        {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
    "a variable of the template": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "function_call": ({"function_call": {"name": "f"}}, "function_call"),
    "a pattern": (
        {
            **function(parameters={"type": "object", "required": ["a"], "properties": {"a": {"pattern": "("}}}),
            "tool_choice": "required",
        },
        "tools",
    ),
    "with response_format": (
        {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "no id": ({"messages": [{"role": "tool", "content": "1"}]}, "messages.0.tool_call_id"),
    "calls of the user": ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0"),
    "no JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0",
    ),
    "a list": (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}]},
        "messages.0.tool_calls.0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tools_are_refused(server: Server, name: str) -> None:
    fields, param = BAD[name]
    body = json.dumps({"messages": HELLO, "max_tokens": 4, **fields})
    response = server.http.post(
        f"{server.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_forced_calls_of_a_real_model(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": NAME, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "seed": 1, "max_tokens": 200,
        "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        with client.chat.completions.stream(**asked) as events:
            fragments = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
            completion: Any = events.get_final_completion()
        assert len(fragments) > 3  # as they arrive
    else:
        completion = client.chat.completions.create(**asked)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    call = choice.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert (
        call.function.name == "get_weather" and arguments["unit"] in ("C", "F") and isinstance(arguments["now"], bool)
    )
    history = [
        *HELLO,
        choice.message,  # with all of its fields, as clients send it back
        {"role": "tool", "tool_call_id": call.id, "content": "20"},
    ]
    final = client.chat.completions.create(model=NAME, messages=history, tools=[WEATHER], max_tokens=3)
    assert final.choices[0].finish_reason in ("length", "stop") and final.usage is not None
    assert final.usage.prompt_tokens > 100  # with the description of the tools
