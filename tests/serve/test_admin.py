"""Routes that change a running server: LoRA adapters that come and go, and an engine that sleeps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from smelt.errors import ConfigError
from smelt.serve.server.settings import ServeConfig
from tests.serve.server_process import NAME, Server, language_model, start
from tests.serve.test_adapters import write_adapter
from tests.serve.test_lifecycle import Reader

ADMIN, USER = "the-key-of-the-operator", "the-key-of-a-user"


@pytest.fixture(scope="module")
def changeable(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("changeable")
    (folder / "adapters").mkdir()
    for seed, name in enumerate(("poet", "clerk")):
        write_adapter(folder / "adapters" / name, language_model(), seed)
    write_adapter(folder / "outside", language_model(), 9)
    (folder / "adapters" / "link").symlink_to(folder / "outside")
    (folder / "keys").write_text(f"{ADMIN} admin=allow\n{USER}\n")
    options = ("--allow-lora-updates", "--lora-root", str(folder / "adapters"), "--enable-sleep-mode")
    options += ("--api-key-file", str(folder / "keys"), "--kv-cache-gib", "0.02", "--max-loras", "2")
    server = start(model_folder, folder, *options)
    server.http.headers["x-api-key"] = ADMIN
    yield server, folder
    assert server.end() == 0, server.log.read_text()


def load(server: Server, name: str, path: str | Path) -> int:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}).status_code


def unload(server: Server, name: str) -> int:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name}).status_code


def names(server: Server) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def text(server: Server, model: str) -> str:
    answer: str = server.complete("hello", model=model, max_tokens=16)["choices"][0]["text"]
    return answer


def test_adapters_come_and_go(changeable: tuple[Server, Path]) -> None:
    server, folder = changeable
    base = text(server, NAME)
    assert load(server, "a", "poet") == load(server, "b", folder / "adapters" / "clerk") == 200
    assert names(server) == [NAME, "a", "b"]
    poet, clerk = text(server, "a"), text(server, "b")
    assert len({base, poet, clerk}) == 3
    full = server.post("/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "poet"})
    assert full.status_code == 400 and "all 2 slots" in full.text and names(server) == [NAME, "a", "b"]
    assert load(server, "a", "clerk") == load(server, NAME, "clerk") == 400, "the name is taken"

    worker = server.state()["worker"]
    os.kill(worker, signal.SIGKILL)
    server.wait_until(lambda state: state["unhealthy_reason"])
    assert load(server, "c", "poet") == unload(server, "a") == 503, "there is no engine"
    server.wait_until(lambda state: state["worker"] != worker and not state["unhealthy_reason"])
    assert (text(server, "a"), text(server, "b"), text(server, NAME)) == (poet, clerk, base), "the new engine has them"

    assert unload(server, "a") == 200 and unload(server, "a") == 404
    assert names(server) == [NAME, "b"]
    assert server.post("/v1/completions", {"prompt": "x", "model": "a"}).status_code == 404
    assert load(server, "a", "clerk") == 200 and text(server, "a") == clerk, "no cached block of the old adapter"
    assert unload(server, "a") == unload(server, "b") == 200 and text(server, NAME) == base


def test_an_adapter_in_use_is_not_unloaded(changeable: tuple[Server, Path]) -> None:
    server, _ = changeable
    assert load(server, "busy", "poet") == 200
    reader = Reader(
        server, {"prompt": "x", "model": "busy", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
    )
    assert reader.begun.wait(60)
    refused = server.post("/v1/unload_lora_adapter", {"lora_name": "busy"})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "adapter_in_use"
    assert "busy" in names(server)
    reader.read()
    assert reader.status == 200 and reader.lines[-1] == "data: [DONE]"
    server.wait_until_idle()
    assert unload(server, "busy") == 200


def test_adapters_come_only_from_the_roots(changeable: tuple[Server, Path]) -> None:
    server, folder = changeable
    for path in (folder / "outside", "../outside", "link", "/etc", "nothing", "poet/adapter_config.json", "a\0b"):
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
        assert refused.status_code == 400 and "--lora-root" in refused.text, path
    assert load(server, "x", ".") == 400, "a folder without an adapter"
    assert names(server) == [NAME]


def test_sleep_frees_the_engine_and_wake_up_brings_it_back(changeable: tuple[Server, Path]) -> None:
    server, _ = changeable
    before, worker = text(server, NAME), server.state()["worker"]
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}
    reader = Reader(server, {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2})
    assert reader.begun.wait(60)
    assert server.post("/sleep?level=1", {}).status_code == 409, "a request runs"
    reader.read()
    server.wait_until_idle()
    assert server.post("/sleep?level=2", {}).status_code == server.post("/sleep", {}).status_code == 200
    assert not Path(f"/proc/{worker}").exists()
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    meanwhile = server.post("/v1/completions", {"prompt": "x"})
    assert meanwhile.status_code == 503 and "retry-after" in meanwhile.headers
    assert "sleeps" in server.get("/health").text
    assert server.post("/wake_up", {}).status_code == server.post("/wake_up", {}).status_code == 200
    assert server.get("/health").status_code == 200 and text(server, NAME) == before
    assert server.state()["restarts"] <= 1, "waking up is no restart"
    assert server.post("/sleep?level=3", {}).status_code == 400


def test_these_routes_are_off_by_default(server: Server) -> None:
    for path in ("/sleep", "/wake_up"):
        assert server.post(path, {}).status_code == 404
    assert server.get("/is_sleeping").status_code == 404
    assert load(server, "x", "poet") == unload(server, "x") == 404


def test_only_some_keys_may_change_the_server(changeable: tuple[Server, Path]) -> None:
    server, user = changeable[0], {"x-api-key": USER}
    assert server.post("/sleep", {}, headers=user).status_code == 403
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "x"}, headers=user).status_code == 403
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=user).status_code == 200
    assert server.get("/v1/models", headers=user).status_code == 200


def test_invalid_options(tmp_path: Path) -> None:
    for options, sentence in (
        ({"allow_lora_updates": True}, "requires --lora-root"),
        ({"allow_lora_updates": True, "lora_root": (str(tmp_path / "x"),)}, "is not a folder"),
        ({"enable_sleep_mode": True, "replicas": 2}, "not replicas"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ServeConfig(**options).resolve("x")  # type: ignore[arg-type]
