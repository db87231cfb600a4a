"""Messages between server and worker survive encoding; invalid messages are refused."""

from __future__ import annotations

import pytest

from smelt.serve.worker.messages import (
    AbortSample,
    EngineReady,
    NotALanguageModel,
    Pipe,
    RequestRejected,
    SampledToken,
    StartEngine,
    StartFailed,
    StepOutput,
    SubmitRequest,
    WorkerMessage,
    decode,
    encode,
    pipe_pair,
)

MESSAGES: list[WorkerMessage] = [
    StartEngine("smollm2-135m", {"max_model_len": 64, "adapters": {"poet": "x"}}),
    SubmitRequest("7", [1, 2], {"n": 2, "seed": 2**62}, -3, "00ff", "poet"),
    AbortSample("7", 1),
    EngineReady("folder", 64, 60, 257, "module", 8, 16, {"running": 1}),
    NotALanguageModel("folder", "images"),
    StartFailed("no model at é."),
    RequestRejected("7", "there is no token 999."),
    StepOutput({"running": 1}, [SampledToken("7", 0, None, None, "length", 16, 1.5)]),
    StepOutput({"running": 0}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_round_trips(message: WorkerMessage) -> None:
    assert decode(encode(message)) == message and decode(encode(message).decode()) == message
    ours, theirs = pipe_pair()
    other = Pipe(theirs.detach())
    ours.send(message)
    assert other.poll(5) and other.receive() == message and not other.poll()
    ours.close()
    with pytest.raises(EOFError):
        other.receive()


@pytest.mark.parametrize("content", [b'["Popen", {}]', b'["StartEngine", {"other": 1}]', b"{}", b"x"])
def test_invalid_messages_are_refused(content: bytes) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(content)
