"""Entry point of `smelt`: user errors exit with 2, bugs with 1, Ctrl-C with 130, each with one sentence.

Nothing heavy is imported here, so that Ctrl-C is handled the same way while the rest is still being imported.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from smelt.errors import SmeltError, is_panic

DEBUG = "--debug"
COMPLETE = "_SMELT_COMPLETE"  # set by the completion function that `smelt --install-completion` gives the shell
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
STOPPED = "stopped; finished work is kept, and `smelt compress --resume` continues from there."
NO_MEMORY = "out of memory; use fewer or shorter samples, or set memory_limit in the recipe."


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit; `--debug` may appear anywhere among the arguments, and shows debug logs as well."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    if COMPLETE in os.environ:
        from smelt.cli.app import complete

        complete()
    if DEBUG in arguments:
        sys.exit(_call([argument for argument in arguments if argument != DEBUG], debug=True))
    try:
        code = _call(arguments)
    except SmeltError as error:
        code = _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _fail(STOPPED, INTERRUPTED)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except BaseException as error:
        if is_panic(error):
            reason = " ".join(str(error).split())[:200]
            code = _fail(f"a library gave up on this input ({reason}); check the files of the model.")
        elif not isinstance(error, Exception):
            raise
        elif _is_out_of_memory(error):
            code = _fail(NO_MEMORY)
        else:
            code = _fail(
                f"{type(error).__name__}: {error}: this is a bug; run again with {DEBUG} to see where it is.", 1
            )
    sys.exit(code)


def _call(arguments: list[str], *, debug: bool = False) -> int:
    previous = signal.signal(signal.SIGINT, _interrupt)
    try:
        from smelt.cli.app import call, program, with_new_flags
        from smelt.logs import show_logs

        with _debug_level() if debug else nullcontext():
            show_logs()
            arguments = with_new_flags(arguments)
            return call(program(arguments), arguments, debug=debug)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _debug_level() -> Iterator[None]:
    """Log debug lines, also in subprocesses, unless the environment sets another level."""
    from smelt.logs import LEVEL_VARIABLE

    added = LEVEL_VARIABLE not in os.environ
    os.environ.setdefault(LEVEL_VARIABLE, "debug")
    try:
        yield
    finally:
        if added:
            del os.environ[LEVEL_VARIABLE]


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on Ctrl-C; while a command imports what it needs, exit, since other code could swallow or
    report the exception."""
    importing = False
    while frame is not None:
        file = frame.f_code.co_filename
        if importing and file.rpartition(os.sep)[0] == __file__.rpartition(os.sep)[0]:
            os._exit(_fail(STOPPED, INTERRUPTED))
        importing = file.startswith("<frozen importlib")
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_out_of_memory(error: Exception) -> bool:
    """Recognize out-of-memory errors: torch has its own class for devices, but only a message for the CPU."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print what concerns users (old names that still work) in one line; Python hides other warnings by default."""
    print(f"  warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _fail(sentence: str, code: int = 2) -> int:
    print(f"smelt: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
