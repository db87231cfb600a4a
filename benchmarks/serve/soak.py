"""Mixed traffic against a real server for a long time: does anything leak?

    PYTHONPATH=src:benchmarks python benchmarks/serve/soak.py [--minutes 30] [--seed 0]

A small model with random weights is served on CPU, with LoRA adapters, API keys (one of them rate-limited) and a small
KV cache. Clients chat, complete, ask for tool calls, structured output and log-probabilities, use adapters, and send
bad requests; some leave in the middle, some are processes that are killed. Meanwhile adapters are loaded and unloaded,
and the engine's process is killed now and then, except in the last part of the run, in which its memory is measured.

Every ten seconds, and whenever the clients pause until the server is idle, each process of the server is sampled:
anonymous memory (pages of libraries are shared with other programs), threads, open files. The run fails if KV cache
blocks or admitted requests are left when idle, if threads or files grow, or if memory grows faster than `MAX_SLOPE`
after the warmup.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import RESULTS, table, write
from tests.serve.server_process import NAME, Server, language_model, start, write_model
from tests.serve.test_adapters import write_adapter

ADMIN, USER, LIMITED = "the-key-of-the-operator", "the-key-of-a-user", "the-key-with-a-limit"
ADAPTERS = ("poet", "clerk")
SAMPLE_SECONDS = 10.0
IDLE_SECONDS = 6.0  # after which the connections that clients keep open are closed
WARMUP_SHARE = 0.2  # of the time, after which growth counts
QUIET_SHARE = 0.4  # of the time at the end, without a kill of the engine
MAX_NEW_THREADS, MAX_NEW_FILES = 2, 4  # per process, idle, against the first idle sample after the warmup
MAX_SLOPE = 0.25  # MiB per minute, idle, of each process
TOOL_SCHEMA = {
    "type": "object", "properties": {"color": {"enum": ["red", "blue"]}, "fast": {"type": "boolean"}},
    "required": ["color", "fast"], "additionalProperties": False,
}  # fmt: skip
BAD_REQUESTS: tuple[Any, ...] = (
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": "x" * 5000},
    {"prompt": "x", "model": "no-such-model"},
    {"prompt": "x", "structured_outputs": {"regex": "(((a{50,200}){50,200}){50,200}){50,200}"}},
    {"nonsense": True},
    [],
)
# Killed while it reads; no package is imported, so that it starts quickly.
KILLED_CLIENT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(sys.argv[2].encode())
while connection.recv(1000):
    pass
"""
# oneDNN keeps a compiled primitive for each shape that an eager layer has had, up to 1,024: with a small cache, growth
# is a leak and no warmup. Structured outputs are few for the same reason: the engine keeps the last 128 constraints.
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
NUM_CHOICES = 4
Body = dict[str, Any]


