"""Pack conversations into sequences of equal length to train on, in which only the assistant's words are labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smelt.errors import DataError
from smelt.models.chat_template import ChatTemplateRenderer

IGNORED = -100  # label of a token that counts for no loss
Messages = Sequence[Mapping[str, str]]


def pack_chats(
    chats: Iterable[Messages], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sequences of token ids and labels, [length] each: conversations one behind the other, cut at the length.

    A sequence without a label is left out, as is the end of the last one. Tokens attend to earlier conversations of
    their sequence, as in pretraining.
    """
    renderer = ChatTemplateRenderer(tokenizer)
    ids: list[int] = []
    labels: list[int] = []
    try:
        for messages in chats:
            for text, is_answer in _segments(messages, renderer):
                tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                ids += tokens
                labels += tokens if is_answer else [IGNORED] * len(tokens)
            while len(ids) >= length:
                if any(label != IGNORED for label in labels[:length]):
                    yield torch.tensor(ids[:length]), torch.tensor(labels[:length])
                del ids[:length], labels[:length]
    finally:
        renderer.close()


def _segments(messages: Messages, renderer: ChatTemplateRenderer) -> list[tuple[str, bool]]:
    """Split a rendered conversation into parts, each with whether the assistant wrote it, up to its last answer."""
    segments: list[tuple[str, bool]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = renderer.render(messages[:index])
        answered = renderer.render(messages[: index + 1], add_generation_prompt=False)
        if not prompt.startswith(done) or not answered.startswith(prompt):
            raise DataError(
                "the model's chat template writes earlier messages differently once there is an answer, so answers "
                "cannot be told from prompts; use text instead of messages."
            )
        segments += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
        done = answered
    return segments
