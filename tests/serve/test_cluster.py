"""Two replicas on one machine with Ray Serve, started as a user would. Needs `pip install 'smeltml[cluster]'`.

Most tests share one server, since starting Ray takes seconds; its shutdown is tested as well.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from smelt.ray_start import LOCAL_ENV
from tests.serve.conftest import KEYS
from tests.serve.server_process import NAME, Server, start
from tests.serve.test_lifecycle import Reader

pytest.importorskip("ray", reason="needs Ray, which is large: pip install 'smeltml[cluster]'")
psutil = pytest.importorskip("psutil")

OPTIONS = (
    "--replicas",
    "2",
    "--replica-cpus",
    "1",
    "--kv-cache-gib",
    "0.02",
    "--shutdown-timeout",
    "5",
    "--max-num-seqs",
    "1",
)
LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 5}  # one at a time: seconds


def still_running(processes: list[Any], seconds: float) -> list[str]:
    """Return the processes that have not ended."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [" ".join(process.cmdline()) for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def cluster(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, before = tmp_path_factory.mktemp("cluster"), ray_folders()
    (folder / "keys").write_text("\n".join(KEYS))
    running = start(model_folder, folder, *OPTIONS, "--api-key-file", str(folder / "keys"), own_session=True)
    processes = []
    try:
        running.http.headers["x-api-key"] = KEYS[0]
        yield running
        running.wait_until_idle()
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert len(processes) >= 8
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        assert running.process.wait(30) == 0, running.log.read_text()
        assert still_running(processes, 5) == []
        assert ray_folders() == before
        log = running.log.read_text()
        assert "Traceback" not in log and "stopped" in log
    finally:
        if running.process.poll() is None:
            running.process.kill()


def ray_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("smelt-ray-*"))


def generated_tokens(server: Server) -> dict[str, int]:
    return {name: replica["state"]["generated_tokens"] for name, replica in server.state()["replicas"].items()}


def test_both_replicas_answer_like_a_single_engine(cluster: Server, server: Server) -> None:
    prompts = [f"prompt {number}" for number in range(24)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: cluster.complete(prompt, max_tokens=12), prompts))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [server.complete(prompt, max_tokens=12)["choices"][0]["text"] for prompt in prompts]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    cluster.wait_until(lambda state: sum(generated_tokens(cluster).values()) == tokens == state["generated_tokens"])
    assert len(generated_tokens(cluster)) == 2 and all(generated_tokens(cluster).values())
    batched = cluster.complete(prompts, max_tokens=12)  # several prompts of one request may go to different replicas
    assert [choice["text"] for choice in batched["choices"]] == texts


