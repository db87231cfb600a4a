"""`smelt chat`: answers stream, the second turn is cheap, the context never overflows, Ctrl-C and Ctrl-D work."""

from __future__ import annotations

import copy
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from smelt.cli.chat import ControlC, answer, strip_control_characters
from smelt.errors import ModelError, RequestError
from smelt.models.model import Model
from smelt.serve.chat import Conversation
from smelt.serve.engine.engine import Engine, Event
from smelt.serve.engine.sampling_params import SamplingParams
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Done, Smelt, smelt_here  # noqa: F401
from tests.trained import sentences, trained_llama

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}{{ 'a: ' }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small character-level model with 128 positions and a chat template."""
    path = tmp_path_factory.mktemp("chat") / "model"
    trained_llama(sentences(400)).save_pretrained(path)
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # characters without spaces between them
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def talk(folder: Path) -> Conversation:
    return Conversation(Engine(str(folder), block_size=4), SamplingParams(max_tokens=12, temperature=0), "be kind.")


def test_the_second_turn_computes_only_new_tokens(talk: Conversation) -> None:
    first = "".join(talk.answer("the cat"))
    second = "".join(talk.answer("the dog"))
    assert first and second
    assert [message["content"] for message in talk.messages] == ["the cat", first, "the dog", second]
    assert talk.turns[0].cached_tokens == 0
    num_tokens = len(f"s: be kind.\nu: the cat\na: {first}")
    assert (
        talk.turns[1].cached_tokens >= num_tokens - 8 and talk.turns[1].prompt_tokens > num_tokens
    )  # all but one block
    assert talk.engine.pool.num_free_blocks == talk.engine.pool.num_blocks


def test_answers_match_the_engine(talk: Conversation) -> None:
    chunks = list(talk.answer("the cat"))
    prompt = "s: be kind.\nu: the cat\na: "
    (expected,) = Engine(talk.engine.model, enable_prefix_caching=False).generate(
        [prompt], SamplingParams(max_tokens=12, temperature=0)
    )
    assert "".join(chunks) == expected.text and len(chunks) > 1


def test_a_full_context_drops_the_oldest_messages(talk: Conversation) -> None:
    gone = 0
    for number in range(8):
        text = f"the child {number}"
        gone += talk.trim(text)
        "".join(talk.answer(text))
        assert talk.turns[-1].prompt_tokens + 12 <= 128
    assert gone > 0 and gone % 2 == 0 and talk.messages[0]["role"] == "user"
    assert talk.system == "be kind."
    before = list(talk.messages)
    with pytest.raises(RequestError, match="must fit into 128"):
        talk.trim("x" * 200)
        list(talk.answer("x" * 200))
    assert talk.messages == before[len(before) :]  # trimmed; the failed message is not kept
    assert "".join(talk.answer("the cat"))


def test_a_stopped_answer_is_kept_and_leaves_nothing_behind(talk: Conversation) -> None:
    chunks: list[str] = []
    for chunk in talk.answer("the cat", lambda: len(chunks) >= 3):
        chunks.append(chunk)
    assert talk.turns[-1].reason == "abort" and 3 <= talk.turns[-1].tokens < 12
    assert talk.messages[-1]["content"] == "".join(chunks)
    assert talk.engine.pool.num_free_blocks == talk.engine.pool.num_blocks and not talk.engine.busy
    coming = talk.answer("the dog")
    next(coming)
    coming.close()  # the reader may leave
    assert not talk.engine.busy and talk.messages[-1]["role"] == "assistant"


def test_control_c_ends_an_answer_between_two_steps(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = talk.engine.step, iter(range(100))

    def step_and_press() -> list[Event]:
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(talk.engine, "step", step_and_press)
    with ControlC() as control:
        answer(talk, "the cat", control)
    assert talk.turns[-1].reason == "abort" and 3 <= talk.turns[-1].tokens < 12
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_seed_of_each_turn(folder: Path) -> None:
    def said(seed: int) -> list[str]:
        talk = Conversation(Engine(str(folder)), SamplingParams(max_tokens=12, temperature=1.0, seed=seed))
        return ["".join(talk.answer("the")), "".join(talk.answer("the"))]

    assert said(1) == said(1) != said(2)


def test_a_model_without_a_template() -> None:
    model = Model(copy.deepcopy(trained_llama(sentences(400))), character_tokenizer(), source="tiny")
    with pytest.raises(ModelError, match="tiny has no chat template"):
        Conversation(Engine(model), SamplingParams())


def test_a_template_that_refuses(talk: Conversation) -> None:
    talk.tokenizer.chat_template = "{{ raise_exception('only one message') }}"
    with pytest.raises(RequestError, match="does not accept this conversation"):
        list(talk.answer("hello"))
    assert talk.messages == []


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert strip_control_characters("a\x1b[31mb\x07\x9b2J\n\tü\u200d✓\r") == "a[31mb2J\n\tü\u200d✓"


def typed(smelt: Smelt, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> Done:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return smelt("chat", *arguments)


def test_the_command_with_piped_input(
    smelt_here: Smelt,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--temperature", "0", "--max-tokens", "8", "--json", str(tmp_path / "r.json")]
    text = "the cat\nthe dog\n/help\n/system be brief.\nthe bird\n"
    done = typed(smelt_here, monkeypatch, text, str(folder), *options)
    assert done.code == 0 and len(done.out.splitlines()) == 3, done
    assert "Ctrl-D ends" in done.err and "forgotten" in done.err
    result: Any = json.loads((tmp_path / "r.json").read_text())
    assert result["system"] == "be brief." and len(result["messages"]) == 2 and len(result["turns"]) == 3
    assert result["turns"][1]["cached_tokens"] > 0
    assert result["messages"][1]["content"] == done.out.splitlines()[2]
    long = typed(smelt_here, monkeypatch, "\n".join(["the child sees"] * 9), str(folder), *options)
    assert "the context of 128 tokens is full; the oldest 2 messages are dropped" in long.err
    typed(smelt_here, monkeypatch, "x", "nowhere").refused("no model at nowhere")


def test_at_a_terminal(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C stops a long answer but not the chat; the next input is processed; Ctrl-D ends it."""
    long = shutil.copytree(folder, tmp_path / "long")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    ours, theirs = pty.openpty()
    options = ["--max-tokens", "8000", "--temperature", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "smelt.cli.main", "chat", str(long), *options],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_controlling_terminal,
    )  # fmt: skip
    os.close(theirs)
    assert "Ctrl-C stops an answer" in _read_until(ours, "> ", process)
    time.sleep(0.5)  # Python's line reader misses a signal between printing its prompt and waiting
    os.write(ours, b"\x03")
    assert "Ctrl-D ends" in _read_until(ours, "> ", process)
    os.write(ours, b"the cat\n")
    output = _read_until(ours, "the", process, after="the cat\r\n")
    os.write(ours, b"\x03")
    output += _read_until(ours, "\r\n> ", process)
    assert 10 < len(output) < 7000, len(output)
    os.write(ours, b"/reset\n")
    _read_until(ours, "> ", process, after="forgotten.")
    time.sleep(0.5)
    os.write(ours, b"\x04")
    _drain(ours)
    assert process.wait(timeout=600) == 0
    os.close(ours)


def _controlling_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(descriptor: int, words: str, process: subprocess.Popen[bytes], after: str = "") -> str:
    """Return the terminal's output up to this text, which must follow other output."""
    output, deadline = "", time.monotonic() + 600  # on a busy machine, starting alone can take a minute
    while words not in output.partition(after)[2] if after else words not in output:
        assert time.monotonic() < deadline and process.poll() is None, f"waited for {words!r}, saw {output[-500:]!r}"
        if select.select([descriptor], [], [], 0.2)[0]:
            output += os.read(descriptor, 4096).decode(errors="replace")
    return output


def _drain(descriptor: int) -> None:
    try:
        while select.select([descriptor], [], [], 10)[0] and os.read(descriptor, 4096):
            pass
    except OSError:  # the other end is closed
        pass
