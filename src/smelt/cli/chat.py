"""`smelt chat`: chat with a model in the terminal."""

from __future__ import annotations

import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, SeedOption, say, write_json
from smelt.errors import RequestError

if TYPE_CHECKING:
    from smelt.serve.chat import Conversation

HELP = "Ctrl-C stops an answer, Ctrl-D ends; /reset clears the conversation, /system TEXT sets the system prompt."


def run(
    model: ModelArgument,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the most likely token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Maximum tokens of the conversation.")] = None,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.serve.chat import Conversation
    from smelt.serve.engine.engine import Engine
    from smelt.serve.engine.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    conversation = Conversation(
        Engine(model, device=device, max_model_len=max_model_len, max_num_seqs=2), sampling, system
    )
    if sys.stdin.isatty():
        import readline  # noqa: F401  lets `input` keep a history and edit its line

        say(HELP)
    with ControlC() as control:
        for line in lines(control):
            if line.startswith("/"):
                command(conversation, line)
            elif line.strip():
                answer(conversation, line, control)
    turns = [turn.to_json() for turn in conversation.turns]
    write_json(
        json_file, {"model": model, "system": conversation.system, "messages": conversation.messages, "turns": turns}
    )


class ControlC:
    """Record Ctrl-C. It interrupts only while a line is typed, never an engine step."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> ControlC:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self.pressed = True

    @contextmanager
    def typing(self) -> Iterator[None]:
        """Inside, Ctrl-C raises KeyboardInterrupt."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)


def lines(control: ControlC) -> Iterator[str]:
    """Yield the user's lines until Ctrl-D or the end of the input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            with control.typing():
                line = input("> ")
        except KeyboardInterrupt:
            print()
            say(HELP)
        except EOFError:
            print()
            return
        else:
            yield line


def command(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        conversation.reset()
        say("forgotten.")
    elif name == "/system":
        conversation.reset(rest.strip())
        say("system prompt set; earlier messages are forgotten.")
    else:
        say(HELP)


def answer(conversation: Conversation, line: str, control: ControlC) -> None:
    """Stream the answer to the terminal; Ctrl-C ends it between two steps."""
    control.pressed = False
    try:
        count = conversation.trim(line)
        if count:
            length = conversation.engine.max_model_len
            say(f"the context of {length:,} tokens is full; the oldest {count} messages are dropped.")
        for delta in conversation.answer(line, lambda: control.pressed):
            print(strip_control_characters(delta), end="", flush=True)
        print()
    except RequestError as error:
        say(str(error))


def strip_control_characters(text: str) -> str:
    """Remove control characters, which could send commands to the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")
