"""Refuse fields that would change the answer and are not supported, and fields that no client is known to send.

A field that is neither in a schema nor in a table below is a 400: it is a misspelling, or asks for something that this
server would silently not do. Neutral values, which clients send without being asked, are accepted.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import GenerationRequest, StrictModel, extras

# Fields that do not change an answer here: of OpenAI, vLLM, llama.cpp, and of clients and gateways.
_HARMLESS = frozenset({
    "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
    "parallel_tool_calls", "reasoning_effort", "response_format", "structured_outputs",
    "json_schema", "guided_decoding_backend", "cache_prompt", "id_slot", "slot_id", "return_progress",
    "timings_per_token", "n_keep", "n_indent", "repeat_last_n", "dynatemp_exponent", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau", "mirostat_eta", "draft_model",
    "ttl", "keep_alive", "chat_id", "session_id", "spaces_between_special_tokens",  # the last: of slow tokenizers
})  # fmt: skip

_TOOLS = "tools are for chat completions"
_STRUCTURED = "use structured_outputs"
_SAMPLING = "this way of sampling is not supported"
_TEXT_ONLY = "this server reads and writes text only"

# Why a field is not supported; accepted if it is empty, zero or false.
_UNSUPPORTED = {
    "tools": _TOOLS,
    "functions": "use tools, each with type function",
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_whitespace_pattern": _STRUCTURED,
    "structural_tag": _STRUCTURED,
    "grammar": _STRUCTURED,
    "chat_template": "the chat template is the model's own and cannot be sent",
    "documents": "the chat template gets no documents; write them into a message",
    "prompt_embeds": "prompts are text or tokens; vectors cannot be sent",
    "suffix": "text cannot be inserted before a suffix",
    "audio": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
    "multimodal_data": _TEXT_ONLY,
    "image_data": _TEXT_ONLY,
    "store": "nothing is stored here",
    "web_search_options": "this server searches nothing",
    "logits_processors": "functions cannot be sent",
    "vllm_xargs": "there are no extensions of vLLM here",
    "kv_transfer_params": "the KV cache is not transferred",
    "return_tokens_as_token_ids": "use return_token_ids",
    "return_tokens": "use return_token_ids",
    "n_probs": "use logprobs",
    "post_sampling_probs": "log-probabilities are those of the network",
    "response_fields": "responses are sent completely",
    "lora": "a LoRA adapter is chosen by its name as the model",
    "samplers": _SAMPLING,
    "mirostat": _SAMPLING,
    "dry_multiplier": _SAMPLING,
    "xtc_probability": _SAMPLING,
    "dynatemp_range": _SAMPLING,
    "smoothing_factor": _SAMPLING,
    "top_a": _SAMPLING,
    "epsilon_cutoff": _SAMPLING,
    "eta_cutoff": _SAMPLING,
    "penalty_alpha": _SAMPLING,
    "min_keep": _SAMPLING,
    "no_repeat_ngram_size": "use repetition_penalty",
    "negative_prompt": _SAMPLING,
    "verbose": "answers have no details for debugging",
    "t_max_predict_ms": "there is no limit of time; use max_tokens",
}

# The same of fields whose neutral values are others.
_NEUTRAL_VALUES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tool_choice": (_TOOLS, ("none", "auto")),
    "function_call": ("use tool_choice", ("none", "auto")),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "verbosity": ("it has no effect here", ("medium",)),
    "typical_p": (_SAMPLING, (1,)),
    "tfs_z": (_SAMPLING, (1,)),
    "top_n_sigma": (_SAMPLING, (-1, 0)),
    "guidance_scale": (_SAMPLING, (1,)),
    "repeat_penalty": ("use repetition_penalty", (1,)),
    "encoder_repetition_penalty": ("use repetition_penalty", (1,)),
    "n_predict": ("use max_tokens", (-1,)),
    "max_new_tokens": ("use max_tokens", ()),
    "num_beams": ("use use_beam_search and n", (1,)),
    "do_sample": ("use temperature", ()),
}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_BEAM_SEARCH_ONLY: dict[str, tuple[Any, ...]] = {"length_penalty": (None, 1), "early_stopping": (None, False)}
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def check_supported(body: GenerationRequest) -> None:
    """Refuse a request with fields that this server does not know, or cannot do what they ask for."""
    check_fields(body)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: it needs stream to be true.", param="stream_options")
    for name, neutral in _BEAM_SEARCH_ONLY.items():
        if not body.use_beam_search and getattr(body, name) not in neutral:
            raise ApiError(400, f"{name}: it needs use_beam_search to be true.", param=name)


def check_fields(body: StrictModel) -> None:
    """Refuse fields that are in no schema, unless they are harmless or have a neutral value."""
    for name, value in extras(body).items():
        if name in _HARMLESS:
            continue
        if name in _UNSUPPORTED:
            reason, neutral = _UNSUPPORTED[name], _EMPTY
        elif name in _NEUTRAL_VALUES:
            reason, neutral = _NEUTRAL_VALUES[name]
        else:
            raise _unknown_field(name, body)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: {reason}.", param=name, code="unsupported")


def _unknown_field(name: str, body: StrictModel) -> ApiError:
    if not _FIELD_NAME.fullmatch(name):  # perhaps a text of the client's, which no error repeats
        return ApiError(400, "there is an unknown field, whose name is no identifier.", code="unknown_field")
    near = get_close_matches(name, type(body).model_fields, 1)
    suggestion = f"; did you mean {near[0]}?" if near else "; leave it out."
    return ApiError(400, f"{name}: unknown field{suggestion}", param=name, code="unknown_field")
