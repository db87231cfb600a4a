"""What is known of a server before it is loaded: that it is there, which model it has, and whether it counts tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smelt.errors import RequestError
from smelt.loadtest.http import Address, Failed, exchange
from smelt.loadtest.prompts import Prompt


async def ask(address: Address, path: str, content: Any = None, key: str = "") -> tuple[int, Any]:
    """Status and JSON. That nobody answers is a sentence for the user."""
    try:
        async with exchange(address, path, content, key) as reply:
            return reply.status, await reply.json()
    except Failed as failed:
        raise RequestError(
            f"{address} does not answer ({failed.kind}: {failed.detail or 'no reason given'})."
        ) from None


async def find_model(address: Address, wanted: str | None, key: str = "") -> str:
    """The model to ask for: the one that was named, if the server has it, or the only (or first) one it has."""
    status, content = await ask(address, "/v1/models", key=key)
    if status in (401, 403):
        raise RequestError(refusal(address, status))
    listed = content.get("data") if status == 200 and isinstance(content, dict) else None
    names = [str(entry["id"]) for entry in listed or [] if isinstance(entry, dict) and "id" in entry]
    if wanted is not None and (wanted in names or not names):
        return wanted
    if not names:
        raise RequestError(f"{address} lists no model (status {status} for /v1/models); name one with --model.")
    if wanted is not None:
        raise RequestError(f"{address} has no model {wanted!r:.80}; it has {', '.join(names)[:200]}.")
    return names[0]


def refusal(address: Address, status: int, detail: str = "") -> str:
    """A sentence for what a server refuses."""
    said = f" ({detail.rstrip('.')})" if detail else ""
    if status in (401, 403):
        return f"{address} wants a key (status {status}); give the file that holds it with --api-key-file."
    if status == 404:
        return f"{address} does not know the model or has no such route (status 404){said}; see --model and --chat."
    return f"{address} answered with status {status}{said}."


async def cut_to_tokens(address: Address, model: str, prompts: list[Prompt], key: str = "") -> list[Prompt] | None:
    """The prompts with as many tokens as they have words, if the server has /tokenize as vLLM and Smelt do."""
    found = []
    for prompt in prompts:
        length = len(str(prompt.content).split())
        content = {"model": model, "prompt": prompt.content, "add_special_tokens": False}
        status, answer = await ask(address, "/tokenize", content, key)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens) or len(tokens) < length:
            return None
        found.append(replace(prompt, content=tokens[:length]))
    return found
