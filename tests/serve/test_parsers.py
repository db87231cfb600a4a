"""Parsers of tool calls and reasoning: what each format says, the same for every split, and no text lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.errors import ConfigError
from smelt.serve.server.parsers import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputFormat,
    check_parser_names,
    select_format,
)
from smelt.serve.server.parsers.base import (
    MAX_DEPTH,
    CallArguments,
    CallStart,
    Content,
    JsonScanner,
    NotACallError,
    Part,
    Reasoning,
    ToolCallParser,
    merge_parts,
)
from smelt.serve.server.parsers.reasoning import ReasoningParser, ReasoningTags

FUNCTIONS = ("f", "get_weather")


def call(name: str, arguments: str = "{}") -> list[Part]:
    return [CallStart(name), CallArguments(arguments)]


WEATHER = call("get_weather", '{"city": "Köln"}')
WEATHER_JSON = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
F_JSON = '{"name": "f", "arguments": {}}'
UNKNOWN = '{"name": "rm", "arguments": {}}'
EXAMPLES: dict[str, list[tuple[str, list[Part]]]] = {
    "hermes": [
        (f"<tool_call>\n{WEATHER_JSON}\n</tool_call>", WEATHER),
        (
            f"Sure.\n<tool_call>{F_JSON}</tool_call>\n<tool_call>\n{WEATHER_JSON}\n</tool_call>\n",
            [Content("Sure."), *call("f"), *WEATHER],
        ),
        (
            '<tool_call>{"arguments": {"x": "</tool_call>"}, "name": "f"}</tool_call> done',
            [*call("f", '{"x": "</tool_call>"}'), Content(" done")],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', call("f", '{"a": "x\\ny"}')),
        (f"<tool_call>{UNKNOWN}</tool_call>", [Content(f"<tool_call>{UNKNOWN}</tool_call>")]),
        (f"<tool_call>{F_JSON}", [Content(f"<tool_call>{F_JSON}")]),
        (
            f"<tool_call>no <tool_call>{F_JSON}</tool_call>",
            [Content("<tool_call>no"), *call("f")],
        ),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [Content]),  # type: ignore[list-item]
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', [Content]),  # type: ignore[list-item]
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', [Content]),  # type: ignore[list-item]
        ("  a < b <tool", [Content("  a < b <tool")]),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
        ('<|python_tag|>{"name": "f", "parameters": {}}\n', call("f")),
        (
            '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
            [*call("f"), *call("get_weather")],
        ),
        ('{"name": "f", "parameters": {}}; and more', [*call("f"), Content("; and more")]),
        ('{"type": "function", "function": {"name": "f", "parameters": {}}}', call("f")),
        ('{"answer": 42}', [Content('{"answer": 42}')]),
        (f"Call {F_JSON}", [Content(f"Call {F_JSON}")]),
        ("<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{F_JSON}, {WEATHER_JSON}]", [*call("f"), *WEATHER]),
        (
            '[TOOL_CALLS]f[ARGS]{"a": [1, 2]}[TOOL_CALLS]get_weather[ARGS]{}',
            [*call("f", '{"a": [1, 2]}'), *call("get_weather")],
        ),
        ("Hm. [TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", [Content("Hm."), *call("f")]),
        (f"[TOOL_CALLS][{F_JSON}, {UNKNOWN}]", [Content(f"[TOOL_CALLS][{F_JSON}, {UNKNOWN}]")]),
        ("[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}", [Content("[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}")]),
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            [Reasoning("Need it."), *call("f", '{"a": 1}')],
        ),
        (
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
            call("f", '{"a": 1}'),
        ),
        (
            "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            [Reasoning("a < b"), Content("Yes.")],
        ),
        ("<|channel|>commentary<|message|>First.<|end|>", [Content("First.")]),
        ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", [Content("{}")]),
        ("<|channel|>commentary to=functions.f<|message|>{oops<|call|>", [Content("{oops")]),
        ("plain text", [Content("plain text")]),
    ],
    "json": [
        (
            f"Sure: {F_JSON} and [{F_JSON}, {WEATHER_JSON}]",
            [Content("Sure:"), *call("f"), Content(" and"), *call("f"), *WEATHER],
        ),
        (f"```json\n{F_JSON}\n```", call("f")),
        ('{\'a\': 1} {x} [1] ``` {"name": "f"', [Content('{\'a\': 1} {x} [1] ``` {"name": "f"')]),
        ('[]{"name": "f"}', [Content("[]"), *call("f")]),
    ],
}
CASES = [(name, text, expected) for name, examples in EXAMPLES.items() for text, expected in examples]


def parser(name: str, constrained: bool = False) -> ToolCallParser:
    return TOOL_CALL_PARSERS[name](FUNCTIONS, constrained)


def parse_pieces(parser: ToolCallParser | ReasoningParser, pieces: list[str]) -> list[Part]:
    return merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=lambda value: str(value)[:50])
def test_examples_of_every_format_at_every_split(name: str, text: str, expected: list[Part]) -> None:
    expected = [Content(text)] if expected == [Content] else expected
    assert parser(name).parse(text) == expected
    for split in range(len(text) + 1):
        assert parse_pieces(parser(name), [text[:split], text[split:]]) == expected
    assert parse_pieces(parser(name), list(text)) == expected


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "f",
        "<|python_tag|>",
        "<|channel|>",
        "final",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|call|>",
        "commentary to=functions.f ",
        "analysis",
        "```",
        "json",
        F_JSON,
        "[",
        "]",
        "{",
        "}",
        '"',
        ":",
        ",",
        "\\",
        ";",
        " ",
        "\n",
        "<",
        "|",
        "1",
        "null",
        '"name": "f"',
        "é",
        WEATHER_JSON,
    ]
)


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_texts_are_parsed_the_same_however_they_are_split(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(PIECES, max_size=25)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts = parser(name).parse(text)
    assert parse_pieces(parser(name), pieces) == parts == parse_pieces(parser(name), list(text))
    for part in parts:
        if isinstance(part, CallArguments):
            assert isinstance(json.loads(part.text), dict)
    if name != "openai":  # without functions there is no call, so that all of the text is content
        assert TOOL_CALL_PARSERS[name](()).parse(text) == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", [*EXAMPLES, "mistral_args"])
def test_constrained_calls_are_emitted_as_they_arrive(name: str) -> None:
    syntax = TOOL_CALL_PARSERS[name].syntax
    arguments = '{"city": "K} \\"]<", "n": [1, {}]}'
    body = [
        syntax.before_name + called + syntax.before_arguments + arguments + syntax.after_arguments
        for called in FUNCTIONS
    ]
    count = 1 if syntax.separator is None else 2
    text = syntax.opening + (syntax.separator or "").join(body[:count]) + syntax.closing
    expected = [part for called in FUNCTIONS[:count] for part in call(called, arguments)]
    for split in range(len(text) + 1):
        assert parse_pieces(parser(name, constrained=True), [text[:split], text[split:]]) == expected
    assert parser(name).parse(text)[0] == CallStart("f")  # the same calls are found without the grammar
    cut = text[: text.index('"n"')]
    streamed = parser(name, constrained=True)
    early = merge_parts([part for character in cut for part in streamed.feed(character)])
    assert early == call("f", arguments[: arguments.index('"n"')])  # nothing is held back
    assert not any(isinstance(part, Content) for part in streamed.finish())


TAGS = ReasoningTags()
REASONING_EXAMPLES = [
    ("<think>\nHm.\n</think>\n\nYes. ", False, [Reasoning("Hm."), Content("Yes. ")]),
    ("Hm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Content("Yes.")]),
    ("<think>Hm.</think>Yes.", True, [Reasoning("Hm."), Content("Yes.")]),
    (" Yes <think>no</think>", False, [Content(" Yes <think>no</think>")]),
    ("<think>\n\n</think>\n\nYes.", False, [Content("Yes.")]),
    ("Still thinking </thi", True, [Reasoning("Still thinking </thi")]),
    ("<thin", False, [Content("<thin")]),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), REASONING_EXAMPLES)
def test_reasoning_at_every_split(text: str, is_open: bool, expected: list[Part]) -> None:
    for split in range(len(text) + 1):
        assert parse_pieces(ReasoningParser(TAGS, is_open), [text[:split], text[split:]]) == expected


def test_the_prompt_tells_whether_reasoning_is_open() -> None:
    assert TAGS.is_open("<|assistant|><think>\n") and not TAGS.is_open("<|assistant|>")
    assert not TAGS.is_open("<think>\n\n</think>\n\n") and not TAGS.is_open("say <think> now\nassistant:")
    implied = REASONING_PARSERS["deepseek_r1"]
    assert implied.is_open("<|assistant|>") and not implied.is_open("<|assistant|><think>\n\n</think>\n\n")


def test_calls_after_reasoning() -> None:
    output = OutputFormat(TOOL_CALL_PARSERS["hermes"], TAGS).parser(FUNCTIONS, "<think>")
    text = f"A <tool_call>{F_JSON}</tool_call>?</think>\n\n<tool_call>{F_JSON}</tool_call>"
    parts = merge_parts([part for character in text for part in output.feed(character)] + output.finish())
    assert parts == [Reasoning(f"A <tool_call>{F_JSON}</tool_call>?"), *call("f")]
    no_tools = OutputFormat(TOOL_CALL_PARSERS["hermes"], None).parser((), "")
    assert no_tools.feed(text) == [Content(text)] and no_tools.finish() == []


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    ),
    indent=st.sampled_from([None, 2]),
    rest=st.text(max_size=5),
)
def test_the_scanner_finds_the_end_of_json(value: object, indent: int | None, rest: str) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=False)
    scanner = JsonScanner()
    assert scanner.feed(text + rest, 0) == len(text) and scanner.done


@pytest.mark.parametrize(
    "text", ['{"a"}', "{a", '{"a": }', "[1,]", "[01]", "[+1]", "[}", '{"a": 1,}', "[nul]", '"a"', "1", "[1 2]"]
)
def test_the_scanner_refuses_what_is_no_json(text: str) -> None:
    with pytest.raises(NotACallError):
        JsonScanner().feed(text, 0)


def test_deep_json_is_refused() -> None:
    with pytest.raises(NotACallError):
        JsonScanner().feed("[" * (MAX_DEPTH + 1), 0)


TEMPLATES = {
    "{% if tools %}<tool_call>{% endif %}": "hermes",
    "{{ tools }}[TOOL_CALLS]": "mistral",
    "{{ tools }}[TOOL_CALLS][ARGS]": "mistral_args",
    "{{ tools }}<|python_tag|>": "llama3_json",
    "{{ tools }}<|start|><|channel|><|message|>": "openai",
    "{{ tools }}": "json",
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_chat_template_tells_the_format(template: str, name: str) -> None:
    chosen = select_format(template, {"<tool_call>": 7, "other": 8})
    assert chosen.calls is TOOL_CALL_PARSERS[name] and chosen.template_has_tools and chosen.reasoning is None
    assert chosen.tokens == ({"<tool_call>": 7} if name == "hermes" else {})


def test_names_override_the_template() -> None:
    template = "{% if x %}{{ raise_exception('no tools') }}{% endif %}<think></think>tools"
    chosen = select_format(template, {})
    assert chosen.calls is TOOL_CALL_PARSERS["json"] and chosen.reasoning == TAGS and not chosen.template_has_tools
    named = select_format(template, {}, "mistral", "none")
    assert named.calls is TOOL_CALL_PARSERS["mistral"] and named.reasoning is None
    assert select_format(template, {}, "none").calls is None
    for names in (("xml", "auto"), ("auto", "xml")):
        with pytest.raises(ConfigError, match="choose auto, none"):
            check_parser_names(*names)
    check_parser_names("hermes", "qwen3")
