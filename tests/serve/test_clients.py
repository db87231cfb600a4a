"""Clients of other projects, unmodified, at a real server; each runs if it is installed (the group `clients`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.serve.scripted_service import scripted_server, write_tokenizer
from tests.serve.server_process import NAME, Server

pytest.importorskip("llguidance")


class Paint(BaseModel):
    """Paint the wall. Every answer is finite, so that no test passes by running out of tokens."""

    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    fast: bool


PARAMETERS = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "fast": {"type": "boolean"}},
    "required": ["color", "fast"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint.", "parameters": PARAMETERS}}
HELLO: Any = [{"role": "user", "content": "hi"}]


def is_paint(arguments: Any) -> bool:
    return bool(Paint.model_validate(arguments))


def test_openai_parses_tools_and_formats(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Paint)
    parsed = client.chat.completions.parse(
        model=NAME, messages=HELLO, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Paint)
    response = client.responses.parse(model=NAME, input="hi", text_format=Paint, max_output_tokens=200)
    assert isinstance(response.output_parsed, Paint)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(server: Server, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": "paint", "description": "Paint.", "input_schema": PARAMETERS}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {
        "model": NAME,
        "max_tokens": 200,
        "messages": HELLO,
        "system": "be brief",
        "tools": tools,
        "tool_choice": choice,
    }
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                assert {event.type for event in events} >= {
                    "message_start",
                    "input_json",
                    "content_block_stop",
                    "message_stop",
                }
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        (call,) = message.content
        assert message.stop_reason == "tool_use" and call.name == "paint" and is_paint(call.input)
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]}
        history = [*HELLO, {"role": "assistant", "content": message.content}, result]
        final = client.messages.create(
            model=NAME, max_tokens=5, messages=history, tools=tools, tool_choice={"type": "none"}
        )
        assert final.stop_reason in ("max_tokens", "end_turn") and 1 <= final.usage.output_tokens <= 5
        assert client.messages.count_tokens(model=NAME, messages=history).input_tokens > 20
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=5, messages=HELLO)


def test_langchain(server: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=NAME, max_tokens=200, max_retries=0)
    bound = model.bind_tools([Paint], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke("hi").tool_calls
    assert call["name"] == "Paint" and is_paint(call["args"])
    streamed = None
    for chunk in bound.stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert is_paint(streamed.tool_calls[0]["args"])  # type: ignore[attr-defined]
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(Paint, method=method).invoke("hi"), Paint)


def test_instructor(client: openai.OpenAI) -> None:
    instructor = pytest.importorskip("instructor")
    patched = instructor.from_openai(client)  # by default with a tool
    answer = patched.chat.completions.create(
        model=NAME, messages=HELLO, response_model=Paint, max_tokens=200, max_retries=0
    )
    assert isinstance(answer, Paint)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # asks no other server
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion(
        model=f"openai/{NAME}",
        api_base=f"{server.url}/v1",
        api_key="none",
        messages=HELLO,
        tools=[TOOL],
        stream=stream,
        tool_choice={"type": "function", "function": {"name": "paint"}},
        max_tokens=200,
        num_retries=0,
    )
    answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "paint" and is_paint(json.loads(call.function.arguments))


def test_llama_index(server: Server) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.tools import FunctionTool

    def paint(color: str, fast: bool) -> str:
        """Paint the wall."""
        return f"{color} {fast}"

    model = module.OpenAILike(
        model=NAME, api_base=f"{server.url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_tokens=200, max_retries=0,
    )  # fmt: skip
    tool = FunctionTool.from_defaults(fn=paint, fn_schema=Paint)
    response = model.chat_with_tools([tool], user_msg="hi", tool_required=True)
    call, *_ = model.get_tool_calls_from_response(response)
    assert call.tool_name == "paint" and call.tool_kwargs["color"] in ("red", "blue")


def test_the_llm_tool(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    settings = f"- model_id: local\n  model_name: {NAME}\n  api_base: {server.url}/v1\n  supports_schema: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(settings)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "local",
        "hi",
        "-o",
        "max_tokens",
        "200",
        "--schema",
        json.dumps(PARAMETERS),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and is_paint(json.loads(result.stdout)), result.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_ollama(server: Server, stream: bool) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert [model.model for model in client.list().models] == [NAME] and "tools" in client.show(NAME).capabilities
    options = {"num_predict": 200, "seed": 1, "temperature": 0.5}
    answer = client.chat(NAME, HELLO, format=PARAMETERS, options=options, stream=stream)
    *parts, last = list(answer) if stream else [answer]
    text = "".join(part.message.content for part in [*parts, last])
    assert last.done and last.done_reason == "stop" and last.eval_count == len(text) and is_paint(json.loads(text))
    call = {"function": {"name": "paint", "arguments": {}}}
    result = {"role": "tool", "tool_name": "paint", "content": "done"}
    history = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    short = client.chat(f"{NAME}:latest", history, tools=[TOOL], options={"num_predict": 3})
    assert short.done_reason in ("length", "stop") and 1 <= short.eval_count <= 3 and short.total_duration > 0
    assert 1 <= client.generate(NAME, "hi", options={"num_predict": 3}).eval_count <= 3
    with pytest.raises(ollama.ResponseError, match="no model of that name"):
        client.chat("other", HELLO)


def test_a_coding_agent_edits_a_file(tmp_path: Path) -> None:
    """aider pins many packages: SMELT_AIDER names the executable of an environment of its own."""
    aider = os.environ.get("SMELT_AIDER") or shutil.which("aider")
    if aider is None:
        pytest.skip("needs aider (pip install aider-chat)")
    project = tmp_path / "project"
    project.mkdir()
    (project / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    edited = "def add(a, b):\n    return a + b\n"
    answer = f"Here is the corrected file.\n\ncalc.py\n```\n{edited}```\n"
    options = (
        *(
            "--model",
            f"openai/{NAME}",
            "--edit-format",
            "whole",
            "--message",
            "add must add",
            "calc.py",
            "--yes-always",
        ),
        *("--no-git", "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-pretty"),
        *("--no-auto-lint", "--map-tokens", "0"),
    )
    folder = write_tokenizer(tmp_path / "model", "plain")
    with scripted_server(folder, [answer, "add was corrected"]) as url:
        environment = {
            **os.environ, "HOME": str(tmp_path), "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": "",
        }  # fmt: skip
        result = subprocess.run(
            [aider, *options], env=environment, cwd=project, capture_output=True, text=True, timeout=300
        )
    assert result.returncode == 0 and (project / "calc.py").read_text() == edited, result.stdout + result.stderr


def test_a_load_generator(server: Server, model_folder: Path, tmp_path: Path) -> None:
    """vLLM's guidellm pins its packages too: SMELT_GUIDELLM names its executable."""
    guidellm = os.environ.get("SMELT_GUIDELLM") or shutil.which("guidellm")
    if guidellm is None:
        pytest.skip("needs guidellm (pip install guidellm)")
    options = (
        *("--target", server.url, "--processor", str(model_folder), "--data", "prompt_tokens=32,output_tokens=8"),
        *("--rate-type", "throughput", "--max-requests", "6", "--disable-progress"),
        *("--output-path", str(tmp_path / "report.json")),
    )
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    result = subprocess.run(
        [guidellm, "benchmark", *options], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"] and not requests["incomplete"]
    assert all(request["output_tokens"] == 8 for request in requests["successful"])
