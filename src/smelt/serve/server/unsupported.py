"""Refuse fields that would change the answer and are not supported, instead of ignoring them."""

from __future__ import annotations

from typing import Any

from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import GenerationRequest, extras

_REASONS = {
    "functions": "use tools, each with type function",
    "function_call": "use tool_choice",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "chat_template": "the chat template is the model's own and cannot be sent",
    "chat_template_kwargs": "the chat template is the model's own and takes no arguments",
    "prompt_embeds": "prompts are text or tokens; vectors cannot be sent",
    "suffix": "text cannot be inserted before a suffix",
    "bad_words": "bad words are not supported; use logit_bias",
    "truncate_prompt_tokens": "prompts are not cut; send a shorter one",
    "audio": "this server answers with text only",
    "mm_processor_kwargs": "this server reads text only",
}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


def check_supported(body: GenerationRequest) -> None:
    fields = extras(body)
    for name, reason in _REASONS.items():
        if fields.get(name) not in _EMPTY:
            raise ApiError(400, f"{name}: {reason}.", param=name, code="unsupported")
    modalities = fields.get("modalities")
    if modalities not in (None, ["text"]):
        raise ApiError(400, "modalities: this server answers with text only.", param="modalities", code="unsupported")
