"""The commands of `smelt` and how one is called: what a user got wrong comes out as one of our own errors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from smelt.errors import SmeltError
from smelt.version import __version__

# Every wrong use of options and arguments is of this class, for which typer has no public name.
_WrongUse: type[Exception] = typer.BadParameter.__mro__[1]

# What each command does. Its file has the function `run`, or an `app` with commands of its own, and is imported only
# when the command is called, so that `smelt --help` does not wait for torch.
COMMANDS = {
    "methods": "What can be done to a model, what each method needs, and its paper.",
    "formats": "Every number format: its bits, its grid, its scales, and its error on normal values, measured now.",
    "inspect": "The anatomy: blocks, heads, kv groups, filters, parameters, MACs, bytes.",
    "plan": "Before any work: memory, time, disk, what will change; refuses what cannot fit.",
    "compress": "Make a model smaller by a recipe or one method; save it, prove that it reloads, and report the cost.",
    "eval": "How good a model is on data, and with --against, how much it lost, with a confidence interval.",
    "bench": "Latency and memory, measured here: median and spread after a warm-up, batch and length stated.",
    "kv": "How many keys and values each head of a model needs: `kv profile` finds budgets over real texts.",
    "link": "Alpha and bandwidth between workers (under torchrun), and what each gradient compressor would gain.",
    "shard-plan": "How to shard a model over workers (FSDP2, under torchrun): the timeline predicted and measured.",
    "train-report": "Loss against time and bytes, what was sent and where the time went, of training runs, as a page.",
    "chat": "Talk to a model in the terminal; its answers come as they are made.",
    "load-test": "Send requests to a server at a rate, and measure latencies, throughput and goodput, with plots.",
    "export": "Write a model for vLLM and transformers (compressed-tensors), llama.cpp (gguf) or onnxruntime (onnx).",
    "serve": "Serve a model: OpenAI's API, streaming, metrics and a live page; on this machine unless keys are given.",
}
# Where a command's name is none that Python takes.
_FILES = {"eval": "evaluate", "load-test": "load_test", "shard-plan": "shard_plan", "train-report": "train_report"}


def app_with(*names: str) -> typer.Typer:
    """The program with these commands (without any: all of them) ready to be called, and the others listed."""
    app = typer.Typer(
        name="smelt",
        help="A trained model, some data and a budget in; a smaller, faster model out, proven to be still good.",
        add_completion=False,
        pretty_exceptions_enable=False,
        epilog="`--debug` anywhere shows the whole traceback of an error.",
    )
    app.callback(invoke_without_command=True)(options)
    for name, told in COMMANDS.items():
        ready = not names or name in names
        file: Any = import_module(f"smelt.cli.{_FILES.get(name, name)}") if ready else None
        if hasattr(file, "app"):
            app.add_typer(file.app, name=name, help=told)
        else:
            app.command(name, help=told)(file.run if ready else _listed)
    return app


def options(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _listed() -> None:
    """Stands for a command that is not called."""


def program(arguments: list[str]) -> Any:
    """What these arguments call, imported."""
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    return typer.main.get_command(app_with(wanted))


def call(command: Any, arguments: list[str]) -> int:
    """Run one command and return its exit code. Typer's own way to do this would swallow Ctrl-C."""
    try:
        with command.make_context("smelt", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except _WrongUse as error:
        raise SmeltError(_sentence(error)) from error
    return 0


def _sentence(error: Exception) -> str:
    """What typer says about a wrong use, and where the right one is described."""
    told = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "smelt"
    return f"{told.rstrip('.')}; see `{where} --help`."
