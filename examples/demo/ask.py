"""Serve a model, ask it one question, print the answer, and stop the server.

python examples/demo/ask.py MODEL QUESTION
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def wait(server: subprocess.Popen[bytes], url: str) -> None:
    """Return when the server answers; raise if it ends first."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(url).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise SystemExit(f"the server ended with {server.returncode}")


def main(model: str, question: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-P", "-m", "smelt.cli.main", "serve", model, "--port", str(port)])
    try:
        wait(server, f"{url}/health")
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
        answer: dict[str, object] = post(f"{url}/v1/chat/completions", body)
        print(f"\n> {question}\n{answer['choices'][0]['message']['content']}\n")  # type: ignore[index]
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
