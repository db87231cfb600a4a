"""The commands of `smelt`, imported lazily, and the call of one; usage errors become `SmeltError`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from smelt.config import warn_renamed
from smelt.errors import SmeltError
from smelt.version import __version__

# The base class of every usage error, for which typer has no public name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# The help line of each command. Its module defines `run`, or an `app` with subcommands, and is imported only when the
# command is called, so that `smelt --help` does not wait for torch.
COMMANDS = {
    "methods": "List the compression methods: when to use each, what it needs, its paper.",
    "formats": "List the number formats: bits, grid, scales, and the error on normal values, measured now.",
    "inspect": "Show the anatomy of a model: blocks, heads, KV groups, FFN channels, parameters, MACs, bytes.",
    "plan": "Estimate memory, time and disk of a recipe before running it; refuse what cannot fit.",
    "compress": "Compress a model with a recipe or one method; save it, verify that it reloads, and report the cost.",
    "verify": "Check an artifact against its passport: files, signature, that it loads, that it can be reproduced.",
    "sign": "Sign a model folder with a private key (an OpenSSF model signing bundle).",
    "migrate": "Rewrite the old keys of a recipe or training configuration.",
    "schema": "Print the JSON Schema of recipes, or of training or server configurations, for editors.",
    "eval": "Measure quality on data; with --against, compare with a base model, with a confidence interval.",
    "compare": "Show several results of `smelt compress` side by side: a table, and a page with plots.",
    "bench": "Measure latency and memory on this machine: median and spread after warmup.",
    "kv": "Profile the KV cache: `kv profile` finds how many tokens each head needs, over real texts.",
    "link": "Measure latency and bandwidth between ranks (under torchrun), and predict what each compressor gains.",
    "shard-plan": "Plan FSDP2 sharding of a model (under torchrun): the step timeline, predicted and measured.",
    "train-report": "Draw training runs as an HTML page: loss against time and bytes, traffic, time per phase.",
    "chat": "Chat with a model in the terminal, streaming.",
    "load-test": "Send requests to a server at a given rate; measure latency, throughput and goodput, with plots.",
    "export": "Export a model to compressed-tensors (vLLM, transformers), GGUF (llama.cpp) or ONNX.",
    "serve": "Serve a model with an OpenAI-compatible API, streaming, metrics and a live page.",
}
# Commands whose name is not a valid module name.
_MODULES = {"eval": "evaluate", "load-test": "load_test", "shard-plan": "shard_plan", "train-report": "train_report"}

# Per command: flags of the previous version and their names now. They work for one version, with a warning.
RENAMED_FLAGS: dict[str, dict[str, str]] = {
    "bench": {"--batch": "--batch-size", "--length": "--seq-len"},
    "chat": {"--context": "--max-model-len"},
    "compress": {"--group": "--group-size"},
    "eval": {"--batch": "--batch-size", "--kv": "--kv-cache-dtype"},
    "load-test": {
        "--rate": "--request-rate",
        "--requests": "--num-requests",
        "--input": "--input-len",
        "--output": "--output-len",
        "--warmups": "--num-warmups",
    },
    "plan": {"--group": "--group-size"},
    "serve": {
        "--name": "--served-model-name",
        "--context": "--max-model-len",
        "--cache-gib": "--kv-cache-gib",
        "--batch-requests": "--max-num-seqs",
        "--batch-tokens": "--max-num-batched-tokens",
        "--prefix-cache": "--enable-prefix-caching",
        "--no-prefix-cache": "--no-enable-prefix-caching",
        "--kv": "--kv-profile",
        "--kv-keep-host": "--kv-offload",
        "--kv-cap": "--kv-token-cap",
        "--kv-type": "--kv-cache-dtype",
        "--queue": "--max-queued",
        "--grace": "--shutdown-timeout",
        "--silence": "--step-timeout",
        "--reader": "--client-timeout",
        "--adapter": "--lora-modules",
        "--devices": "--tensor-parallel-size",
        "--cluster": "--ray-address",
        "--restarts": "--max-restarts",
    },
}


def with_new_flags(arguments: list[str]) -> list[str]:
    """Rewrite flags that were renamed, with a warning for each."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    renamed = RENAMED_FLAGS.get(command, {})
    rewritten = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in renamed:
            warn_renamed(flag, renamed[flag], f"smelt {command}")
            flag = renamed[flag]
        rewritten.append(flag + equals + value)
    return rewritten


def app_with(*names: str) -> typer.Typer:
    """Build the app with these commands imported (all of them if none is named) and the others listed only."""
    app = typer.Typer(
        name="smelt",
        help="Compress trained models, verify that they are still good, and serve them.",
        add_completion=False,
        pretty_exceptions_enable=False,
        epilog="`--debug` anywhere shows the full traceback of an error.",
    )
    app.callback(invoke_without_command=True)(options)
    for name, summary in COMMANDS.items():
        imported = not names or name in names
        module: Any = import_module(f"smelt.cli.{_MODULES.get(name, name)}") if imported else None
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, help=summary)
        else:
            app.command(name, help=summary)(module.run if imported else _listed)
    return app


def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _listed() -> None:
    """Stand in for a command that is not called."""


def program(arguments: list[str]) -> Any:
    """Import the command that these arguments call."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    return typer.main.get_command(app_with(name))


def call(command: Any, arguments: list[str]) -> int:
    """Run one command and return its exit code. Typer's own runner would swallow Ctrl-C."""
    try:
        with command.make_context("smelt", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as exit_:
        return exit_.exit_code
    except _UsageError as error:
        raise SmeltError(_sentence(error)) from error
    return 0


def _sentence(error: Exception) -> str:
    """Format typer's message with a pointer to the command's help."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "smelt"
    return f"{message.rstrip('.')}; see `{where} --help`."
