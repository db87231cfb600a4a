"""Messages between server and worker survive encoding; invalid messages are refused."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from smelt.serve.worker import messages
from smelt.serve.worker.messages import (
    AbortSample,
    Channel,
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
    other = Pipe(theirs)
    ours.send(message)
    other.send(message)
    assert other.receive() == ours.receive() == message
    ours.close()
    with pytest.raises(EOFError):
        other.receive()


def test_a_channel_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a client that has sent half a message, nor for one that does not read."""
    theirs, connection = socket.socketpair()
    channel, frame = Channel(connection), 4 + len(encode(MESSAGES[1]))
    with theirs:
        Pipe(theirs.dup()).send(MESSAGES[0])
        assert channel.wait() == MESSAGES[0] and channel.receive() == []
        Pipe(theirs.dup()).send(MESSAGES[1])
        content = connection.recv(frame)
        for part in (content[:3], content[3:20], content[20:] + content):
            before = channel.receive()
            theirs.sendall(part)
        assert before == [] and channel.receive() == [MESSAGES[1], MESSAGES[1]]
        long = StartFailed("x" * 3_000_000)
        for _ in range(3):
            channel.send(long)
        assert not channel.flush() and not channel.closed
        reader = Pipe(theirs.dup())
        flushing = threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(channel.flush, True)])
        flushing.start()
        assert [reader.receive() for _ in range(3)] == [long] * 3
        flushing.join()
        monkeypatch.setattr(messages, "MAX_UNSENT_BYTES", 10_000_000)
        for _ in range(5):
            channel.send(long)
        assert channel.closed, "a client that reads nothing must not fill the memory"
    channel.close()


def test_a_channel_notices_that_the_client_has_gone() -> None:
    theirs, connection = socket.socketpair()
    channel = Channel(connection)
    Pipe(theirs.dup()).send(MESSAGES[0])
    theirs.close()
    assert channel.receive() == [MESSAGES[0]] and channel.closed
    with pytest.raises(EOFError):
        channel.wait()
    channel.send(MESSAGES[0])
    channel.close()


@pytest.mark.parametrize("content", [b'["Popen", {}]', b'["StartEngine", {"other": 1}]', b"{}", b"x"])
def test_invalid_messages_are_refused(content: bytes) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(content)