class Traffic:
    """Clients of many kinds, which pause together."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.running, self.active, self.ended = asyncio.Event(), 0, False
        self.http = httpx.AsyncClient(base_url=server.url, timeout=120, headers={"x-api-key": USER})
        self.kinds = {
            self.chat: 4, self.streamed_chat: 4, self.completion: 4, self.tool_call: 2, self.structured: 2,
            self.logprobs: 2, self.leaver: 6, self.early_leaver: 3, self.killed_client: 2, self.adapter: 4,
            self.limited: 2, self.bad_request: 3, self.other_apis: 2,
        }  # fmt: skip

    async def run(self) -> None:
        """Send one request after the other while the clients run."""
        while not self.ended:
            await self.running.wait()
            (kind,) = self.random.choices(list(self.kinds), list(self.kinds.values()))
            self.active += 1
            try:
                outcome = await kind()
            except (TimeoutError, httpx.TimeoutException):
                outcome = "timeout"
            except httpx.TransportError as error:
                outcome = type(error).__name__
            finally:
                self.active -= 1
            self.outcomes[f"{kind.__name__}: {outcome}"] += 1
            if outcome.startswith("503"):
                await asyncio.sleep(1)  # until the engine is back, as Retry-After says

    async def pause(self) -> None:
        self.running.clear()
        while self.active:
            await asyncio.sleep(0.05)

    async def chat(self) -> str:
        return await self._post("/v1/chat/completions", self._chat_body())

    async def streamed_chat(self) -> str:
        return await self._stream("/v1/chat/completions", self._chat_body())

    async def completion(self) -> str:
        return await self._post("/v1/completions", self._body(n=self.random.choice((1, 1, 2, 4))))

    async def tool_call(self) -> str:
        function = {"name": "paint", "description": "Paint.", "parameters": TOOL_SCHEMA}
        tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        send = self.random.choice((self._post, self._stream))
        return await send("/v1/chat/completions", {**self._chat_body(), **tools, "parallel_tool_calls": False})

    async def structured(self) -> str:
        choices = [f"{word}-{self.random.randrange(NUM_CHOICES)}" for word in ("red", "green", "blue")]
        schema = {"type": "object", "properties": {"color": {"enum": choices}}, "required": ["color"]}
        fields = (
            {"json": {**schema, "additionalProperties": False}} if self.random.random() < 0.5 else {"choice": choices}
        )
        return await self._post("/v1/completions", self._body(structured_outputs=fields))

    async def logprobs(self) -> str:
        fields: Body = self.random.choice(({"logprobs": 3}, {"logprobs": 1, "echo": True}, {"prompt_logprobs": 2}))
        return await self._post("/v1/completions", self._body(**fields))

    async def leaver(self) -> str:
        return await self._stream("/v1/completions", self._body(max_tokens=1500), self.random.randrange(1, 60))

    async def early_leaver(self) -> str:
        body = self._body(max_tokens=1500)
        await asyncio.wait_for(self.http.post("/v1/completions", json=body), self.random.random() / 4)
        return "answered before it left"

    async def killed_client(self) -> str:
        body = json.dumps(self._body(max_tokens=1500, stream=True, ignore_eos=True))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {USER}\r\nContent-Length: {len(body)}\r\n"
        )
        text, port = f"{head}Content-Type: application/json\r\n\r\n{body}", self.server.url.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", KILLED_CLIENT, port, text)
        await asyncio.sleep(0.2 + self.random.random())
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return "killed"

    async def adapter(self) -> str:
        return await self._stream("/v1/completions", self._body(model=self.random.choice(ADAPTERS)))

    async def limited(self) -> str:
        return await self._post("/v1/completions", self._body(), key=LIMITED)

    async def bad_request(self) -> str:
        return await self._post("/v1/completions", self.random.choice(BAD_REQUESTS))

    async def other_apis(self) -> str:
        message = [{"role": "user", "content": self._text()}]
        path, body = self.random.choice((
            ("/v1/messages", {"messages": message, "max_tokens": 20}),
            ("/v1/responses", {"input": self._text(), "max_output_tokens": 20}),
            ("/api/chat", {"model": NAME, "messages": message, "options": {"num_predict": 20}}),
            ("/tokenize", {"prompt": self._text()}),
        ))  # fmt: skip
        return await self._post(path, body)

    def _text(self) -> str:
        return "".join(chr(self.random.randrange(32, 127)) for _ in range(self.random.randrange(1, 300)))

    def _body(self, **fields: Any) -> Body:
        return {"prompt": self._text(), "max_tokens": self.random.randrange(1, 80), "temperature": 1.0, **fields}

    def _chat_body(self) -> Body:
        messages = [{"role": "user", "content": self._text()} for _ in range(self.random.randrange(1, 4))]
        return {"messages": messages, "max_tokens": self.random.randrange(1, 80)}

    async def _post(self, path: str, body: Any, key: str = USER) -> str:
        response = await self.http.post(path, json=body, headers={"x-api-key": key})
        return self._outcome(response.status_code, response.text)

    async def _stream(self, path: str, body: Body, leave_after: int = 10**9) -> str:
        count, last = 0, ""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                return self._outcome(response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                count += 1
                if '"error"' in line:
                    return self._outcome(500, line)
                last = line or last
                if count >= leave_after:
                    return "left"
        return "200" if last == "data: [DONE]" else "cut off"

    def _outcome(self, status: int, text: str) -> str:
        """Return the status; of an error of the server, whether the engine had been killed, the only reason for one."""
        if status < 500:
            return str(status)
        if "the engine's process ended" in text or "the engine is not running" in text:
            return f"{status}, engine killed"
        self.unexpected.append(f"{status} {text[:300]}")
        return f"{status}, unexpected"


class Soak:
    """Run the traffic and disturb it, and sample the processes of the server."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.traffic = Traffic(server, options.seed)
        self.samples: list[dict[str, Any]] = []
        self.kills: list[float] = []
        self.adapter_changes: Counter[str] = Counter()
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    async def run(self) -> None:
        total = 60 * self.options.minutes
        await self._drain()
        tasks = [asyncio.create_task(self.traffic.run()) for _ in range(self.options.clients)]
        disturbers = [asyncio.create_task(task) for task in (self._change_adapters(), self._kill_engine(total))]
        next_idle = total / self.options.pauses
        while self.seconds < total:
            self.traffic.running.set()
            await asyncio.sleep(min(SAMPLE_SECONDS, max(total - self.seconds, 0.1)))
            self._sample(idle=False)
            if self.seconds > next_idle:
                await self._drain()
                next_idle += total / self.options.pauses
        for disturber in disturbers:
            disturber.cancel()
        await self._drain()
        self.traffic.ended = True
        self.traffic.running.set()
        await asyncio.gather(*tasks)
        await self.traffic.http.aclose()

    async def _drain(self) -> None:
        """Let the clients pause until the server is idle and has closed their connections."""
        await self.traffic.pause()
        until = time.monotonic() + 120
        while any((state := self._state())[name] for name in ("admitted", "blocks_used", "unhealthy_reason")):
            if time.monotonic() > until:
                break  # the check of the sample fails
            await asyncio.sleep(0.2)
        await asyncio.sleep(IDLE_SECONDS)
        self._sample(idle=True)
        print(_line(self.samples[-1]), file=sys.stderr, flush=True)
        del state

    async def _change_adapters(self) -> None:
        """Load and unload adapters; one that is in use (409) or an engine that is down is an expected refusal."""
        while True:
            name = self.traffic.random.choice(ADAPTERS)
            path, body = self.traffic.random.choice((
                ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name}),
                ("/v1/unload_lora_adapter", {"lora_name": name}),
            ))  # fmt: skip
            with suppress(httpx.TransportError):
                response = await self.traffic.http.post(path, json=body, headers={"x-api-key": ADMIN})
                self.adapter_changes[f"{path.rpartition('/')[2]}: {response.status_code}"] += 1
            await asyncio.sleep(0.5)

    async def _kill_engine(self, total: float) -> None:
        while self.seconds + self.options.kill_every < total * (1 - QUIET_SHARE):
            await asyncio.sleep(self.options.kill_every)
            os.kill(self._state()["worker"], signal.SIGKILL)
            self.kills.append(self.seconds)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.server.get("/state", headers={"x-api-key": ADMIN}).json()
        return state

    def _sample(self, *, idle: bool) -> None:
        state = self._state()
        names = ("running", "waiting", "admitted", "blocks_used", "kv_bytes_used", "restarts", "generated_tokens")
        with suppress(FileNotFoundError, ProcessLookupError):  # an engine that has just been killed
            processes = {
                _role(pid, self.server.process.pid, state["worker"]): _process(pid)
                for pid in (self.server.process.pid, *_descendants(self.server.process.pid))
            }
            sample = {name: state[name] for name in names}
            self.samples.append({"seconds": self.seconds, "idle": idle, **sample, "processes": processes})


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [process for child in children for process in (child, *_descendants(child))]


