"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any

from smelt.errors import SmeltError
from smelt.serve.engine.sampling_params import StructuredOutputParams
from smelt.serve.engine.structured_output import check_structured_output
from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import GenerationRequest, extras

_KINDS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
MAX_CHOICES = 256


def structured_output_of(body: GenerationRequest) -> StructuredOutputParams | None:
    """Return the constraint that a request asks for, if any."""
    fields = extras(body)
    try:
        formats = [_response_format(fields.get("response_format")), _structured(fields.get("structured_outputs"))]
        for form in formats:
            if form is not None:
                check_structured_output(form)
    except SmeltError as error:
        raise ApiError(400, str(error), param="response_format") from error
    wanted = [form for form in formats if form is not None]
    if len(wanted) > 1:
        raise ApiError(400, "response_format and structured_outputs: use only one of them.", param="response_format")
    return wanted[0] if wanted else None


def _response_format(asked: Any) -> StructuredOutputParams | None:
    if asked is None:
        return None
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputParams("json")
    if kind == "json_schema":
        described = asked.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise _invalid("response_format", "json_schema requires an object `schema`")
        return StructuredOutputParams("schema", json.dumps(schema))
    raise _invalid("response_format", "its type must be text, json_object or json_schema")


def _structured(asked: Any) -> StructuredOutputParams | None:
    if asked is None:
        return None
    given = {key: value for key, value in asked.items() if value is not None} if isinstance(asked, dict) else {}
    if len(given) != 1 or next(iter(given)) not in _KINDS:
        raise _invalid("structured_outputs", f"give exactly one of {', '.join(_KINDS)}")
    name, value = next(iter(given.items()))
    if name == "choice":
        return _choice(value)
    if name == "json":
        value = value if isinstance(value, str) else json.dumps(value)
    if not isinstance(value, str):
        raise _invalid("structured_outputs", f"{name} must be a text")
    return StructuredOutputParams(_KINDS[name], value)


def _choice(value: Any) -> StructuredOutputParams:
    texts = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES and all(isinstance(each, str) for each in value)
    if not texts or not all(value):
        raise _invalid("structured_outputs", f"choice must be a list of 1 to {MAX_CHOICES} texts")
    return StructuredOutputParams("grammar", "start: " + " | ".join(json.dumps(each) for each in value))


def _invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param}: {problem}.", param=param)
