"""Log-probabilities of prompts match transformers' log-softmax: alone, in a batch, in chunks, with the prefix cache and
after preemption, in every runner that has a complete KV cache."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from smelt.errors import RequestError
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.kvcache.streaming.infinipot import InfiniPot
from smelt.models.model import Model
from smelt.serve.engine import scheduler
from smelt.serve.engine.engine import Engine, RequestOutput
from smelt.serve.engine.prompt_logprobs import PromptLogprob
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampling_params import SamplingParams
from tests.character_tokenizer import character_tokenizer
from tests.serve.server_process import Server, language_model, read_events, tokenizer
from tests.serve.test_engine import GREEDY, SMALL, expected, prompts
from tests.trained import sentences, trained_llama

TOP = 3
WANTED = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=TOP)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return copy.deepcopy(trained_llama(sentences(400)))


def reference(network: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Return transformers' log-probabilities of the tokens after each one, [tokens - 1, vocabulary]."""
    with torch.no_grad():
        return network(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


def check(found: list[PromptLogprob], expected_logprobs: torch.Tensor, prompt: list[int]) -> None:
    assert len(found) == len(prompt) - 1
    own = expected_logprobs.gather(-1, torch.tensor(prompt[1:])[:, None])
    assert torch.allclose(torch.tensor([each.own for each in found]), own[:, 0], atol=1e-4, rtol=0)
    assert [each.rank for each in found] == (expected_logprobs >= own).sum(-1).tolist()
    values, tokens = expected_logprobs.topk(TOP, dim=-1)
    assert [[token for token, _ in each.top] for each in found] == tokens.tolist()
    top = torch.tensor([[value for _, value in each.top] for each in found])
    assert torch.allclose(top, values, atol=1e-4, rtol=0)


def run(engine: Engine, texts: list[list[int]], *others: list[int]) -> list[list[PromptLogprob]]:
    """Return the log-probabilities of texts, beside other requests that want none; check the answers, too."""
    requests = [engine.submit(text, WANTED)[0] for text in texts]
    rest = [engine.submit(text, GREEDY)[0] for text in others]
    found: dict[Request, list[PromptLogprob]] = {request: [] for request in (*requests, *rest)}
    while engine.busy:
        for event in engine.step():
            found[event.request] += event.prompt_logprobs
    assert not any(found[request] for request in rest)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    return [found[request] for request in requests]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 5}, {"max_num_batched_tokens": 7}])
def test_log_probabilities_match_transformers(llama: PreTrainedModel, compiled: bool, settings: dict[str, Any]) -> None:
    engine = Engine(Model(copy.deepcopy(llama)), **SMALL, **settings, compiled=compiled)
    for _ in range(2):  # the second time, all blocks of these prompts are in the prefix cache
        for prompt, found in zip(prompts(), run(engine, prompts(), *prompts(4, seed=1)), strict=True):
            check(found, reference(llama, prompt), prompt)
    assert run(engine, [[7]]) == [[]]


def test_answers_are_the_same_with_log_probabilities_of_the_prompt(llama: PreTrainedModel) -> None:
    engine = Engine(Model(copy.deepcopy(llama)), **SMALL)
    requests = [engine.submit(prompt, dataclasses.replace(GREEDY, prompt_logprobs=0))[0] for prompt in prompts()]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == [expected(llama, prompt) for prompt in prompts()]


