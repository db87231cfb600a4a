"""Structured output from the engine: whatever the network prefers, the output matches the format; impossible formats
are refused.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from smelt.errors import RequestError
from smelt.models.model import Model
from smelt.serve.engine import structured_output
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams, StructuredOutputParams
from tests.serve.test_detokenizer import byte_tokenizer
from tests.tiny import DECODER

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    torch.manual_seed(0)
    config = LlamaConfig(**{**DECODER, "vocab_size": 300, "max_position_embeddings": 512}, eos_token_id=256)
    return Engine(Model(LlamaForCausalLM(config).eval(), tokenizer), block_size=8, kv_cache_bytes=10**7)


def answer(engine: Engine, constraint: StructuredOutputParams, **more: Any) -> list[str]:
    sampling = SamplingParams(**{"max_tokens": 300, "seed": 1, **more}, structured_output=constraint)
    outputs = engine.generate(["write: "], sampling)
    assert all(output.reason == "stop" for output in outputs), [output.text for output in outputs]
    return [output.text for output in outputs]


def test_a_constraint_is_compiled_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, constraint = engine.grammar_compiler, StructuredOutputParams("regex", "[ab]{3}")
    assert compiler.cached_matcher(constraint) is None
    first = answer(engine, constraint)
    monkeypatch.setattr(compiler, "_compile", lambda _: pytest.fail("compiled again"))
    assert answer(engine, StructuredOutputParams("regex", "[ab]{3}")) == first
    assert compiler.cached_matcher(constraint) is not None


def test_the_oldest_grammars_are_dropped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "MAX_CACHED_GRAMMARS", 2)
    constraints = [StructuredOutputParams("regex", pattern) for pattern in ("a{2}", "a{3}", "a{4}")]
    for constraint in (*constraints[:2], constraints[0], constraints[2]):
        engine.grammar_compiler.matcher(constraint)
    found = [engine.grammar_compiler.cached_matcher(constraint) is not None for constraint in constraints]
    assert found == [True, False, True]


@pytest.mark.parametrize("constraint", [("schema", '{"$ref": "#"}'), ("regex", r"[^\s\S]")])
def test_what_no_answer_satisfies_is_refused(engine: Engine, constraint: tuple[str, str]) -> None:
    with pytest.raises(RequestError, match=r"no answer satisfies|cannot be followed"):
        engine.submit([1], SamplingParams(structured_output=StructuredOutputParams(*constraint)))
    assert not engine.busy


def test_an_answer_that_cannot_be_completed_is_an_error(engine: Engine) -> None:
    with pytest.raises(RequestError, match="too complex"):
        answer(engine, StructuredOutputParams("regex", "(((a{50,200}){50,200}){50,200}){50,200}"), n=2)
    assert not engine.busy and engine.state()["blocks_used"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_schema(engine: Engine, temperature: float) -> None:
    for text in answer(engine, StructuredOutputParams("schema", json.dumps(SCHEMA)), temperature=temperature, n=3):
        result = json.loads(text)
        assert list(result) == ["name", "age", "tags"] and 0 <= result["age"] <= 130 and len(result["name"]) <= 8
        assert set(result["tags"]) <= {"red", "green"} and len(result["tags"]) <= 2


def test_a_regular_expression(engine: Engine) -> None:
    pattern = r"[a-f]{3}-[0-9]+(é|ü)"
    texts = answer(engine, StructuredOutputParams("regex", pattern), n=4, temperature=2.0)
    assert all(re.fullmatch(pattern, text) for text in texts) and len(set(texts)) > 1


def test_a_grammar(engine: Engine) -> None:
    lark = 'start: "yes" | "no" | start_more\nstart_more: "maybe" (" maybe")*'
    assert all(
        re.fullmatch("yes|no|maybe( maybe)*", text)
        for text in answer(engine, StructuredOutputParams("grammar", lark), n=4)
    )


def test_any_json_object(engine: Engine) -> None:
    request = engine.submit(
        [5, 6], SamplingParams(max_tokens=60, seed=2, structured_output=StructuredOutputParams("json"))
    )[0]
    while engine.busy:
        engine.step()
    assert engine.model.tokenizer is not None
    text = engine.model.tokenizer.decode(request.output, skip_special_tokens=True)
    assert text.lstrip().startswith("{")
    if request.reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_beside_unconstrained_answers_and_after_preemption(engine: Engine) -> None:
    free = engine.submit([7, 8, 9], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))[0]
    alone = engine.submit([7, 8, 9], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))[0]
    constrained = engine.submit(
        [7, 8, 9], SamplingParams(max_tokens=50, seed=4, structured_output=StructuredOutputParams("regex", "[xyz]{20}"))
    )[0]
    preempted = False
    while engine.busy:
        engine.step()
        if len(constrained.output) == 7 and not preempted:
            preempted = True
            step = engine.scheduler.schedule()  # as if blocks had run out
            engine.scheduler._preempt(constrained, step)
            engine._read(engine.runner.launch(type(step)([p for p in step.chunks if p.request is not constrained])))
            constrained.num_inflight = 0
    assert preempted and free.output == alone.output and constrained.preemptions == 1
    assert engine.model.tokenizer is not None
    assert re.fullmatch("[xyz]{20}", engine.model.tokenizer.decode(constrained.output, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (("schema", "{"), "not a JSON schema"),
        (("schema", '{"type": "nothing"}'), "cannot be followed"),
        (("schema", '{"$ref": "https://example.com/x.json"}'), "cannot be followed"),
        (("regex", "(unclosed"), "cannot be followed"),
        (("grammar", "no rules at all ::="), "cannot be followed"),
        (("xml", ""), "there is no structured output 'xml'"),
        (("regex", "a" * 70_000), "the length of a structured output"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_impossible_formats(engine: Engine, constraint: tuple[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        engine.submit([5], SamplingParams(structured_output=StructuredOutputParams(*constraint)))
    assert "\n" not in str(raised.value) and not engine.busy


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutputParams("regex", "((a{1,500}){1,500}){1,500}"),
        StructuredOutputParams("regex", "(a|aa|aaa)*(b|bb|ab)*" * 200),
        StructuredOutputParams(
            "schema", json.dumps({"anyOf": [{"type": "array", "minItems": 9999, "maxItems": 10**6}] * 50})
        ),
        StructuredOutputParams("schema", '{"type": "array", "items": ' * 500 + "{}" + "}" * 500),
    ],
    ids=["nested counts", "ambiguous", "large arrays", "deep"],
)
def test_pathological_formats_take_bounded_time(engine: Engine, constraint: StructuredOutputParams) -> None:
    start = time.perf_counter()
    with contextlib.suppress(RequestError):
        engine.submit([5], SamplingParams(max_tokens=3, structured_output=constraint))
    while engine.busy:
        engine.step()
    assert time.perf_counter() - start < 10


def test_sampling_parameters_survive_json() -> None:
    from dataclasses import asdict

    sampling = SamplingParams(
        stop=("a",),
        stop_token_ids=(3,),
        logit_bias={4: 1.5},
        structured_output=StructuredOutputParams("regex", "a+"),
        seed=3,
    )
    assert SamplingParams.from_json(json.loads(json.dumps(asdict(sampling)))) == sampling
