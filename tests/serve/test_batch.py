"""`smelt batch` in a real process: the answers are those of the server, a killed run goes on, errors come first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smelt.errors import SmeltError
from smelt.serve.server.batch import PartialAnswers, read_batch
from tests.serve.server_process import NAME, PATIENCE, Server


def line(number: int, **fields: Any) -> str:
    body = {"prompt": f"text {number} \u2028", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body, **fields}
    return json.dumps(request, ensure_ascii=False)


def command(model: Path, source: Path, output: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "smelt.cli.main", "batch", "-i", str(source), "-o", str(output), str(model), "--device",
        "cpu", "--kv-cache-gib", "0.02", *options,
    ]  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().split("\n") if row]


def test_a_killed_batch_goes_on_and_equals_the_server(model_folder: Path, server: Server, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    wrong = {"prompt": "x", "model": "another model"}
    long = {"prompt": "long", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    rows = [
        *(line(number) for number in range(6)), "", line(6, url="/v1/chat/completions", body=chat), line(7, body=wrong),
        *(line(number, body=long) for number in range(8, 12)),
    ]  # fmt: skip
    source.write_text("\n".join(rows) + "\n")
    run = command(model_folder, source, output, "--max-num-seqs", "1")
    first = subprocess.Popen(run, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + PATIENCE
    while not partial.exists() or partial.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not output.exists(), "nothing half-written"
    kept = read(partial)[1:]
    assert 3 <= len(kept) < 12
    with partial.open("ab") as file:
        file.write(b'{"custom_id": "r1')  # a line that was cut off

    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ended.returncode == 1 and "1 failed" in ended.stderr and "by an earlier run" in ended.stderr, ended.stderr
    answers = read(output)
    assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(12)]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert all(by_id[answer["custom_id"]] == answer for answer in kept), "answers are not computed twice"
    assert not partial.exists()
    for number in range(6):
        expected = server.complete(f"text {number} \u2028", max_tokens=8, ignore_eos=True)["choices"]
        assert by_id[f"r{number}"]["response"]["body"]["choices"] == expected
    assert by_id["r6"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert by_id["r7"]["response"]["status_code"] == 404 and by_id["r0"]["response"]["status_code"] == 200
    assert by_id["r0"]["response"]["body"]["model"] == NAME and by_id["r0"]["error"] is None

    again = subprocess.run(run, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert again.returncode == 2 and "exists already" in again.stderr, "an output is never overwritten"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no requests"), ("nonsense", "line 1 of .* is not JSON"), ("{}", "no custom_id"),
        (line(0, method="GET"), "is not a POST"), (line(0, url="/state"), "is not a POST"),
        (line(0, body={"stream": True}), "without `stream`"), (line(0) + "\n" + line(0), "line 2 of .* repeats"),
    ],
)  # fmt: skip
def test_an_invalid_batch_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(SmeltError, match=sentence):
        read_batch(tmp_path / "in.jsonl")


def test_answers_to_another_batch_are_not_taken(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(0))
    with PartialAnswers(output, "x", read_batch(source)):
        pass
    assert PartialAnswers(output, "x", read_batch(source)).lines == {}
    source.write_text(line(0, body={"prompt": "changed"}))
    for model in ("x", "y"):
        with pytest.raises(SmeltError, match="another batch or model"):
            PartialAnswers(output, model, read_batch(source))
