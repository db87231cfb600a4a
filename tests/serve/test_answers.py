"""Contents of responses: transformers' tokens, the same text streamed or not, counts, seeds, stops, logprobs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from smelt.serve.engine.request import Request, RequestId
from smelt.serve.engine.sampler import sample as sample_tokens
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.stream import sse_event
from tests.serve.server_process import NAME, Server, language_model, read_events, tokenizer

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def network() -> Any:
    return language_model()


@pytest.fixture(scope="module")
def http(server: Server) -> Any:
    with httpx.Client(base_url=server.url, timeout=300) as connected:
        yield connected


def stream_choices(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Assemble the choices of a stream, and return them with the usage."""
    with http.stream("POST", path, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read_events(answer)
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        (part,) = event["choices"]
        choice = choices.setdefault(part["index"], {"text": "", "finish_reason": None, "logprobs": [], "token_ids": []})
        assert choice["finish_reason"] is None  # nothing follows the end
        choice["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
        choice["finish_reason"] = part["finish_reason"]
        choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs", [])
        choice["token_ids"] += part.get("token_ids", [])
    return [choices[index] for index in sorted(choices)], events[-1]["usage"]


@pytest.mark.parametrize("prompt", ["hello", "the quick brown fox " * 4, "über 語 🙂"])
def test_greedy_tokens_match_transformers(server: Server, prompt: str) -> None:
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    with torch.no_grad():
        expected = (
            network().generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        )
    (choice,) = server.complete(prompt, max_tokens=24, return_token_ids=True)["choices"]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == ids[0].tolist()
    by_tokens = server.complete(ids[0].tolist(), max_tokens=24)["choices"][0]
    assert by_tokens["text"] == choice["text"]


def plain(text: str) -> str:
    """Keep only single-byte characters; random bytes between them can be decoded in more than one way."""
    return "".join(letter for letter in text if letter.isascii())


SETTINGS = st.fixed_dictionaries(
    {"prompt": st.text(alphabet="ab é語🙂", min_size=1, max_size=12), "max_tokens": st.integers(1, 40)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "n": st.integers(1, 3),
        "stop": st.lists(st.text(alphabet="abcdefgenrst \ufffd", min_size=1, max_size=2), min_size=1, max_size=4),
        "include_stop_str_in_output": st.booleans(),
        "logprobs": st.integers(0, 2),
        "top_p": st.sampled_from([0.5, 0.9]),
        "repetition_penalty": st.sampled_from([1.1, 0.9]),
        "frequency_penalty": st.sampled_from([-1.0, 1.0]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.just(1),
    },
)


ROUNDING = 1e-5  # log-probabilities of one token in two batches agree within this (float32)


def is_tie(body: dict[str, Any], sample: int, first: list[int], second: list[int]) -> bool:
    """Return whether two answers diverge at a draw that rounding errors of the logits can decide either way."""
    position = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    if position is None:
        return False
    prompt = tokenizer()(body["prompt"])["input_ids"]
    names = ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "min_tokens")
    sampling = SamplingParams(**{name: body[name] for name in names if name in body})
    tokens = prompt + first[:position]
    request = Request(RequestId("tie"), prompt, sampling, limit=2**30, seed=body["seed"] + sample, tokens=tokens)
    with torch.no_grad():
        logits = network()(torch.tensor([tokens])).logits[0, -1]
    rows = logits + ROUNDING * (2 * torch.rand(256, len(logits)) - 1)
    return {first[position], second[position]} <= set(
        sample_tokens(rows, [request] * len(rows), (256,)).tokens.tolist()
    )


@FEW
@given(body=SETTINGS, seed=st.integers(0, 2**62))
def test_streaming_does_not_change_the_answer(http: httpx.Client, body: dict[str, Any], seed: int) -> None:
    body = {**body, "seed": seed, "return_token_ids": True}
    complete = http.post("/v1/completions", json=body).json()
    choices, usage = stream_choices(http, "/v1/completions", body)
    # The second request may run with another batch size and on a cached prompt: its logits differ in their last bits.
    token_pairs = [
        (part["token_ids"], choice["token_ids"]) for part, choice in zip(choices, complete["choices"], strict=True)
    ]
    assume(not any(is_tie(body, sample, *pair) for sample, pair in enumerate(token_pairs)))
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in complete["choices"]]
    assert [choice["token_ids"] for choice in choices] == [choice["token_ids"] for choice in complete["choices"]]
    for part, choice in zip(choices, complete["choices"], strict=True):
        assert part["finish_reason"] == choice["finish_reason"]
        logprobs = (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        assert part["logprobs"] == pytest.approx(logprobs, abs=ROUNDING)
        if "stop" not in body:
            decoded = tokenizer().decode(choice["token_ids"], skip_special_tokens=True)
            assert plain(choice["text"]) == plain(decoded)
        if not body.get("include_stop_str_in_output"):
            assert not any(stop in choice["text"] for stop in body.get("stop", []))
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    assert usage["completion_tokens"] == complete["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == len(tokenizer()(body["prompt"])["input_ids"])


def test_a_tie_is_distinguished_from_a_different_answer() -> None:
    body = {"prompt": "hello", "temperature": 0, "seed": 0}
    ids = torch.tensor([tokenizer()("hello")["input_ids"]])
    with torch.no_grad():
        best, second = network()(ids).logits[0, -1].topk(2).indices.tolist()
    assert not is_tie(body, 0, [best], [best]) and not is_tie(body, 0, [best], [second])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.ROUNDING", 10.0)
        assert is_tie(body, 0, [best], [second])


def test_a_stop_string_ends_the_answer_before_it_and_in_the_engine(server: Server, http: httpx.Client) -> None:
    body = {"prompt": "hello", "seed": 11, "max_tokens": 400, "ignore_eos": True}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    position = next(
        position for position in range(20, len(text)) if text.index(text[position : position + 2]) == position
    )
    stop = text[position : position + 2]
    before = server.state()["generated_tokens"]
    answer = http.post("/v1/completions", json={**body, "stop": stop}).json()
    assert answer["choices"][0]["text"] == text[:position] and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 400
    assert server.state()["generated_tokens"] - before == answer["usage"]["completion_tokens"]
    kept = http.post("/v1/completions", json={**body, "stop": [stop], "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == text[: position + 2]
    server.wait_until_idle()


def test_stop_tokens_logit_bias_and_eos(server: Server) -> None:
    plain = server.complete(max_tokens=10, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    forced = server.complete(max_tokens=4, logit_bias={"65": 100}, return_token_ids=True)["choices"][0]
    assert forced["token_ids"] == [65] * 4
    letter = forced["text"][0]
    flushed = server.complete(max_tokens=4, logit_bias={"65": 100}, stop=[letter * 2 + "!", letter * 5])["choices"][0]
    assert (
        flushed["text"] == letter * 4 and flushed["finish_reason"] == "length"
    )  # held-back text is flushed at the end
    stopped = server.complete(max_tokens=10, ignore_eos=True, stop_token_ids=[plain[3]], return_token_ids=True)
    (choice,) = stopped["choices"]
    assert choice["token_ids"] == plain[: plain.index(plain[3]) + 1] and choice["finish_reason"] == "stop"
    ended = server.complete(max_tokens=10, logit_bias={"256": 100})
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["choices"][0]["text"] == ""
    assert ended["usage"]["completion_tokens"] == 1
    later = server.complete(max_tokens=10, logit_bias={"256": 100}, min_tokens=6)
    assert later["usage"]["completion_tokens"] == 7
    assert server.complete(max_tokens=9, logit_bias={"256": 100}, ignore_eos=True)["usage"]["completion_tokens"] == 9


def test_several_prompts_and_echo(server: Server) -> None:
    prompts = ["hello", "other", "hello"]
    result = server.complete(prompts, max_tokens=5, n=2, echo=True)
    assert [choice["index"] for choice in result["choices"]] == list(range(6))
    for index, choice in enumerate(result["choices"]):
        alone = server.complete(prompts[index // 2], max_tokens=5)["choices"][0]["text"]
        assert choice["text"] == prompts[index // 2] + alone
    assert result["usage"]["prompt_tokens"] == 15 and result["usage"]["completion_tokens"] == 30
    ids = [tokenizer()(prompt)["input_ids"] for prompt in prompts]
    assert [echoed["text"] for echoed in server.complete(ids, max_tokens=5, n=2, echo=True)["choices"]] == [
        echoed["text"] for echoed in result["choices"]
    ]


def test_logprobs_match_the_network(server: Server) -> None:
    prompt = tokenizer()("hello")["input_ids"]
    (choice,) = server.complete("hello", max_tokens=5, logprobs=2, return_token_ids=True)["choices"]
    with torch.no_grad():
        logits = network()(torch.tensor([prompt + choice["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_each_salt_has_its_own_prefix_cache(server: Server) -> None:
    prompt = "a prompt that nobody else in this file has, long enough for blocks " * 2

    def cached(**more: Any) -> int:
        result: int = server.complete(prompt, max_tokens=1, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return result

    assert cached() == 0
    assert cached() >= 96
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") >= 96


def test_chat_streams_every_sample_with_continuous_usage(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 3, "max_tokens": 8}
    complete = http.post("/v1/chat/completions", json=body).json()
    choices, usage = stream_choices(http, "/v1/chat/completions", body)
    assert [choice["text"] for choice in choices] == [choice["message"]["content"] for choice in complete["choices"]]
    assert usage == complete["usage"] | {"prompt_tokens_details": usage["prompt_tokens_details"]}
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with http.stream("POST", "/v1/chat/completions", json={**body, **options}) as answer:
        counts = [event["usage"]["completion_tokens"] for event in read_events(answer)]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, usage["completion_tokens"])
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    with http.stream("POST", "/v1/chat/completions", json={**body, **options}) as answer:
        assert not any("usage" in event for event in read_events(answer))


def test_token_ids_of_a_chat_and_fields_nobody_asked_for(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2}
    prompt = http.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
    body |= {"return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == prompt and len(answer["choices"][1]["token_ids"]) == 3
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        events = read_events(stream)
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    plain = http.post("/v1/chat/completions", json={**body, "return_token_ids": False}).json()
    assert plain["prompt_logprobs"] is plain["prompt_token_ids"] is plain["choices"][0]["token_ids"] is None
    choice = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()["choices"][0]
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is choice["token_ids"] is None


def test_tokenize_and_detokenize(server: Server) -> None:
    tokenized = server.post("/tokenize", {"prompt": "über", "return_token_strs": True}).json()
    assert tokenized["tokens"] == tokenizer()("über")["input_ids"] and tokenized["count"] == 5
    assert tokenized["token_strs"] == tokenizer().convert_ids_to_tokens(tokenized["tokens"])
    assert server.post("/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": "über"}
    pieces = server.post("/tokenize", {"content": "üb", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == [[0xC3], [0xBC], "b"]
    assert [piece["id"] for piece in pieces] == tokenized["tokens"][:3]
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "user: x\nassistant:"
    rendered = server.post("/apply-template", {"messages": [{"role": "user", "content": "x"}]})
    assert rendered.json() == {"prompt": "user: x\nassistant:"}
    assert server.get("/version").json()["version"] and server.get("/v1/models").json()["data"][0]["id"] == NAME


def test_routes_without_their_version(server: Server) -> None:
    """For clients whose base URL is the server itself."""
    assert server.get("/models").json() == server.get("/v1/models").json()
    assert server.get(f"/models/{NAME}").json()["id"] == NAME
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for path, body in (("/completions", {"prompt": "x", "max_tokens": 2}), ("/chat/completions", chat)):
        assert server.post(path, body).json()["object"] == server.post(f"/v1{path}", body).json()["object"]
    assert server.post("/responses", {"input": "x", "max_output_tokens": 2}).json()["object"] == "response"
    assert "is a language model" in server.post("/embeddings", {"input": "x"}).text


def test_a_template_that_refuses(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "developer", "content": "secret words"}]})
    assert answer.status_code == 400 and "order of roles: developer" in answer.text and "secret" not in answer.text


def test_an_event_is_one_line_to_every_reader_of_lines() -> None:
    text = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x11000))))
    line, end = sse_event({"text": text}).decode().splitlines()
    assert end == "" and json.loads(line.removeprefix("data: ")) == {"text": text}
