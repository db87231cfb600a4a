"""Several API keys share one server: fair queueing, rate limits, and who may set a priority."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from smelt.errors import SmeltError
from smelt.serve.engine.blocks import BlockPool
from smelt.serve.engine.kv_cache_manager import PagedCacheManager
from smelt.serve.engine.request import Request, RequestId, Tenant
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import Scheduler
from smelt.serve.server import rate_limit
from smelt.serve.server.auth import ApiKey, read_keys
from smelt.serve.server.errors import ApiError
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.rate_limit import RateLimits
from smelt.serve.server.service import AdmissionControl
from smelt.serve.server.shared_table import SharedTable
from tests.serve.server_process import PATIENCE, Server, start

KEYS = {"greedy": "the-greedy-key", "modest": "the-modest-key", "limited": "the-limited-key"}


def make_scheduler(max_num_seqs: int = 1) -> Scheduler:
    pool = BlockPool(4096, 4, enable_prefix_caching=False)
    return Scheduler(PagedCacheManager(pool), max_num_batched_tokens=4096, max_num_seqs=max_num_seqs)


def add(scheduler: Scheduler, tenant: str, name: int, *, prompt: int = 4, output: int = 4, weight: int = 1) -> Request:
    request = Request(
        RequestId(f"{tenant}{name}"), [1] * prompt, SamplingParams(), prompt + output, tenant=Tenant(tenant, weight)
    )
    scheduler.add(request)
    return request


def start_order(scheduler: Scheduler, count: int) -> list[str]:
    """Return the names of the next requests to start; each ends before the next one starts."""
    names = []
    for _ in range(count):
        (chunk,) = scheduler.schedule().chunks
        names.append(chunk.request.id.name)
        scheduler.finish(chunk.request, "stop")
    return names


def test_one_tenant_with_500_waiting_requests_does_not_delay_the_first_of_another() -> None:
    scheduler = make_scheduler()
    for number in range(500):
        add(scheduler, "a", number)
    assert start_order(scheduler, 3) == ["a0", "a1", "a2"]
    for number in range(3):
        add(scheduler, "b", number)
    assert start_order(scheduler, 6) == ["b0", "a3", "b1", "a4", "b2", "a5"]


def test_shares_follow_weights_and_tokens() -> None:
    scheduler = make_scheduler()
    for number in range(90):
        add(scheduler, "a", number, weight=2)
        add(scheduler, "b", number)
        add(scheduler, "c", number, prompt=16, output=4)  # 20 tokens each instead of 8
    started = [name[0] for name in start_order(scheduler, 85)]
    # Nothing is generated here, so the costs are those of the prompts: 4, 4 and 16 tokens.
    counts = {tenant: started.count(tenant) for tenant in "abc"}
    assert counts["a"] == pytest.approx(2 * counts["b"], abs=2)
    assert counts["b"] == pytest.approx(2.5 * counts["c"], abs=2), "the waiting ones are tagged by their estimates"


def test_requests_of_one_tenant_never_overtake_each_other() -> None:
    """Also if the estimates were wrong, which lowers or raises what the tenant owes."""
    generator = random.Random(0)
    scheduler = make_scheduler(max_num_seqs=3)
    started: dict[str, list[int]] = {"a": [], "b": []}
    numbers = {"a": 0, "b": 0}
    for _ in range(600):
        action = generator.random()
        if action < 0.5:
            tenant = generator.choice("ab")
            add(scheduler, tenant, numbers[tenant], prompt=generator.randint(1, 40), output=generator.randint(1, 900))
            numbers[tenant] += 1
        elif action < 0.7 and scheduler.waiting:
            scheduler.finish(generator.choice(scheduler.waiting), "abort")
        else:
            for chunk in scheduler.schedule().chunks:
                if chunk.start == 0:
                    started[chunk.request.id.name[0]].append(int(chunk.request.id.name[1:]))
                chunk.request.num_inflight = 0
                chunk.request.tokens.append(1)
            if scheduler.running and generator.random() < 0.7:
                scheduler.finish(generator.choice(scheduler.running), "stop")
    for order in started.values():
        assert len(order) > 20 and order == sorted(order)
    assert all(tenant.num_waiting >= 0 for tenant in scheduler.fair_queue._tenants.values())


def test_a_tenant_that_aborts_its_requests_owes_nothing_for_them() -> None:
    scheduler = make_scheduler()
    waiting = [add(scheduler, "a", number) for number in range(100)]
    for number in range(10):
        add(scheduler, "b", number)
    for request in waiting:
        scheduler.finish(request, "abort")
    add(scheduler, "a", 100)
    assert start_order(scheduler, 2) in (["b0", "a100"], ["a100", "b0"])


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_rate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rate_limit, "time", clock)
    limits = RateLimits({b"k": ApiKey("k", rpm=2, tpm=120), b"free": ApiKey("free")}, SharedTable(2))
    limits.admit_request(b"k")
    limits.admit_request(b"k")
    with pytest.raises(ApiError) as refused:
        limits.admit_request(b"k")
    assert refused.value.status == 429 and refused.value.headers == {"retry-after": "30"}
    clock.now += 30
    limits.admit_request(b"k")
    limits.admit_tokens(b"k", 100)
    limits.charge_tokens(b"k", 80)  # 60 more than were left
    with pytest.raises(ApiError, match="120 tokens per minute") as refused:
        limits.admit_tokens(b"k", 10)
    assert refused.value.headers == {"retry-after": "35"}
    clock.now += 100
    limits.admit_tokens(b"k", 10_000)  # more than a minute's worth: allowed when the bucket is full
    for _ in range(1000):
        limits.admit_request(b"free")
        limits.admit_tokens(b"free", 1000)


def test_one_key_cannot_fill_the_queue() -> None:
    admission = AdmissionControl(100, ServerMetrics("x", 64), SharedTable(3), [b"a", b"b", b"c"])

    def fill(key: bytes) -> int:
        count = 0
        while True:
            try:
                admission.acquire(1, key)
            except ApiError as error:
                assert error.status == 429 and error.code == "queue_full" and "retry-after" in error.headers
                return count
            count += 1

    counts = [fill(key) for key in (b"a", b"b", b"c")]
    assert counts[0] == 75 and all(count >= 1 for count in counts)
    admission.release(75, b"a")
    assert fill(b"a") > 0
    alone = AdmissionControl(100, ServerMetrics("x", 64), SharedTable(1), [b"a"])
    alone.acquire(100, b"a")


def test_options_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("plain-long-key\nanother-long-key name=team priority=allow rpm=60 tpm=10000 weight=3\n")
    assert list(read_keys(path).values()) == [
        ApiKey("key-1"),
        ApiKey("team", allow_priority=True, rpm=60, tpm=10000, weight=3),
    ]
    for option in ("rpm=0", "rpm=x", "priority=yes", "name=", "name=a/b", "color=red", "word"):
        path.write_text(f"a-very-secret-key {option}\n")
        with pytest.raises(SmeltError, match=r"line 1 of .* has an invalid option") as refused:
            read_keys(path)
        assert "secret" not in str(refused.value).replace(str(path), "")


@pytest.fixture(scope="module")
def shared(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shared")
    options = {"greedy": "", "modest": "priority=allow", "limited": "rpm=2 tpm=30"}
    (folder / "keys").write_text("".join(f"{key} name={name} {options[name]}\n" for name, key in KEYS.items()))
    server = start(
        model_folder, folder, "--api-key-file", str(folder / "keys"), "--max-num-seqs", "1", "--max-queued", "100"
    )
    yield server
    assert server.end() == 0


def header(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def test_a_key_with_many_requests_does_not_delay_another(shared: Server) -> None:
    """Of a server that runs one request at a time."""
    finished: list[str] = []

    def send(name: str, body: dict[str, object]) -> None:
        answer = shared.post("/v1/completions", body, headers=header(name))
        assert answer.status_code == 200, answer.text
        finished.append(name)

    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    worker = shared.get("/state", headers=header("modest")).json()["worker"]
    with shared.paused(worker):  # until all are queued
        greedy = [threading.Thread(target=send, args=("greedy", body)) for _ in range(20)]
        for thread in greedy:
            thread.start()
        _wait_for_admitted(shared, 20)
        modest = threading.Thread(target=send, args=("modest", body))
        modest.start()
        _wait_for_admitted(shared, 21)
    for thread in (*greedy, modest):
        thread.join(PATIENCE)
    assert len(finished) == 21 and finished.index("modest") <= 2


def _wait_for_admitted(server: Server, count: int) -> None:
    while server.get("/state", headers=header("modest")).json()["admitted"] < count:
        pass


def test_a_priority_needs_permission(shared: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "priority": -1}
    refused = shared.post("/v1/completions", body, headers=header("greedy"))
    assert refused.status_code == 403 and refused.json()["error"]["param"] == "priority"
    assert shared.post("/v1/completions", {**body, "priority": 0}, headers=header("greedy")).status_code == 200
    assert shared.post("/v1/completions", body, headers=header("modest")).status_code == 200


def test_limits_per_minute(shared: Server) -> None:
    body = {"prompt": "x" * 20, "max_tokens": 20, "ignore_eos": True}
    assert shared.post("/v1/completions", body, headers=header("limited")).status_code == 200
    tokens = shared.post("/v1/completions", body, headers=header("limited"))
    requests = shared.post("/v1/completions", body, headers=header("limited"))
    assert tokens.status_code == requests.status_code == 429
    assert "30 tokens per minute" in tokens.text and "2 requests per minute" in requests.text
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in (tokens, requests))
    assert all(answer.json()["error"]["type"] == "rate_limit_error" for answer in (tokens, requests))
    assert shared.get("/v1/models", headers=header("limited")).status_code == 200, "only what works counts"
    assert shared.post("/v1/completions", body, headers=header("greedy")).status_code == 200
