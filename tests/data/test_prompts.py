"""Prompts: conversations without the answer, from every layout; what holds none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smelt.data import load_prompts
from smelt.errors import DataError


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversations_end_with_the_user(tmp_path: Path) -> None:
    dialogue = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: Because."
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = {
        "chosen": {"chosen": dialogue, "rejected": dialogue},
        "messages": {"messages": messages},
        "prompt": {"prompt": "Hi"},
        "list": {"prompt": [{"role": "system", "content": "Be brief."}, messages[0]]},
    }
    read = {name: load_prompts(write(tmp_path / f"{name}.jsonl", row)).conversations[0] for name, row in rows.items()}
    assert [message["content"] for message in read["chosen"]] == ["Hi", "Hello.", "Why?"]
    assert [message["role"] for message in read["chosen"]] == ["user", "assistant", "user"]
    assert list(read["messages"]) == messages[:1] == list(read["prompt"])
    assert [message["role"] for message in read["list"]] == ["system", "user"]


def test_data_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no prompts: expected a column prompt, messages or chosen"):
        load_prompts(write(tmp_path / "a.jsonl", {"text": "words"}))
    with pytest.raises(DataError, match="no prompt in column 'messages' of row 2"):
        answered = [{"role": "assistant", "content": "Hello."}]
        write(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "Hi"}]}, {"messages": answered})
        load_prompts(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="plain text"):
        load_prompts("default")
