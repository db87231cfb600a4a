"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info: in the forms of vLLM and of llama.cpp."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from smelt.serve.server.chat_generation import render_prompt
from smelt.serve.server.errors import ApiError
from smelt.serve.server.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from smelt.serve.server.service import Service
from smelt.serve.server.tools import parse_tools

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the tokens of a prompt, or of messages through the chat template."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if sum(field is not None for field in (body.prompt, body.messages, body.content)) != 1:
        raise ApiError(400, "give either prompt, messages or content.", param="prompt")
    if body.content is not None:
        tokens = await service.tokenizer.encode(body.content, special=bool(body.add_special), param="content")
    elif body.messages is not None:
        chat = ChatRequest(
            messages=body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
        )  # fmt: skip
        text = await render_prompt(service, chat, parse_tools(chat, service.output_format))
        tokens = await service.tokenizer.encode(text, special=bool(body.add_special_tokens), param="messages")
    else:
        tokens = await service.tokenizer.encode(body.prompt or "", special=body.add_special_tokens is not False)
    strings = await service.tokenizer.token_strings(tokens) if body.return_token_strs else None
    shown: list[Any] = tokens
    if body.with_pieces:
        pieces = await service.tokenizer.pieces(tokens)
        shown = [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]
    return {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": shown, "token_strs": strings}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """Return the text of tokens."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if len(body.tokens) > service.max_model_len:
        message = f"tokens: there are {len(body.tokens):,}; the context has at most {service.max_model_len:,}."
        raise ApiError(400, message, param="tokens", code="context_length_exceeded")
    service.check_tokens(body.tokens)
    return {"prompt": await service.tokenizer.decode(body.tokens)}


@router.post("/apply-template")
async def apply_template(body: ChatRequest, request: Request) -> dict[str, str]:
    """Return the prompt that the chat template makes of the messages and tools of a chat request."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    return {"prompt": await render_prompt(service, body, parse_tools(body, service.output_format))}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Return the special tokens and the chat template, as lm-eval asks for them."""
    service: Service = request.app.state.service
    tokenizer = service.tokenizer.tokenizer
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": service.max_model_len,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    }
