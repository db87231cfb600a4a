"""Generate token sequences in batches, with the generation loop and the KV cache of transformers.

What generates is the network that is trained or measured, with its own numerics: unlike an engine, it needs no other
copy of the weights, and fake-quantized layers run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from smelt.progress import NullProgress, Progress

BATCH_SIZE = 32  # sequences that are generated together
_GREEDY_LENGTHS = (3, 4, 5)  # of the start of a text, the random first token included, in turns
_TOP_K = 50


@torch.no_grad()
def generate(
    network: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    top_k: int | None = None,
    ignore_eos: bool = False,
    batch_size: int = BATCH_SIZE,
    progress: Progress = NullProgress(),  # noqa: B008
) -> list[list[int]]:
    """Return the continuation of each prompt, up to and with the end token: greedy, or sampled from the `top_k` tokens.

    Settings that come with the model, such as a repetition penalty, are not used. Sampling draws from torch's default
    generator.
    """
    ends = [] if ignore_eos else end_tokens(network)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=top_k is not None, top_k=top_k, eos_token_id=ends or None,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # little padding
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    answers: list[list[int]] = [[] for _ in prompts]
    with _generation_config(network, config):
        for group in progress.track(groups, "generating"):
            for index, answer in zip(group, _continue(network, [prompts[i] for i in group]), strict=True):
                answers[index] = _until_end(answer, ends)
    return answers


def generate_text(
    network: Any,
    *,
    samples: int,
    length: int,
    seed: int,
    batch_size: int = BATCH_SIZE,
    progress: Progress = NullProgress(),  # noqa: B008
) -> torch.Tensor:
    """Return text that the network generates from nothing, `samples` sequences of `length` tokens, as LLM-QAT does.

    Each starts with a random token; the next few are the most likely ones, which avoids nonsense, and all others are
    sampled, for variety (Liu et al., 2023, arXiv 2305.17888). Token ids on CPU: [samples, length].
    """
    special = set(end_tokens(network))
    vocabulary = [token for token in range(network.config.get_text_config().vocab_size) if token not in special]
    device = next(network.parameters()).device
    texts: list[list[int]] = [[]] * samples
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        starts = [[vocabulary[index]] for index in torch.randint(len(vocabulary), (samples,)).tolist()]
        for turn, greedy in enumerate(_GREEDY_LENGTHS):
            part = starts[turn :: len(_GREEDY_LENGTHS)]
            for end, top_k in ((min(greedy, length), None), (length, _TOP_K)):
                new = end - len(part[0]) if part else 0
                if new > 0:
                    added = generate(
                        network, part, new, top_k=top_k, ignore_eos=True, batch_size=batch_size, progress=progress
                    )
                    part = [text + tokens for text, tokens in zip(part, added, strict=True)]
            texts[turn :: len(_GREEDY_LENGTHS)] = part
    return torch.tensor(texts)


def end_tokens(network: Any) -> list[int]:
    """Return the tokens that end a text."""
    for config in (network.generation_config, network.config.get_text_config()):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return [ends] if isinstance(ends, int) else list(ends)
    return []


def _continue(network: Any, prompts: list[Sequence[int]]) -> list[list[int]]:
    """Return the new tokens of each prompt; prompts are padded on the left."""
    longest = max(map(len, prompts))
    device = next(network.parameters()).device
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    new: list[list[int]] = network.generate(ids, attention_mask=mask)[:, longest:].tolist()
    return new


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """Cut behind the first end token: what follows is padding."""
    length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


@contextmanager
def _generation_config(network: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the settings of the model, which fill in what a call leaves open."""
    before, was_training = network.generation_config, network.training
    network.generation_config = config
    network.eval()
    try:
        yield
    finally:
        network.generation_config = before
        network.train(was_training)