def test_the_official_client(cluster: Server, server: Server) -> None:
    body: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEYS[1], max_retries=0) as client:
        complete = client.chat.completions.create(**body, temperature=0)
        first, *chunks, last = client.chat.completions.create(
            **body, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        assert first.choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == complete.choices[0].message.content
        assert last.usage is not None and last.usage.completion_tokens == 30
        samples = client.chat.completions.create(**body, n=3, seed=5, logprobs=True, top_logprobs=2)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        same = client.chat.completions.create(**body, n=3, seed=5, logprobs=True, top_logprobs=2)
    assert samples.choices == same.choices and len({choice.message.content for choice in same.choices}) == 3


def test_every_route_requires_the_key(cluster: Server) -> None:
    for path in ("/", "/health", "/metrics", "/state", "/v1/models", "/-/routes", "/-/healthz", "/api/jobs/"):
        assert cluster.get(path, headers={"x-api-key": "wrong-key"}).status_code == 401, path
    assert cluster.post("/v1/completions", {"prompt": "x"}, headers={"x-api-key": ""}).status_code == 401
    assert cluster.get("/health").json() == {"status": "ok"}
    assert {cluster.get(path).status_code for path in ("/-/routes", "/-/healthz", "/api/jobs/")} == {404}


def test_a_bad_request_is_refused_and_an_abandoned_one_is_freed(cluster: Server) -> None:
    assert cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 5000}).status_code == 400
    with cluster.http.stream("POST", cluster.url + "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()  # keep a reference: when it is collected, the client disconnects
        next(lines)
        cluster.wait_until(lambda state: state["running"] == 1 and state["waiting"] > 1)
    cluster.wait_until_idle(5)


def test_metrics_cover_all_replicas(cluster: Server) -> None:
    state = cluster.wait_until_idle()
    every = [replica["state"] for replica in state["replicas"].values()]
    text = cluster.get("/metrics").text
    for name, key in (("smelt:kv_blocks", "blocks"), ("vllm:prefix_cache_queries_total", "prompt_tokens")):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert float(line.split()[-1]) == sum(replica[key] for replica in every) > 0
    assert state["capacity"] == 2 * 1 + 512
    queued = state["latency"]["queue_time"]
    assert 0 <= queued["sum"] < 60 * queued["count"]


def test_ray_listens_on_loopback_requires_a_token_and_sends_no_usage_reports(cluster: Server) -> None:
    processes = psutil.Process(cluster.process.pid).children(recursive=True)
    listening = {
        connection.laddr
        for process in [psutil.Process(cluster.process.pid), *processes]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 8
    for address in listening:
        ip = ipaddress.ip_address(address.ip)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, address
    assert 8265 not in {address.port for address in listening}, "that is the dashboard"
    (control,) = [process for process in processes if process.name() == "gcs_server"]
    assert control.environ()["RAY_USAGE_STATS_ENABLED"] == "0"
    (port,) = {result.laddr.port for result in control.net_connections() if result.status == psutil.CONN_LISTEN}
    right = control.environ()["RAY_AUTH_TOKEN"]
    assert [is_accepted(port, token) for token in (right, "0" * len(right), "")] == [True, False, False]


def is_accepted(port: int, token: str) -> bool:
    """Return whether Ray accepts a local client with this token."""
    code = f"from ray._raylet import GcsClient; print(GcsClient(address='127.0.0.1:{port}').internal_kv_keys(b'', b''))"
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    environment = {**os.environ, **auth, "RAY_gcs_rpc_server_connect_timeout_s": "2"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False).returncode == 0


class RequestLoop(threading.Thread):
    """Request a short answer in a loop."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.statuses, self.stopped = server, list[int](), threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            body = {"prompt": "hello", "max_tokens": 2}
            self.statuses.append(self.server.post("/v1/completions", body).status_code)

    def stop(self, after: int) -> None:
        """Stop after this many answers."""
        until = time.monotonic() + 300
        while len(self.statuses) < after:
            assert time.monotonic() < until
            time.sleep(0.05)
        self.stopped.set()
        self.join(20)


@pytest.mark.parametrize("victim", ["process", "worker"])
def test_a_killed_replica_is_replaced_and_the_others_continue(cluster: Server, victim: str) -> None:
    """Kill the Ray actor, or its engine process."""
    before = cluster.wait_until_idle()
    streams = []
    for _ in range(2):  # in sequence: each goes to the less busy replica
        streams.append(Reader(cluster, LONG))
        assert streams[-1].begun.wait(20)
    state = cluster.wait_until(lambda state: state["running"] == 2)
    name, killed = next(iter(state["replicas"].items()))
    os.kill(killed[victim], signal.SIGKILL)
    knocking = RequestLoop(cluster)
    after = cluster.wait_until(lambda now: len(now["replicas"]) == 2 and name not in now["replicas"], 40)
    assert cluster.get("/health").status_code == 200
    for stream in streams:
        stream.join(40)
    knocking.stop(after=4)
    assert set(knocking.statuses) == {200}, "no other request was lost"
    lost = [stream for stream in streams if '"engine_died"' in stream.lines[-2]]
    assert len(lost) == 1 and all(stream.lines[-1] == "data: [DONE]" for stream in streams)
    assert after["restarts"] == before["restarts"] + 1
    assert "died; Ray starts another" in cluster.log.read_text()
    new = next(iter(set(after["replicas"]) - set(before["replicas"])))
    until = time.monotonic() + 300
    while not generated_tokens(cluster)[new]:  # it gets requests
        assert time.monotonic() < until
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: cluster.complete("hello", max_tokens=4), range(16)))
    now = cluster.wait_until_idle()
    assert now["prefix_cache_queries"] > before["prefix_cache_queries"]
    assert now["generated_tokens"] > before["generated_tokens"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a separate Ray cluster of one machine; return its address and the credentials to join."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **LOCAL_ENV,
        "RAY_AUTH_TOKEN": "a-token-that-the-owner-of-the-cluster-chose",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    folder = tempfile.mkdtemp(prefix="ray-of-tests-")  # sockets need a short path
    options = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    log = tmp_path_factory.mktemp("head") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, f"--temp-dir={folder}", "--object-store-memory=80000000"],
            stdout=file, stderr=file, env={**os.environ, **environment},
        )  # fmt: skip
    try:
        until = time.monotonic() + 300
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", environment
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_running_cluster_is_used_and_left_unchanged(
    head: tuple[str, dict[str, str]], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, environment = head
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    running = start(model_folder, tmp_path, *OPTIONS, "--ray-address", address)
    try:
        assert running.complete("hello", max_tokens=4)["usage"]["completion_tokens"] == 4
        replicas = [psutil.Process(state["process"]) for state in running.state()["replicas"].values()]
        (raylet,) = {replica.parent() for replica in replicas}
        ours = [*replicas, *(child for replica in replicas for child in replica.children(recursive=True))]
        assert len(ours) == 4 and running.end(signal.SIGTERM) == 0, running.log.read_text()
        assert still_running(ours, 5) == []
        assert raylet.is_running() and "requires no token" not in running.log.read_text()
    finally:
        if running.process.poll() is None:
            running.process.kill()


def test_an_error_in_a_replica_is_one_sentence(
    head: tuple[str, dict[str, str]], model_folder: Path, tmp_path: Path
) -> None:
    address, environment = head
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(model_folder), "--port", "0", *OPTIONS]
    completed = subprocess.run(
        [*command, "--ray-address", address, "--lora-modules", f"poet={tmp_path}"],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    assert completed.returncode == 2 and "Traceback" not in completed.stderr, completed.stderr
    last = completed.stderr.splitlines()[-1]
    assert last.startswith("smelt: ") and "adapter_config.json" in last, completed.stderr
