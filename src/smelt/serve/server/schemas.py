"""What requests look like. Fields that do not exist are ignored, as OpenAI does; values are not converted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from smelt.serve.engine.sampling_params import MOST_BIASES, MOST_LOGPROBS, MOST_SAMPLES, MOST_STOPS

MOST_PROMPTS = 256
MOST_MESSAGES = 2048
MOST_STOP_CHARACTERS = 512
INT64 = 2**63 - 1


def _whole_characters(text: str) -> str:
    """JSON can spell halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a character is no text") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
Stop = Annotated[Text, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Strict):
    """What both ways to generate share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_BIASES),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class CompletionRequest(Generation):
    prompt: Text | Tokens | Texts | TokenLists
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None


class Part(Strict):
    type: str
    text: Text | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


class EmbeddingRequest(Strict):
    model: str | None = None
    input: Text | Tokens | Texts | TokenLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


FIELDS: frozenset[str] = frozenset(
    name
    for schema in (CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest, Message, Part)
    for name in (*schema.model_fields, "include_usage", "continuous_usage_stats")
)


def extras(schema: Strict) -> dict[str, Any]:
    """Fields that a client sent and the schema does not know."""
    return schema.model_extra or {}