def _role(pid: int, server: int, engine: int) -> str:
    return {server: "server", engine: "engine"}.get(pid, "chat templates")


def _process(pid: int) -> dict[str, float]:
    folder = Path(f"/proc/{pid}")
    pss = re.search(r"^Pss_Anon:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    assert pss is not None
    return {
        "memory_mib": int(pss[1]) / 1024, "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]), "files": sum(1 for _ in (folder / "fd").iterdir()),
    }  # fmt: skip


def _line(sample: dict[str, Any]) -> str:
    processes = "; ".join(
        f"{role} {each['memory_mib']:.1f} MiB, {each['threads']} threads, {each['files']} files"
        for role, each in sample["processes"].items()
    )
    return f"{sample['seconds']:6.0f} s, {sample['blocks_used']} blocks, {sample['restarts']} restarts: {processes}"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line."""
    if len(points) < 3:
        return 0.0
    center_x, center_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - center_x) ** 2 for x, _ in points)
    return sum((x - center_x) * (y - center_y) for x, y in points) / spread


def summarize(soak: Soak) -> list[dict[str, Any]]:
    """Return a row for each process: the first idle sample after the warmup, the last, and the slope of memory.

    An engine begins anew when it is killed: its growth is that of the last one, whose own warmup is left out too.
    """
    idle = [sample for sample in soak.samples if sample["idle"]]
    total = soak.samples[-1]["seconds"]
    starts = {"engine": max([WARMUP_SHARE * total, *(kill + 0.1 * total for kill in soak.kills)])}
    rows = []
    for role in idle[-1]["processes"]:
        start = starts.get(role, WARMUP_SHARE * total)
        samples = [sample for sample in idle if sample["seconds"] >= start and role in sample["processes"]] or idle[-1:]
        points = [(sample["seconds"] / 60, sample["processes"][role]["memory_mib"]) for sample in samples]
        rows.append({
            "process": role, "first": samples[0]["processes"][role], "last": samples[-1]["processes"][role],
            "minutes": points[-1][0] - points[0][0], "samples": len(points), "slope_mib_per_minute": slope(points),
        })  # fmt: skip
    return rows


def failures(soak: Soak, rows: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong, if anything."""
    problems = [f"an unexpected answer: {text}" for text in soak.traffic.unexpected[:5]]
    for sample in soak.samples:
        left = {name: sample[name] for name in ("admitted", "running", "waiting", "blocks_used", "kv_bytes_used")}
        if sample["idle"] and any(left.values()):
            problems.append(f"at {sample['seconds']:.0f} s, idle, there were left: {left}")
    for row in rows:
        for name, most in (("threads", MAX_NEW_THREADS), ("files", MAX_NEW_FILES)):
            if row["last"][name] > row["first"][name] + most:
                problems.append(f"{row['process']}: {name} grew from {row['first'][name]} to {row['last'][name]}")
        if row["samples"] >= 5 and row["slope_mib_per_minute"] > MAX_SLOPE:
            problems.append(f"{row['process']}: memory grows by {row['slope_mib_per_minute']:.2f} MiB per minute")
    if soak.samples[-1]["restarts"] != len(soak.kills):
        problems.append(f"{soak.samples[-1]['restarts']} restarts of the engine, but {len(soak.kills)} kills")
    return problems


def text(soak: Soak, rows: list[dict[str, Any]], problems: list[str], name: str) -> str:
    options, last = soak.options, soak.samples[-1]
    cells = [
        [
            row["process"], f"{row['first']['memory_mib']:.1f}", f"{row['last']['memory_mib']:.1f}",
            f"{row['slope_mib_per_minute']:+.3f} over {row['minutes']:.0f} min",
            *(f"{row['first'][name]} → {row['last'][name]}" for name in ("threads", "files")),
        ]
        for row in rows
    ]  # fmt: skip
    busiest = max(soak.samples, key=lambda sample: sample["blocks_used"])
    outcomes = [[name, str(count)] for name, count in sorted((soak.traffic.outcomes + soak.adapter_changes).items())]
    idle = sum(sample["idle"] for sample in soak.samples)
    return (
        f"# Soak\n\n{options.minutes:g} minutes of {options.clients} clients against a model with random weights on "
        f"CPU, seed {options.seed}: {sum(soak.traffic.outcomes.values()):,} requests, "
        f"{last['generated_tokens']:,.0f} tokens, {len(soak.kills)} kills of the engine. "
        f"The server was idle {idle} times; "
        + ("every KV cache block was free each time, " if not problems else "")
        + f"at most {busiest['blocks_used']:.0f} blocks ({busiest['kv_bytes_used'] / 2**20:.1f} MiB) were in use in a "
        "sample under load. Blocks that only the prefix cache remembers count as free.\n\n"
        + ("**Problems**: " + "; ".join(problems) + ".\n\n" if problems else "No leak was found.\n\n")
        + "Idle, after the warmup; the engine's since the last time it was killed. Memory is anonymous memory, not "
        f"that of libraries, its slope that of the least-squares line; more than {MAX_SLOPE} MiB per minute fails.\n\n"
        + table(["process", "MiB, first", "MiB, last", "MiB per minute", "threads", "open files"], cells)
        + f"\n\n![memory over time]({name}.svg)\n\n## Answers\n\n"
        + table(["client: outcome", "requests"], outcomes)
    )


def plot(soak: Soak) -> str:
    """Draw the memory of every process over time; circles are idle samples, dashed lines kills of the engine."""
    width, height, left, top = 640, 260, 50, 20
    total = soak.samples[-1]["seconds"]
    roles = list(soak.samples[-1]["processes"])
    most = 1.15 * max(each["memory_mib"] for sample in soak.samples for each in sample["processes"].values())

    def x(seconds: float) -> float:
        return left + width * seconds / total

    def y(mebibytes: float) -> float:
        return top + height * (1 - mebibytes / most)

    label = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
    parts = [
        label.format(x(part * total), top + height + 18, "middle", f"{part * total / 60:.0f}") for part in (0, 0.5, 1)
    ]
    parts.append(label.format(left + width / 2, top + height + 36, "middle", "minutes"))
    for part in (0, 0.5, 1):
        parts.append(label.format(left - 8, y(part * most) + 4, "end", f"{part * most:.0f}"))
        parts.append(f'<path d="M{left} {y(part * most):.0f}h{width}" stroke="#ddd"/>')
    parts += [f'<path d="M{x(kill):.1f} {top}v{height}" stroke="#bbb" stroke-dasharray="3 4"/>' for kill in soak.kills]
    for number, (role, color) in enumerate(zip(roles, ("#0b6fb0", "#d55e00", "#009e73", "#cc79a7"), strict=False)):
        samples = [sample for sample in soak.samples if role in sample["processes"]]
        points = [
            (x(sample["seconds"]), y(sample["processes"][role]["memory_mib"]), sample["idle"]) for sample in samples
        ]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{color}"/>' for left, top, idle in points if idle
        ]
        parts.append(f'<path d="M{left + width + 14} {36 + 20 * number}h24" stroke="{color}" stroke-width="2"/>')
        parts.append(label.format(left + width + 44, 40 + 20 * number, "start", role))
    parts.append(label.format(left + width + 14, 40 + 20 * len(roles), "start", "MiB; dashed: kills"))
    size = f'width="{left + width + 200}" height="{top + height + 46}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


