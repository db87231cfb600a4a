"""Tools and reasoning of a chat request: what the chat template gets, and which grammar constrains the answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smelt.serve.engine.sampling_params import SamplingParams, StructuredOutputParams
from smelt.serve.server.errors import ApiError
from smelt.serve.server.parsers import OutputFormat
from smelt.serve.server.parsers.base import ToolCallParser
from smelt.serve.server.parsers.grammar import NO_ARGUMENTS, GrammarBuilder
from smelt.serve.server.parsers.mistral import MistralParser
from smelt.serve.server.schemas import ChatMessage, ChatRequest, NamedToolChoice, Tool, ToolCall

_JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MISTRAL_ID_LENGTH = 9  # which Mistral's templates require


@dataclass(frozen=True)
class ChatTools:
    """The tools that an answer may call. `forced`: it must, and its calls are constrained by a grammar."""

    functions: Mapping[str, Any]  # schemas of the arguments by name
    tools: Sequence[dict[str, Any]]  # as the chat template gets them
    forced: bool = False
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return list(self.functions)


def parse_tools(body: ChatRequest, output_format: OutputFormat) -> ChatTools:
    """Check the tools of a request and its choice among them."""
    tools, choice = body.tools or [], body.tool_choice
    for index, tool in enumerate(tools):
        _check_characters(tool.function.parameters, f"tools.{index}.function.parameters")
        _check_schema(tool.function.parameters, f"tools.{index}.function.parameters")
    if len({tool.function.name for tool in tools}) < len(tools):
        raise ApiError(400, "tools: two functions have the same name.", param="tools")
    if choice not in (None, "none", "auto") and not tools:
        raise ApiError(400, "tool_choice: the request has no tools to choose from.", param="tool_choice")
    if choice == "none":
        tools = []
    forced = choice == "required" or isinstance(choice, NamedToolChoice)
    callable_tools = tools
    if isinstance(choice, NamedToolChoice):
        callable_tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not callable_tools:
            raise ApiError(400, "tool_choice: none of the tools has this name.", param="tool_choice")
    if forced and output_format.calls is None:
        message = "tool_choice: this server was started with --tool-call-parser none, so it finds no calls."
        raise ApiError(400, message, param="tool_choice", code="unsupported")
    functions = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in callable_tools}
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    return ChatTools(functions, [_template_tool(tool) for tool in tools], forced, parallel)


def _check_characters(value: Any, param: str) -> None:
    """Refuse lone surrogates, which JSON can spell but no tokenizer accepts."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ApiError(400, f"{param}: the text contains half of a character.", param=param) from None


def _check_schema(schema: Any, param: str, depth: int = 0) -> None:
    """Refuse a schema with an unknown type; a grammar finds the rest once the calls are constrained."""
    if depth > 64:
        raise ApiError(400, f"{param}: the schema is nested too deeply.", param=param)
    if isinstance(schema, list):
        for item in schema:
            _check_schema(item, param, depth + 1)
    if not isinstance(schema, dict):
        return
    if depth == 0 and schema.get("type", "object") != "object":
        raise ApiError(400, f"{param}: the type of a function's parameters must be object.", param=param)
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types if isinstance(types, list) else []:
        if name not in _JSON_TYPES:
            raise ApiError(400, f"{param}: a type must be one of {', '.join(_JSON_TYPES)}.", param=param)
    for key, item in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(item, dict):
            for inner in item.values():  # whose names may be anything, even `type`
                _check_schema(inner, param, depth + 1)
        elif key not in ("type", "const", "enum", "default", "examples"):
            _check_schema(item, param, depth + 1)


def _template_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def template_messages(messages: Sequence[ChatMessage], tools: ChatTools, output: OutputFormat) -> list[dict[str, Any]]:
    """Return the messages as the chat template gets them. If it knows no tools, they become text."""
    rendered = [_template_message(message, index, output) for index, message in enumerate(messages)]
    if output.template_has_tools:
        return rendered
    if output.calls is not None:
        rendered = [_plain_message(message, output.calls) for message in rendered]
    if tools.tools and output.calls is not None:
        system = rendered.pop(0)["content"] + "\n\n" if rendered[0]["role"] in ("system", "developer") else ""
        rendered.insert(0, {"role": "system", "content": system + describe_tools(tools, output.calls)})
    return rendered


def describe_tools(tools: ChatTools, calls: type[ToolCallParser]) -> str:
    """Describe the tools to a model whose chat template does not."""
    syntax = calls.syntax
    example = syntax.before_name + "NAME" + syntax.before_arguments + "{...}" + syntax.after_arguments
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools.tools]
    return "\n".join(
        [
            "You can call these functions, given as JSON with the schemas of their arguments:",
            *lines,
            f"To call a function, answer with nothing but {syntax.opening}{example}{syntax.closing}",
        ]
    )


