"""Structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and llama.cpp's `json_schema`."""

from __future__ import annotations

import json
from typing import Any

from smelt.errors import SmeltError
from smelt.serve.engine.sampling_params import StructuredOutputParams
from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import GenerationRequest, extras

_CONSTRAINTS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
MAX_CHOICES = 256


def parse_structured_output(body: GenerationRequest) -> StructuredOutputParams | None:
    """Return the constraint that a request asks for, if any; the engine compiles it."""
    fields = extras(body)
    try:
        options = [
            _response_format(fields.get("response_format")), _structured(fields.get("structured_outputs")),
            _schema("json_schema", fields.get("json_schema")),
        ]  # fmt: skip
        constraints = [constraint for constraint in options if constraint is not None]
    except SmeltError as error:
        raise ApiError(400, str(error), param="response_format") from error
    if len(constraints) > 1:
        message = "response_format, structured_outputs and json_schema: use only one of them."
        raise ApiError(400, message, param="response_format")
    return constraints[0] if constraints else None


def _response_format(content: Any) -> StructuredOutputParams | None:
    if content is None:
        return None
    format_type = content.get("type") if isinstance(content, dict) else None
    if format_type == "text":
        return None
    if format_type == "json_object":  # with a schema in Mistral's, Together's and llama.cpp's APIs
        return _schema("response_format", content.get("schema")) or StructuredOutputParams("json")
    if format_type == "json_schema":
        described = content.get("json_schema", content)
        constraint = _schema("response_format", described.get("schema") if isinstance(described, dict) else None)
        if constraint is None:
            raise _invalid("response_format", "json_schema requires an object `schema`")
        return constraint
    raise _invalid("response_format", "its type must be text, json_object or json_schema")


def _schema(param: str, schema: Any) -> StructuredOutputParams | None:
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise _invalid(param, "the schema must be an object")
    return StructuredOutputParams("schema", json.dumps(schema))


def _structured(content: Any) -> StructuredOutputParams | None:
    if content is None:
        return None
    fields = {key: value for key, value in content.items() if value is not None} if isinstance(content, dict) else {}
    if len(fields) != 1 or next(iter(fields)) not in _CONSTRAINTS:
        raise _invalid("structured_outputs", f"give exactly one of {', '.join(_CONSTRAINTS)}")
    name, value = next(iter(fields.items()))
    if name == "choice":
        return _choice(value)
    if name == "json":
        value = value if isinstance(value, str) else json.dumps(value)
    if not isinstance(value, str):
        raise _invalid("structured_outputs", f"{name} must be a string")
    return StructuredOutputParams(_CONSTRAINTS[name], value)


def _choice(value: Any) -> StructuredOutputParams:
    in_range = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not in_range or not all(isinstance(each, str) and each for each in value):
        raise _invalid("structured_outputs", f"choice must be a list of 1 to {MAX_CHOICES} strings")
    return StructuredOutputParams("grammar", "start: " + " | ".join(json.dumps(each) for each in value))


def _invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param}: {problem}.", param=param)
