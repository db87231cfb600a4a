"""The way in. An error a user can cause is one sentence and exit code 2, one of ours a sentence and exit code 1.

Nothing heavy is imported here, so that Ctrl-C is answered in the same way while the rest is still being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from smelt.errors import SmeltError

DEBUG = "--debug"
STOPPED = "stopped; what was finished is kept, and `smelt compress --resume` goes on from there."
NO_MEMORY = "out of memory; use fewer or shorter samples, or set memory_limit in the recipe."


def main(arguments: list[str] | None = None) -> None:
    """Run a command; `--debug` may stand anywhere."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if DEBUG in arguments:
        sys.exit(_call([argument for argument in arguments if argument != DEBUG]))
    try:
        code = _call(arguments)
    except SmeltError as error:
        code = _fail(str(error))
    except KeyboardInterrupt:
        code = _fail(STOPPED)
    except BrokenPipeError:  # who read the output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if _is_lack_of_memory(error):
            code = _fail(NO_MEMORY)
        else:
            code = _fail(
                f"{type(error).__name__}: {error}: this is a bug; run again with {DEBUG} to see where it is.", 1
            )
    sys.exit(code)


def _call(arguments: list[str]) -> int:
    with _stopping_at_once():
        from smelt.cli.app import call, program

        command = program(arguments)
    return call(command, arguments)


@contextmanager
def _stopping_at_once() -> Iterator[None]:
    """Ctrl-C ends the process on the spot: inside an import an exception could be lost, or reported by others."""

    def stop(*_: object) -> None:
        os._exit(_fail(STOPPED))

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_lack_of_memory(error: Exception) -> bool:
    """Torch has an error of its own for devices, and says it in words for the CPU."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )


def _fail(sentence: str, code: int = 2) -> int:
    print(f"smelt: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