def test_a_step_computes_few_logits_of_prompts(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory: several long prompts share the rows of a step, and the others wait."""
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGITS", 8)
    engine = Engine(Model(copy.deepcopy(llama)), **SMALL)
    launch, counts = engine.runner.launch, []

    def counting_launch(batch: Any) -> Any:
        counts.append(sum(chunk.count for chunk in batch.chunks if chunk.request.wants_prompt_logits))
        return launch(batch)

    monkeypatch.setattr(engine.runner, "launch", counting_launch)
    for prompt, found in zip(prompts(), run(engine, prompts()), strict=True):
        check(found, reference(llama, prompt), prompt)
    assert max(counts) <= 8 + len(prompts())  # and the last tokens of prompts, which sample


def test_log_probabilities_are_reported_once_after_a_preemption(llama: PreTrainedModel) -> None:
    """Few blocks: requests are preempted while their prompts are computed in chunks, and start again."""
    settings = {**SMALL, "kv_cache_bytes": 24 * 4 * 2 * 2 * 64 * 4, "prefill_chunk_size": 3, "max_num_seqs": 8}
    engine = Engine(Model(copy.deepcopy(llama)), **settings)
    texts = [prompt + prompt for prompt in prompts(8, seed=2)]
    sampling = dataclasses.replace(WANTED, max_tokens=30)
    requests = [engine.submit(text, sampling)[0] for text in texts]
    found: dict[Request, list[PromptLogprob]] = {request: [] for request in requests}
    while engine.busy:
        for event in engine.step():
            found[event.request] += event.prompt_logprobs
    assert engine.state()["preemptions"]
    for request, text in zip(requests, texts, strict=True):
        check(found[request], reference(llama, text), text)


def test_networks_with_a_cache_of_their_own() -> None:
    torch.manual_seed(0)
    network = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)).eval()
    engine = Engine(Model(copy.deepcopy(network)), **SMALL)
    assert engine.backend == "eager, cache of the network's own"
    for prompt, found in zip(prompts(), run(engine, prompts(), *prompts(2, seed=1)), strict=True):
        check(found, reference(network, prompt), prompt)


def generate(engine: Engine, prompt: list[int], **sampling: Any) -> list[RequestOutput]:
    return engine.generate([prompt], SamplingParams(temperature=0, ignore_eos=True, **sampling))


def test_an_answer_of_no_tokens_ends_with_the_prompt(llama: PreTrainedModel) -> None:
    network = copy.deepcopy(llama)
    engine = Engine(Model(network, tokenizer=character_tokenizer()), **SMALL)
    prompt = prompts()[0]
    for wanted in (None, TOP):
        output = generate(engine, prompt, max_tokens=0, prompt_logprobs=wanted)[0]
        assert (output.tokens, output.text, output.reason) == ([], "", "length")
    check(output.prompt_logprobs, reference(llama, prompt), prompt)
    assert engine.state()["generated_tokens"] == 0 and engine.pool.num_free_blocks == engine.pool.num_blocks


def test_samples_of_one_prompt_compute_it_once(llama: PreTrainedModel) -> None:
    engine = Engine(Model(copy.deepcopy(llama), tokenizer=character_tokenizer()), **SMALL)
    prompt = prompts()[0]
    outputs = generate(engine, prompt, max_tokens=2, n=3, prompt_logprobs=TOP)
    check(outputs[0].prompt_logprobs, reference(llama, prompt), prompt)
    assert [len(output.prompt_logprobs) for output in outputs[1:]] == [0, 0]
    assert outputs[1].cached_tokens > 0


def test_a_bounded_cache_has_no_log_probabilities_of_prompts(llama: PreTrainedModel) -> None:
    cap = BoundedCacheConfig(32, method=InfiniPot(prompt="abc"))
    model = Model(copy.deepcopy(llama), tokenizer=character_tokenizer())
    engine = Engine(model, kv_token_cap=cap, block_size=4, kv_cache_bytes=10**7)
    with pytest.raises(RequestError, match="need a complete KV cache"):
        engine.submit(prompts()[0], WANTED)


TEXT = "a small test é"  # one token per byte


def test_echo_returns_the_log_probabilities_of_the_prompt(server: Server) -> None:
    prompt = tokenizer()(TEXT)["input_ids"]
    logprobs = reference(language_model(), prompt)
    own = logprobs.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    for content in (TEXT, prompt, [prompt]):
        for max_tokens in (0, 1):
            fields = {"max_tokens": max_tokens, "echo": True, "logprobs": 1, "ignore_eos": True}
            choice = server.complete(content, **fields)["choices"][0]
            found = choice["logprobs"]
            assert choice["finish_reason"] == "length"
            assert choice["text"].startswith(TEXT) and (choice["text"] == TEXT or max_tokens)
            assert {len(values) for values in found.values()} == {len(prompt) + max_tokens}
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert found["tokens"][:2] == ["a", " "] and found["text_offset"][:3] == [0, 1, 2]
            assert found["token_logprobs"][1 : len(prompt)] == pytest.approx(own.tolist(), abs=1e-4)
            best = [max(top.values()) for top in found["top_logprobs"][1 : len(prompt)]]
            assert best == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4)
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(
        max(choice["logprobs"]["top_logprobs"][-1].values())
    )


def test_a_stream_begins_with_the_log_probabilities_of_an_echo(server: Server) -> None:
    body = {"prompt": [TEXT, "b"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 3, "seed": 1, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()["choices"]
    with server.http.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as response:
        events = read_events(response)
    for choice in whole:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            joined = [value for part in parts for value in part["logprobs"][name]]
            assert joined == values if name in ("tokens", "text_offset") else len(joined) == len(values)


def test_prompt_logprobs_have_the_shape_of_vllm(server: Server) -> None:
    prompt = tokenizer()(TEXT)["input_ids"]
    logprobs = reference(language_model(), prompt)
    for count in (0, TOP):
        choices = server.complete(TEXT, max_tokens=0, prompt_logprobs=count, n=2)["choices"]
        assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
        first, *rest = choices[0]["prompt_logprobs"]
        assert first is None and len(rest) == len(prompt) - 1
        for position, entries in enumerate(rest):
            own = logprobs[position, prompt[position + 1]]
            rank = int((logprobs[position] >= own).sum())
            entry = entries[str(prompt[position + 1])]
            assert entry["logprob"] == pytest.approx(float(own), abs=1e-4) and entry["rank"] == rank
            assert len(entries) == count + (rank > count)
            ranks = {entry["rank"]: int(token) for token, entry in entries.items()}
            assert [ranks[each + 1] for each in range(count)] == logprobs[position].topk(count).indices.tolist()
    assert rest[0][str(prompt[1])]["decoded_token"] == " "
    both = server.complete(TEXT, max_tokens=0, prompt_logprobs=1, echo=True, logprobs=4)["choices"][0]
    assert max(map(len, both["prompt_logprobs"][1:])) <= 2 and max(map(len, both["logprobs"]["top_logprobs"][1:])) >= 4
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0, "prompt_logprobs": 1}
    chat = server.post("/v1/chat/completions", body).json()
    assert chat["choices"][0]["message"]["content"] == "" and chat["usage"]["completion_tokens"] == 0
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["prompt_logprobs"][0] is None


def test_the_tokenizer_is_described(server: Server) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<end>" and info["chat_template"].endswith("assistant:")
