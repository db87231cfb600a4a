"""Render chat templates in a separate process with limits, since a template is untrusted code."""

from __future__ import annotations

import selectors
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from smelt.errors import RequestError
from smelt.models.template_worker import encode_message, read_message
from smelt.subprocesses import python_command, python_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The process limits its own CPU time. This ends one that neither works nor ends, however busy the machine is.
_REPLY_TIMEOUT = 60.0  # seconds


class TemplateLimitError(RequestError):
    """A chat template needs too much time or memory, or writes too much text."""


class ChatTemplateRenderer:
    """The chat template of a tokenizer, rendered by a process that starts with the first request.

    Usable from several threads; they take turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cpu_seconds: int = 3) -> None:
        self._tokenizer, self._cpu_seconds = tokenizer, cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._source = ""
        self._finalizer: Any = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """Return the messages as a prompt that ends where the assistant's answer starts.

        `tools` are described to the model as its template does it; `variables` are others that a template may read.
        Raise a RequestError if the template does not accept them, and a TemplateLimitError if it does not end.
        """
        with self._lock:
            reply = self._ask({**variables, "messages": list(messages), "tools": list(tools) if tools else None})
        if "text" in reply:
            return str(reply["text"])
        if "exceeded" in reply:
            raise TemplateLimitError(
                f"the model's chat template was stopped: {reply['exceeded']}; replace it, or use another model."
            )
        raise RequestError(f"the model's chat template does not accept this conversation ({reply['error']}).")

    def close(self) -> None:
        """End the process, also while another thread waits for it."""
        if self._finalizer is not None:
            self._finalizer()

    def source(self, tools: Any = None) -> str:
        """Return the template; some models have one of their own for tools."""
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            source = self.source(request["tools"])
        except ValueError as error:  # several templates and none of them the default
            return {"error": " ".join(str(error).split())[:200]}
        process = self._process
        if process is None or process.poll() is not None or source != self._source:
            process = self._start(source)
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError):  # it ended, or was closed: there is no reply then
            process.stdin.write(encode_message(request))
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                replied = selector.select(_REPLY_TIMEOUT)
            reply: dict[str, Any] | None = read_message(process.stdout) if replied else None
            if reply is not None:
                return reply
        self.close()
        return {"exceeded": "it needs too much time or memory"}

    def _start(self, source: str) -> subprocess.Popen[bytes]:
        self.close()
        variables = self._tokenizer.special_tokens_map
        start = {"source": source, "variables": variables, "cpu_seconds": self._cpu_seconds}
        process = subprocess.Popen(
            python_command("-m", "smelt.models.template_worker"),
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the conversation, not for this process
        )
        self._process, self._source, self._finalizer = process, source, weakref.finalize(self, _stop, process)
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(encode_message(start))
        return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unsent requests
                pipe.close()
