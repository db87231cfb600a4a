"""`smelt chat`: talk to a model in the terminal."""

from __future__ import annotations

import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, SeedOption, say, write_json
from smelt.errors import RequestError
from smelt.serve.chat import Conversation
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

HELP = "Ctrl-C stops an answer, Ctrl-D ends; /reset forgets what was said, /system TEXT tells the model what it is."


def run(
    model: ModelArgument,
    system: Annotated[str, typer.Option(help="What the model is told before all else.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the most likely token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 512,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Maximum tokens of the conversation.")] = None,
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    talk = Conversation(Engine(model, device=device, max_model_len=max_model_len, max_num_seqs=2), sampling, system)
    if sys.stdin.isatty():
        import readline  # noqa: F401  lets `input` keep a history and edit its line

        say(HELP)
    with ControlC() as control:
        for line in lines(control):
            if line.startswith("/"):
                command(talk, line)
            elif line.strip():
                answer(talk, line, control)
    turns = [turn.to_json() for turn in talk.turns]
    write_json(json_file, {"model": model, "system": talk.system, "messages": talk.messages, "turns": turns})


class ControlC:
    """Notes that Ctrl-C was pressed. It interrupts only while a line is typed: a step of the engine is never cut."""

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
    """What the user types, until Ctrl-D or the end of the input."""
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


def command(talk: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.reset()
        say("forgotten.")
    elif name == "/system":
        talk.reset(rest.strip())
        say("the model is told that; what was said is forgotten.")
    else:
        say(HELP)


def answer(talk: Conversation, line: str, control: ControlC) -> None:
    """Print the answer as it comes; Ctrl-C ends it between two steps."""
    control.pressed = False
    try:
        gone = talk.trim(line)
        if gone:
            say(f"the context of {talk.engine.max_model_len:,} tokens is full: the oldest {gone} messages are dropped.")
        for piece in talk.answer(line, lambda: control.pressed):
            print(harmless(piece), end="", flush=True)
        print()
    except RequestError as error:
        say(str(error))


def harmless(text: str) -> str:
    """Without the control characters by which a text could steer the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")
