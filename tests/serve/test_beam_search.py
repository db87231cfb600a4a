"""Beam search returns transformers' beams: by the engine for several settings, and by the server."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smelt.errors import RequestError
from smelt.models.model import Model
from smelt.serve.engine.beam_search import Beam, BeamSearch, BeamSearchParams
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.server_process import Server, language_model, tokenizer
from tests.serve.test_engine import SMALL, prompts
from tests.trained import sentences, trained_llama

END = 23  # a likely token: searches end at different lengths


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    network = copy.deepcopy(trained_llama(sentences(400)))
    network.generation_config.eos_token_id = END
    return network


def expected(network: PreTrainedModel, prompt: list[int], width: int, **settings: Any) -> list[tuple[list[int], float]]:
    """Return transformers' answers, up to the end token, with their scores."""
    with torch.no_grad():
        output = network.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **settings,
        )  # fmt: skip
    answers = [row[len(prompt) :].tolist() for row in output.sequences]
    eos = network.generation_config.eos_token_id
    cut = [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in answers]
    return list(zip(cut, output.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize(
    "settings",
    [{}, {"length_penalty": 0.0}, {"length_penalty": 2.0, "early_stopping": "never"}, {"early_stopping": True}],
    ids=str,
)
def test_beams_match_transformers(llama: PreTrainedModel, width: int, settings: dict[str, Any]) -> None:
    reference = [
        expected(llama, prompt, width, max_new_tokens=10, **({"early_stopping": False} | settings))
        for prompt in prompts(4)
    ]
    engine = Engine(Model(copy.deepcopy(llama)), **SMALL)
    assert engine.runner.eos_token_ids == (END,)
    found = engine.beam_search(prompts(4), BeamSearchParams(width, 10, **settings))
    for beams, answers in zip(found, reference, strict=True):
        assert [list(beam.tokens) for beam in beams] == [answer for answer, _ in answers]
        assert [beam.score for beam in beams] == pytest.approx([score for _, score in answers], abs=1e-4)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def test_one_beam_is_greedy(llama: PreTrainedModel) -> None:
    engine = Engine(Model(copy.deepcopy(llama)), **SMALL)
    found = engine.beam_search(prompts(4), BeamSearchParams(1, 10))
    greedy = [engine.submit(prompt, SamplingParams(max_tokens=10, temperature=0))[0] for prompt in prompts(4)]
    while engine.busy:
        engine.step()
    assert [list(beams[0].tokens) for beams in found] == [request.output for request in greedy]


def test_the_searches_end_in_all_ways(llama: PreTrainedModel) -> None:
    """The test above would prove little if no answer ended before the limit."""
    engine = Engine(Model(copy.deepcopy(llama)), **SMALL)
    beams = [beam for found in engine.beam_search(prompts(4), BeamSearchParams(3, 10)) for beam in found]
    assert {beam.reason for beam in beams} == {"stop", "length"}
    assert len({len(beam.tokens) for beam in beams if beam.reason == "stop"}) > 1


def test_a_search_of_two_steps_by_hand() -> None:
    search = BeamSearch(BeamSearchParams(2, 2, length_penalty=0.0), ())
    search.advance([[(7, -1.0), (8, -1.5), (9, -4.0), (6, -5.0)]])
    assert search.running == [Beam((7,), -1.0), Beam((8,), -1.5)] and not search.done
    search.advance([[(1, -3.0), (2, -3.5)], [(1, -0.5), (2, -4.0)]])
    assert search.done
    assert search.finished == [Beam((8, 1), -2.0, "length"), Beam((7, 1), -4.0, "length")]


@pytest.mark.parametrize(("early_stopping", "done"), [(True, True), (False, True), ("never", False)])
def test_a_search_ends_when_no_beam_can_improve(early_stopping: Any, done: bool) -> None:
    """The running beam is worse now, and would be better if its four further tokens were certain."""
    search = BeamSearch(BeamSearchParams(1, 5, early_stopping=early_stopping), [0])
    search.advance([[(0, -0.1), (7, -0.3)]])
    assert search.finished == [Beam((0,), -0.1, "stop")] and search.done == done


def test_a_width_out_of_range_is_refused() -> None:
    for width in (0, 17):
        with pytest.raises(RequestError, match="between 1 and 16"):
            BeamSearchParams(width, 4)


def test_the_server_searches_as_transformers_does(server: Server) -> None:
    network, text_tokenizer = language_model(), tokenizer()
    texts = ["hello", "a longer text"]
    body = {"use_beam_search": True, "n": 3, "max_tokens": 6, "return_token_ids": True}
    choices = server.complete(texts, **body, length_penalty=0.5)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for index, text in enumerate(texts):
        prompt = text_tokenizer(text)["input_ids"]
        answers = expected(network, prompt, 3, max_new_tokens=6, length_penalty=0.5)
        own = choices[3 * index : 3 * index + 3]
        assert [choice["token_ids"] for choice in own] == [tokens for tokens, _ in answers]
        assert own[0]["text"] == text_tokenizer.decode(answers[0][0], skip_special_tokens=True)
        assert {choice["finish_reason"] for choice in own} <= {"length", "stop"}
    again = server.complete(texts, **body, length_penalty=0.5, temperature=1)["choices"]
    assert again == choices
    chat = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2, "max_tokens": 3}
    found = server.post("/v1/chat/completions", chat).json()
    assert len(found["choices"]) == 2 and found["usage"]["completion_tokens"] == 6
    server.wait_until_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stop": "x"},
        {"temperature": 0.5},
        {"logprobs": 1},
        {"n": 17},
        {"best_of": 5},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_what_beam_search_cannot_do_is_refused(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": "hello", "use_beam_search": True, "n": 2, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(fields))


def test_best_of_returns_the_most_likely_answers(server: Server) -> None:
    body = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "logprobs": 0, "ignore_eos": True}
    everything = server.complete(["hello", "b"], n=6, **body)["choices"]
    best = server.complete(["hello", "b"], n=2, best_of=6, **body)
    for prompt in range(2):
        ranked = sorted(
            everything[6 * prompt : 6 * prompt + 6], key=lambda each: -sum(each["logprobs"]["token_logprobs"])
        )
        own = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in own] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == 2 * 6 * 5
    del body["logprobs"]
    silent = server.complete("hello", n=1, best_of=6, **body)["choices"][0]
    assert silent["text"] == best["choices"][0]["text"] and silent["logprobs"] is None
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}):
        response = server.post("/v1/completions", {"prompt": "hello", **wrong})
        assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"
