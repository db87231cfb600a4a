"""The commands of `smelt`, imported lazily, and the call of one; usage errors become `SmeltError`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from smelt.config import suggest, warn_renamed
from smelt.errors import SmeltError
from smelt.version import __version__

# The base class of every usage error, for which typer has no public name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# Groups of commands with their help lines. A command's module defines `run`, or an `app` with subcommands. It is
# imported only when the command is called, and imports torch only in `run`, so that no help waits for torch.
GROUPS = {
    "Look": {
        "methods": "List the compression methods, or the parameters of one: when to use it, what it needs, its paper.",
        "formats": "List the number formats: bits, grid, scales, and the error on normal values, measured now.",
        "env": "Show versions, CPU and GPU features, kernels and compiler of this machine.",
        "cache": "List or clear the cache: bundled models, compiled kernels, hashes.",
        "inspect": "Show the anatomy of a model: blocks, heads, KV groups, FFN channels, parameters, MACs, bytes.",
    },
    "Compress": {
        "plan": "Estimate size, memory, time and disk of a recipe before running it; refuse what cannot fit.",
        "compress": "Compress a model with a recipe or one method; save it, verify that it reloads, report the cost.",
        "qat": "Train a model at low precision, with or without a teacher; pack, verify and report it.",
        "verify": "Check an artifact against its passport: files, signature, that it loads, that it can be reproduced.",
        "sign": "Sign a model folder with a private key (an OpenSSF model signing bundle).",
        "export": "Export a model to compressed-tensors (vLLM, transformers), GGUF (llama.cpp) or ONNX.",
        "migrate": "Rewrite the old keys of a recipe or training configuration.",
        "schema": "Print the JSON Schema of recipes, or of training or server configurations, for editors.",
    },
    "Measure": {
        "eval": "Measure quality on data; with --against, compare with a base model, with a confidence interval.",
        "transcribe": "Print what is said in recordings, with a speech model; any rate is resampled.",
        "compare": "Show several results of `smelt compress` side by side: a table, and a page with plots.",
        "sensitivity": "Show what each layer, head, channel group and expert costs to remove, as a page.",
        "bench": "Measure latency and memory on this machine: median and spread after warmup.",
        "kv": "Profile the KV cache: `kv profile` finds how many tokens each head needs, over real texts.",
    },
    "Serve": {
        "serve": "Serve a model with an OpenAI-compatible API, streaming, metrics and a live page.",
        "batch": "Answer a file of requests in OpenAI's batch format; an interrupted run goes on where it stopped.",
        "chat": "Chat with a model in the terminal, streaming.",
        "load-test": "Send requests to a server at a given rate; measure latency, throughput and goodput, with plots.",
    },
    "Train": {
        "train": "Train a model with compressed gradients, on local workers or under torchrun.",
        "train-report": "Draw training runs as an HTML page: loss against time and bytes, traffic, time per phase.",
        "link": "Measure latency and bandwidth between ranks, and predict what each compressor gains.",
        "accumulator-bits": "Predict how many accumulator bits each GEMM of a model needs in training (VRR).",
        "shard-plan": "Plan FSDP2 sharding of a model: the step timeline, predicted and measured.",
    },
}
COMMANDS = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}
# Commands whose name is not a valid module name.
_MODULES = {
    "accumulator-bits": "accumulator_bits",
    "eval": "evaluate",
    "load-test": "load_test",
    "shard-plan": "shard_plan",
    "train-report": "train_report",
}

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
    command = _command_name(arguments)
    renamed = RENAMED_FLAGS.get(command, {})
    rewritten = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in renamed:
            warn_renamed(flag, renamed[flag], f"smelt {command}")
            flag = renamed[flag]
        rewritten.append(flag + equals + value)
    return rewritten


@dataclass(frozen=True)
class Invocation:
    """How the program was called; commands find it in `context.obj`."""

    arguments: list[str]
    debug: bool = False

    @property
    def again(self) -> list[str]:
        """Return the arguments of the same call in another process."""
        return [*self.arguments, "--debug"] if self.debug else self.arguments


def app_with(*names: str) -> typer.Typer:
    """Build the app with these commands imported (all of them if none is named) and the others listed only."""
    app = typer.Typer(
        name="smelt",
        help="Compress trained models, verify that they are still good, and serve them.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="`--debug` anywhere shows the full traceback of an error, and debug logs.",
    )
    app.callback(invoke_without_command=True)(options)
    for group, commands in GROUPS.items():
        for name, summary in commands.items():
            imported = not names or name in names
            module: Any = import_module(f"smelt.cli.{_MODULES.get(name, name)}") if imported else None
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name, help=summary, rich_help_panel=group)
            else:
                app.command(name, help=summary, rich_help_panel=group)(module.run if imported else _listed)
    return app


def options(version: bool = typer.Option(False, "-V", "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _listed() -> None:
    """Stand in for a command that is not called."""


def program(arguments: list[str]) -> Any:
    """Import the command that these arguments call."""
    name = _command_name(arguments)
    if name and name not in COMMANDS:
        raise SmeltError(f"there is no command {name!r:.80}{suggest(name, list(COMMANDS), 'see `smelt --help` for')}")
    return typer.main.get_command(app_with(name))


def _command_name(arguments: list[str]) -> str:
    return next((word for word in arguments if not word.startswith("-")), "")


def complete() -> None:
    """Answer the shell, which asks by environment variables how the typed words could go on; exit."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()
    typer.main.get_command(app_with(_command_name(words[1:])))(prog_name="smelt")


def call(command: Any, arguments: list[str], *, debug: bool = False) -> int:
    """Run one command and return its exit code. Typer's own runner would swallow Ctrl-C."""
    invocation = Invocation(arguments, debug)
    try:
        with command.make_context("smelt", arguments or ["--help"], obj=invocation) as context:
            command.invoke(context)
    except typer.Exit as exit_:
        return exit_.exit_code
    except _UsageError as error:
        raise SmeltError(_sentence(error)) from error
    return 0


def _sentence(error: Exception) -> str:
    """Format typer's message with the nearest option, or a pointer to the command's help."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "smelt"
    if context is not None and hasattr(error, "possibilities"):  # an option that does not exist
        name = str(getattr(error, "option_name", ""))
        flags = [flag for parameter in context.command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
        known = [flag for flag in flags if flag.startswith("--")]
        return f"{where} has no option {name!r:.80}{suggest(name, known, 'it has')}"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{message.rstrip('.')}; see `{where} --help`."
