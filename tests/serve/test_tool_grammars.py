"""Grammars of tool calls and of answers after reasoning: random answers that they allow are what was asked for."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from smelt.errors import RequestError
from smelt.serve.engine.sampling_params import SamplingParams, StructuredOutputParams
from smelt.serve.engine.structured_output import GrammarCompiler
from smelt.serve.server.chat_generation import ChatAnswer
from smelt.serve.server.errors import ApiError
from smelt.serve.server.parsers import TOOL_CALL_PARSERS, OutputFormat, select_format
from smelt.serve.server.schemas import ChatRequest
from smelt.serve.server.tokenization import AsyncTokenizer
from smelt.serve.server.tools import ChatTools, constrain, parse_tools
from tests.serve.server_process import tokenizer

pytest.importorskip("llguidance")
COLOR = {"type": "string", "enum": ["red", "blue"]}
PAINT = {"type": "object", "properties": {"color": COLOR}, "required": ["color"], "additionalProperties": False}
COUNT: dict[str, Any] = {"type": "object", "properties": {"count": {"type": "boolean"}}, "required": ["count"]}
COUNT["additionalProperties"] = False
SCHEMAS = {"paint": PAINT, "paint_all": COUNT, "stop": None}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields})


def output_format(name: str, markers_are_tokens: bool, reasoning: str = "none") -> tuple[OutputFormat, AsyncTokenizer]:
    """Return a format with a tokenizer to which its markers are special tokens, or text."""
    bytewise = tokenizer()
    if markers_are_tokens:
        special = [*TOOL_CALL_PARSERS[name].markers, "<think>", "</think>"]
        bytewise.add_special_tokens({"additional_special_tokens": special})
    tokens = AsyncTokenizer(bytewise, 4096)
    return select_format("", tokens.added_tokens, name, reasoning), tokens


def random_answer(tokens: AsyncTokenizer, constraint: StructuredOutputParams, markers: Any, seed: int) -> str:
    """Return the text of random tokens that a grammar allows. Where any text is, it soon writes what ends reasoning."""
    draw, vocab_size = random.Random(seed), len(tokens.tokenizer)
    matcher = GrammarCompiler(tokens.tokenizer, vocab_size, (256,)).matcher(constraint)
    endings = [tokens.tokenizer(text)["input_ids"] for text in ("</think>", "<|end|>")]
    ids: list[int] = []
    while not matcher.is_terminated and 256 not in ids:
        assert len(ids) < 1000
        allowed = matcher.token_mask().nonzero()[:, 0].tolist()
        free = len(allowed) > 100 and draw.random() < 0.3
        for token in draw.choice(endings) if free else [draw.choice(allowed)]:
            if not matcher.token_mask()[token]:
                break
            ids.append(token)
            matcher.accept_token(token)
            assert not matcher.error, matcher.error
    return tokens.detokenizer([], [], markers=markers).update(ids, "stop").text


def parse_answer(chosen: OutputFormat, tools: ChatTools, prompt: str, text: str) -> ChatAnswer:
    answer, parser = ChatAnswer(), chosen.parser(tools.names, prompt, tools.forced)
    for part in parser.feed(text) + parser.finish():
        answer.add(part)
    return answer


@pytest.mark.parametrize("markers_are_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_args", "openai", "json"])
def test_required_calls_follow_the_schemas(name: str, markers_are_tokens: bool) -> None:
    chosen, tokens = output_format(name, markers_are_tokens)
    names: set[str] = set()
    counts: set[int] = set()
    for seed in range(24):
        tools = parse_tools(request(tool_choice="required", parallel_tool_calls=seed % 2 == 0), chosen)
        sampling = constrain(SamplingParams(), tools, chosen, "")
        assert sampling.structured_output is not None
        text = random_answer(tokens, sampling.structured_output, chosen.tokens.values(), seed)
        answer = parse_answer(chosen, tools, "", text)
        assert answer.calls and not answer.content, text
        assert seed % 2 == 0 or len(answer.calls) == 1
        for call in answer.calls:
            arguments = json.loads(call.arguments)
            expected = {"paint": ({"color": "red"}, {"color": "blue"}), "stop": ({},)}
            assert arguments in expected.get(call.name, ({"count": True}, {"count": False})), text
            names.add(call.name)
        counts.add(len(answer.calls))
        free = parse_answer(chosen, ChatTools(tools.functions, []), "", text)  # without trust in the grammar
        assert [(call.name, call.arguments) for call in free.calls] == [
            (call.name, call.arguments) for call in answer.calls
        ]
    assert names == {"paint", "paint_all", "stop"}
    assert name in ("llama3_json", "openai") or len(counts) > 1


def test_a_named_function_is_the_only_one() -> None:
    chosen, tokens = output_format("hermes", True)
    for seed in range(4):
        tools = parse_tools(request(tool_choice={"type": "function", "function": {"name": "paint_all"}}), chosen)
        constraint = constrain(SamplingParams(), tools, chosen, "").structured_output
        assert constraint is not None and len(tools.tools) == 3
        answer = parse_answer(chosen, tools, "", random_answer(tokens, constraint, chosen.tokens.values(), seed))
        assert [call.name for call in answer.calls] == ["paint_all"]


@pytest.mark.parametrize("markers_are_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", ["hermes", "openai"])
@pytest.mark.parametrize(
    "constraint",
    [StructuredOutputParams("schema", json.dumps(PAINT)), StructuredOutputParams("regex", "[xy]{3}/z"),
     StructuredOutputParams("grammar", 'start: item "!"\nitem: "x" | "y"'), None],
    ids=["schema", "regex", "grammar", "calls"],
)  # fmt: skip
def test_a_constraint_holds_after_the_reasoning(
    name: str, markers_are_tokens: bool, constraint: StructuredOutputParams | None
) -> None:
    reasoning = "none" if name == "openai" else "qwen3"
    chosen, tokens = output_format(name, markers_are_tokens, reasoning)
    patterns = {"schema": ('{"color": "red"}', '{"color": "blue"}'), "grammar": ("x!", "y!")}
    reasoned = set()
    for seed in range(10):
        prompt = "<think>\n" if seed % 2 and name == "hermes" else ""
        body = request(tool_choice="required") if constraint is None else request(tools=None)
        tools = parse_tools(body, chosen)
        sampling = constrain(SamplingParams(structured_output=constraint), tools, chosen, prompt)
        assert sampling.structured_output is not None
        text = random_answer(tokens, sampling.structured_output, chosen.tokens.values(), seed)
        answer = parse_answer(chosen, tools, prompt, text)
        if constraint is None:
            assert answer.calls and not answer.content
        elif constraint.type == "regex":
            assert len(answer.content) == 5 and set(answer.content[:3]) <= {"x", "y"} and answer.content[3:] == "/z", (
                text
            )
        else:
            assert answer.content in patterns[constraint.type], text
        reasoned.add(bool(answer.reasoning))
    assert any(reasoned), "the grammar lets no answer reason"


def test_structured_output_or_a_call() -> None:
    chosen, tokens = output_format("hermes", False)
    constraint = StructuredOutputParams("schema", json.dumps(PAINT))
    tools = parse_tools(request(), chosen)
    combined = constrain(SamplingParams(structured_output=constraint), tools, chosen, "").structured_output
    assert combined is not None
    answers = [parse_answer(chosen, tools, "", random_answer(tokens, combined, (), seed)) for seed in range(12)]
    assert {bool(answer.calls) for answer in answers} == {True, False}
    assert all(
        bool(answer.calls) != (answer.content in ('{"color": "red"}', '{"color": "blue"}')) for answer in answers
    )
    plain, _ = output_format("json", False)
    with pytest.raises(ApiError, match="cannot be told"):
        constrain(SamplingParams(structured_output=constraint), parse_tools(request(), plain), plain, "")


def test_without_reasoning_a_constraint_stays_as_it_is() -> None:
    chosen, _ = output_format("json", False)
    sampling = SamplingParams(structured_output=StructuredOutputParams("regex", "a"))
    assert constrain(sampling, parse_tools(request(tools=None), chosen), chosen, "") is sampling
    assert constrain(SamplingParams(), parse_tools(request(), chosen), chosen, "").structured_output is None


def test_a_schema_that_no_grammar_has() -> None:
    chosen, tokens = output_format("hermes", False)
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    constraint = constrain(
        SamplingParams(), parse_tools(request(tools=tools, tool_choice="required"), chosen), chosen, ""
    ).structured_output
    assert constraint is not None
    with pytest.raises(RequestError):
        GrammarCompiler(tokens.tokenizer, 257, (256,)).matcher(constraint)
