"""The commands of `smelt` and how one is called: what a user got wrong comes out as one of our own errors."""

from __future__ import annotations

import typer

from smelt import __version__
from smelt.cli import bench, compress, evaluate, export, formats, inspect, methods, plan
from smelt.errors import SmeltError

# Every wrong use of options and arguments is of this class, for which typer has no public name.
_WrongUse: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="smelt",
    help="A trained model, some data and a budget in; a smaller, faster model out, proven to be still good.",
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="`--debug` anywhere shows the whole traceback of an error.",
)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app.command("methods")(methods.run)
app.command("formats")(formats.run)
app.command("inspect")(inspect.run)
app.command("plan")(plan.run)
app.command("compress")(compress.run)
app.command("eval")(evaluate.run)
app.command("bench")(bench.run)
app.command("export")(export.run)


def call(arguments: list[str]) -> int:
    """Run one command and return its exit code. Typer's own way to do this would swallow Ctrl-C."""
    command = typer.main.get_command(app)
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
