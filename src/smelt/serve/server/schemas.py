"""Request schemas. Values are not converted; what becomes of other fields is said in `unsupported.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from smelt.serve.engine.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOPS,
)

MAX_PROMPTS = 256
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_STOP_CHARACTERS = 512
INT64 = 2**63 - 1


def _complete_characters(text: str) -> str:
    """Refuse lone surrogates, which JSON can spell but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text contains half of a character") from None
    return text


Text = Annotated[str, AfterValidator(_complete_characters)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


def example(**fields: Any) -> ConfigDict:
    """Return a configuration with an example of a request, which the page of the API shows."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # in every chunk; with include_usage only, as in vLLM


class GenerationRequest(StrictModel):
    """Fields that completions and chat completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: (
        Annotated[list[Annotated[Text, Field(min_length=1, max_length=64)]], Field(max_length=MAX_BAD_WORDS)] | None
    ) = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer, by the newer or the older name of the field."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    model_config = example(prompt="Water is", max_tokens=32, temperature=0)
    prompt: Text | Tokens | Texts | TokenLists
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


class ContentPart(StrictModel):
    type: str
    text: Text | None = None


class FunctionCall(StrictModel):
    name: Text
    arguments: Text | dict[str, Any]  # JSON; some clients send the object


class ToolCall(StrictModel):
    id: Annotated[Text, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None


class Function(StrictModel):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    name: FunctionName


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest):
    model_config = example(messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64)
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None  # begin the answer with the last message, if it is of the assistant
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class EmbeddingRequest(StrictModel):
    model_config = example(input=["a first text", "a second one"])
    model: str | None = None
    input: Text | Tokens | Texts | TokenLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    user: str | None = None


class TokenizeRequest(StrictModel):
    model_config = example(prompt="Water is", return_token_strs=True)
    model: str | None = None
    prompt: Text | None = None
    content: Text | None = None  # llama.cpp's prompt, with special tokens if add_special
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Literal[True] | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    model_config = example(tokens=[10, 20, 30])
    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


FIELDS: set[str] = set()  # the names of all fields, which an error may mention


def register_fields(*schemas: type[StrictModel]) -> None:
    """Let errors mention the fields of these schemas."""
    FIELDS.update(name for schema in schemas for name in schema.model_fields)


register_fields(
    CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest, StreamOptions, ChatMessage,
    ContentPart, ToolCall, FunctionCall, Tool, Function, NamedToolChoice,
)  # fmt: skip


def extras(schema: StrictModel) -> dict[str, Any]:
    """Return the fields of a request that its schema does not know."""
    return schema.model_extra or {}