def run(options: argparse.Namespace, folder: Path) -> Soak:
    (folder / "adapters").mkdir()
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / "adapters" / name, language_model(), seed)
    (folder / "keys").write_text(f"{ADMIN} admin=allow\n{USER}\n{LIMITED} rpm=60 tpm=5000\n")
    with patch.dict(os.environ, SMALL_CACHES):
        server = start(
            write_model(folder / NAME), folder, "--kv-cache-gib", "0.01", "--client-timeout", "5",
            "--max-num-seqs", "16", "--max-restarts", "1000", "--api-key-file", str(folder / "keys"),
            "--allow-lora-updates", "--lora-root", str(folder / "adapters"),
        )  # fmt: skip
    try:
        soak = Soak(server, options)
        asyncio.run(soak.run())
    finally:
        code = server.end()
    assert code == 0 and "Traceback" not in server.log.read_text(), server.log.read_text()[-3000:]
    return soak


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kill-every", type=float, default=150, help="seconds between two kills of the engine")
    parser.add_argument("--pauses", type=int, default=20, help="how often the clients pause until the server is idle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default=f"serve_soak_{platform.machine()}", help="of the results file")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        soak = run(options, Path(folder))
    rows = summarize(soak)
    problems = failures(soak, rows)
    (RESULTS / f"{options.name}.svg").write_text(plot(soak))
    write(
        options.name, [*rows, {"kills": soak.kills, "samples": soak.samples}], text(soak, rows, problems, options.name)
    )
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
