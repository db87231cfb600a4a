"""The official OpenAI client, unmodified."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.serve.conftest import KEYS
from tests.serve.server_process import NAME, Server, tokenizer

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}
HELLO: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "smelt"
    with pytest.raises(openai.NotFoundError, match="serves tiny"):
        client.models.retrieve("other")


def test_completions(client: openai.OpenAI) -> None:
    complete = client.completions.create(prompt="hello", max_tokens=12, **GREEDY)
    (choice,) = complete.choices
    assert choice.finish_reason == "length" and choice.text and complete.object == "text_completion"
    assert complete.usage is not None
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens, complete.usage.total_tokens) == (5, 12, 17)
    stream = client.completions.create(
        prompt="hello", max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "length" and last.choices == []
    assert last.usage is not None and last.usage.total_tokens == 17


def test_chat(client: openai.OpenAI) -> None:
    complete = client.chat.completions.create(messages=HELLO, max_completion_tokens=9, **GREEDY)
    (choice,) = complete.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert complete.usage is not None and complete.usage.completion_tokens == 9
    rendered = "system: be brief\nuser: hello\nassistant:"
    assert complete.usage.prompt_tokens == len(tokenizer()(rendered)["input_ids"])
    parts: Any = [{"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]}]
    same = client.chat.completions.create(messages=parts + HELLO[1:], max_completion_tokens=9, **GREEDY)
    assert same.choices[0].message.content == choice.message.content
    stream = client.chat.completions.create(
        messages=HELLO, max_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    first, *chunks, last = stream
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage is not None and last.usage.completion_tokens == 9


def test_samples_are_identified_by_their_index(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "n": 3, "seed": 5, "max_tokens": 20}
    complete = client.chat.completions.create(messages=HELLO, **settings)
    texts = [choice.message.content for choice in complete.choices]
    assert [choice.index for choice in complete.choices] == [0, 1, 2] and len(set(texts)) == 3
    streamed, order = ["", "", ""], []
    for chunk in client.chat.completions.create(messages=HELLO, stream=True, **settings):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        order.append(choice.index)
    assert streamed == texts
    assert order != sorted(order)  # they are interleaved


def test_async(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=10,
            stream=True,
            seed=number,
            model=NAME,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            batched = await asyncio.gather(*(ask(client, number) for number in range(16)))
            return list(batched), [await ask(client, number) for number in range(16)]

    batched, alone = asyncio.run(main())
    assert batched == alone and len(set(alone)) > 8


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 4
    for entry in logprobs.content:
        assert (
            entry.logprob == max(candidate.logprob for candidate in entry.top_logprobs) and len(entry.top_logprobs) == 3
        )
        assert entry.bytes is not None and len(entry.bytes) == 1  # one token per byte
    completion = client.completions.create(prompt="hello", max_tokens=4, logprobs=2, **GREEDY)
    completion_logprobs = completion.choices[0].logprobs
    assert (
        completion_logprobs is not None
        and completion_logprobs.tokens is not None
        and completion_logprobs.token_logprobs is not None
    )
    assert (
        len(completion_logprobs.tokens) == len(completion_logprobs.token_logprobs) == 4
        and completion_logprobs.text_offset is not None
    )
    assert completion_logprobs.text_offset[0] == 0 and completion_logprobs.text_offset == sorted(
        completion_logprobs.text_offset
    )


def test_errors(client: openai.OpenAI, server: Server, keyed: Server) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model=NAME, prompt="x", temperature=1000)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=NAME, input="x")
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError):
            other.models.list()
        assert len(list(other.with_options(api_key=KEYS[1]).models.list())) == 1
