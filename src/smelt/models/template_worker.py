"""Render one model's chat template, in a process that `chat_template.py` starts and ends.

A template is a program of the model's author. Jinja's sandbox keeps it from reaching Python's objects but not from
looping for ever or building a string of gigabytes, often inside one C call that nothing can interrupt. So the process
has limits: on memory from the start, on CPU time per request, and on the length of the text. It can write no file.

The first message on standard input holds the template, the special tokens and the CPU time, each further one the
variables of a request (`messages`, `tools` and others), which is answered by one message with the text or an error. All
of them are JSON after their length in 8 bytes.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 512 * 2**20
EXTRA_CHARACTERS, GROWTH = 2**20, 8  # a text may have so many characters, and so many times those of its variables


def limit_process() -> None:
    """Limit memory to what is in use and `MEMORY_BYTES` more, and forbid writing files."""
    for kind, limit in ((resource.RLIMIT_AS, _address_space() + MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(kind, (limit, limit))


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: what Python has mapped when it starts
        return 2**30


def _limit_cpu_time(seconds: int) -> None:
    """Let the system end this process when the current request has used its CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, resource.RLIM_INFINITY))


class _GenerationTag(jinja2.ext.Extension):
    """Accept `{% generation %}`, with which templates mark the assistant's text for training, and render its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _DictFactory:
    """`dict(...)` in a template, without the attributes of the class."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _PlainNamespace(Namespace):
    """`namespace(...)` in a template, without private attributes."""

    def __init__(*values: Any, **named: Any) -> None:
        attributes = dict(*values[1:], **named)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(values[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no private attribute {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def compile_template(source: str) -> jinja2.Template:
    """Compile a template in an environment that renders as that of transformers does."""
    extensions = [_GenerationTag, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _DictFactory(),
        "namespace": _PlainNamespace,
    }
    return environment.from_string(source)


def render(template: jinja2.Template, request: dict[str, Any], special_tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the text, or that it is too long."""
    limit = EXTRA_CHARACTERS + GROWTH * _count_characters(request)
    pieces, length = [], 0
    defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
    for piece in template.generate(**{**special_tokens, **defaults, **request}):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            return {"exceeded": f"it writes more than {limit} characters"}
    return {"text": "".join(pieces)}


def _count_characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(key) + _count_characters(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_count_characters, value))
    return len(value) if isinstance(value, str) else 1


def encode_message(content: Any) -> bytes:
    """Return JSON with its length; a text may have lone surrogates."""
    raw = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw


def read_message(file: IO[bytes]) -> Any:
    """Return the next message, or None at the end of the file."""
    length = int.from_bytes(head, "little") if len(head := file.read(8)) == 8 else None
    if length is None or len(raw := file.read(length)) < length:
        return None
    return json.loads(raw.decode("utf-8", "surrogatepass"))


def _answer(state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "template" not in state:
            state["template"] = compile_template(state["source"])
        return render(state["template"], request, state["variables"])
    except MemoryError:
        return {"exceeded": f"it needs more than {MEMORY_BYTES // 2**20} MiB of memory"}
    except Exception as error:  # a template may raise anything
        text = " ".join(str(error).split())[:200].rstrip(".")
        return {"error": text if " " in text else f"{type(error).__name__} {text}".strip()}


def main() -> None:
    """Answer requests until standard input ends."""
    state = read_message(sys.stdin.buffer)
    limit_process()
    while (request := read_message(sys.stdin.buffer)) is not None:
        _limit_cpu_time(state["cpu_seconds"])
        sys.stdout.buffer.write(encode_message(_answer(state, request)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