def _template_message(message: ChatMessage, index: int, output: OutputFormat) -> dict[str, Any]:
    param = f"messages.{index}"
    role = "system" if message.role == "developer" and not output.template_has_developer else message.role
    rendered: dict[str, Any] = {"role": role, "content": message_text(message, index)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, f"{param}: only messages of the assistant have tool_calls.", param=param)
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call, f"{param}.tool_calls.{i}", output)
                                  for i, call in enumerate(message.tool_calls)]  # fmt: skip
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ApiError(400, f"{param}: a message of a tool needs tool_call_id.", param=f"{param}.tool_call_id")
        rendered["tool_call_id"] = _template_id(message.tool_call_id, output)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        rendered["reasoning_content"] = reasoning
        if output.is_harmony and not rendered["content"]:  # its template accepts only one of them
            rendered["thinking"] = reasoning
    return rendered


def message_text(message: ChatMessage, index: int) -> str:
    param = f"messages.{index}"
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    if any(part.type not in ("text", "refusal") or (part.type == "text" and part.text is None) for part in parts):
        raise ApiError(400, f"{param}: this server reads text only.", param=param, code="unsupported")
    return "".join(part.text or "" for part in parts)


def _template_call(call: ToolCall, param: str, output: OutputFormat) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates expect them."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ApiError(400, f"{param}: the arguments are not valid JSON.", param=param) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{param}: the arguments must be a JSON object.", param=param)
    _check_characters(arguments, param)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": _template_id(call.id or "", output), "type": "function", "function": function}


def _template_id(call_id: str, output: OutputFormat) -> str:
    """Return the id of a call for the template. Mistral's raise an error unless it has nine letters and digits."""
    valid = len(call_id) == _MISTRAL_ID_LENGTH and call_id.isalnum()
    if output.calls is None or not issubclass(output.calls, MistralParser) or valid:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID_LENGTH]


def _plain_message(message: dict[str, Any], calls: type[ToolCallParser]) -> dict[str, Any]:
    """Write the calls and results of tools as text, for a template that knows no tools."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the function: {message['content']}"}
    syntax = calls.syntax
    texts = [
        syntax.before_name + call["function"]["name"] + syntax.before_arguments
        + json.dumps(call["function"]["arguments"], ensure_ascii=False) + syntax.after_arguments
        for call in message.pop("tool_calls", [])
    ]  # fmt: skip
    if texts:
        written = syntax.opening + (syntax.separator or "\n").join(texts) + syntax.closing
        message["content"] = "\n".join(filter(None, (message["content"], written)))
    return message


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """Return the variables by which templates control the reasoning."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort not in ("none", "minimal")
        variables = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    return variables


def constrain(sampling: SamplingParams, tools: ChatTools, output: OutputFormat, prompt: str) -> SamplingParams:
    """Add the grammar of forced calls, and let structured output follow the reasoning."""
    content = sampling.structured_output
    grammar = GrammarBuilder(output.tokens)
    if tools.forced and output.calls is not None:
        if content is not None:
            message = (
                "response_format cannot be combined with a tool_choice that requires a call; leave out one of them."
            )
            raise ApiError(400, message, param="response_format")
        body = grammar.calls(output.calls.syntax, tools.functions, tools.parallel)
    elif content is not None:
        body = _content_rule(grammar, content, tools, output)
    else:
        return sampling
    start = " ".join(filter(None, (_reasoning_rule(grammar, output, prompt), body)))
    if start == "content" and content is not None:
        return sampling
    return replace(sampling, structured_output=grammar.build(start))


def _content_rule(
    grammar: GrammarBuilder, content: StructuredOutputParams, tools: ChatTools, output: OutputFormat
) -> str:
    rule = grammar.constraint(content)
    if output.is_harmony:
        rule = f"{grammar.literal('<|channel|>final<|message|>')} {rule}"
    if not tools.functions or output.calls is None:
        return rule
    syntax = output.calls.syntax
    if syntax.trigger.startswith("{"):
        message = (
            "response_format and tools: this model writes calls as JSON, so that they cannot be told from the answer; "
            "leave out one of them, or require a call with tool_choice."
        )
        raise ApiError(400, message, param="response_format", code="unsupported")
    return grammar.rule("answer", f"{rule} | {grammar.calls(syntax, tools.functions, tools.parallel)}")


def _reasoning_rule(grammar: GrammarBuilder, output: OutputFormat, prompt: str) -> str:
    if output.is_harmony:
        return grammar.analysis()
    return grammar.reasoning(output.reasoning, output.reasoning.is_open(prompt)) if output.reasoning else ""
