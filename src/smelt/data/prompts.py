"""Load prompts: conversations that a model is to answer.

A row has a column `prompt` (text or a list of messages), `messages` (of which a last answer is left out), or
`chosen`, a dialogue of HH-RLHF whose last answer is left out: a method that needs prompts generates its own answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smelt.data.files import Row, column_names
from smelt.data.limits import list_names
from smelt.errors import DataError

Message = dict[str, str]  # role and content, as in chat templates
COLUMNS = ("prompt", "messages", "chosen")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class PromptData:
    """Conversations that end with a message of the user. `name` is their source."""

    name: str
    conversations: tuple[tuple[Message, ...], ...]
    answered: bool = False  # they end with an answer instead

    def __len__(self) -> int:
        return len(self.conversations)

    def take(self, indices: Sequence[int] | np.ndarray) -> PromptData:
        """Return the conversations at these indices, in this order."""
        return replace(self, conversations=tuple(self.conversations[int(index)] for index in indices))


def prompts_from_rows(rows: list[Row], source: str, column: str | None = None) -> PromptData:
    """Read a conversation per row from `column`, or the first of `prompt`, `messages` and `chosen` that exists."""
    columns = column_names(rows)
    column = column or next((name for name in COLUMNS if name in columns), None)
    if column is None or column not in columns:
        raise DataError(
            f"{source} has no prompts: expected a column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}, and its columns "
            f"are {list_names(columns)}."
        )
    conversations = []
    for number, row in enumerate(rows, start=1):
        messages = _messages(row.get(column))
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or not messages[-1]["content"].strip():
            raise DataError(f"{source} has no prompt in column '{column}' of row {number}; remove the row.")
        conversations.append(tuple(messages))
    return PromptData(source, tuple(conversations))


def chats_from_rows(rows: list[Row], source: str, column: str) -> PromptData | None:
    """Read a conversation with answers per row, or return None if the column does not hold lists of messages."""
    if not rows or not isinstance(rows[0].get(column), list):
        return None
    chats = [_messages(row.get(column)) for row in rows]
    for number, messages in enumerate(chats, start=1):
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{source} has no answer of the assistant in column '{column}' of row {number}; remove it.")
    return PromptData(source, tuple(map(tuple, chats)), answered=True)


def _messages(value: Any) -> list[Message]:
    """Return the messages of a row; none if they cannot be read."""
    if isinstance(value, str):
        parts = _TURN.split(value)
        turns = list(zip(parts[1::2], parts[2::2], strict=True))
        if turns and not parts[0].strip():
            return [{"role": _ROLES[speaker], "content": words.strip()} for speaker, words in turns]
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(_is_message(message) for message in value):
        return []
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
