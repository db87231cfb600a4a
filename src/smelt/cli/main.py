"""The command line: one file a command. Errors a user can cause are one sentence and exit code 2."""

from __future__ import annotations

import sys

import typer

from smelt import __version__
from smelt.cli import bench, compress, evaluate, inspect, methods, plan
from smelt.cli.output import error_line
from smelt.errors import SmeltError

DEBUG = "--debug"

app = typer.Typer(
    name="smelt",
    help="A trained model, some data and a budget in; a smaller, faster model out, proven to be still good.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    debug: bool = typer.Option(False, DEBUG, help="Show the whole traceback of an error."),
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app.command("methods")(methods.run)
app.command("inspect")(inspect.run)
app.command("plan")(plan.run)
app.command("compress")(compress.run)
app.command("eval")(evaluate.run)
app.command("bench")(bench.run)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; `--debug` may stand anywhere."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in arguments
    arguments = [argument for argument in arguments if argument != DEBUG]
    try:
        app(arguments, standalone_mode=True)
    except SmeltError as error:
        _fail(str(error), debug, error)
    except KeyboardInterrupt as error:
        _fail("stopped; what was finished is kept, and `smelt compress --resume` goes on from there.", debug, error)
    except MemoryError as error:
        _fail("out of memory; use fewer or shorter samples, or set memory_limit in the recipe.", debug, error)


def _fail(sentence: str, debug: bool, error: BaseException) -> None:
    if debug:
        raise error
    error_line(sentence)
    sys.exit(2)


if __name__ == "__main__":
    main()
