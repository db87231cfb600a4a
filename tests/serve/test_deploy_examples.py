"""The examples of a deployment: what they run exists, and their times fit together."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from smelt.cli.serve import read_serve_config
from smelt.config import parse
from smelt.serve.server.middleware import PUBLIC_PATHS
from smelt.serve.server.settings import ServeConfig

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"


def serve_options(arguments: list[str]) -> ServeConfig:
    """Return the options of a `serve MODEL ...` command line; refuse flags that do not exist."""
    assert arguments[0] == "serve" and not arguments[1].startswith("-")
    flags: dict[str, Any] = {}
    rest = [part for argument in arguments[2:] for part in argument.split("=", 1)]
    for flag, value in zip(rest[::2], rest[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        flags[name] = int(value) if value.isdigit() else value
    return parse(ServeConfig, flags, "the example")


def unit_values() -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in (FOLDER / "smelt.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            values.setdefault(name, []).append(value)
    return values


def kubernetes() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def test_the_systemd_unit() -> None:
    values = unit_values()
    command = shlex.split(values["ExecStart"][0])
    assert command[0].endswith("/bin/smelt")
    options = serve_options(command[1:])
    assert options.api_key_file == "%d/keys" and values["LoadCredential"][0].startswith("keys:")
    assert options.shutdown_timeout < float(values["TimeoutStopSec"][0])
    assert options.access_log.startswith(f"/var/log/{values['LogsDirectory'][0]}/")
    hardening = ("NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "DynamicUser", "SystemCallFilter")
    assert all(name in values for name in hardening) and "MemoryDenyWriteExecute" not in values


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (FOLDER / "smelt.service").read_text().replace("/opt/smelt/bin/smelt", "/bin/true")
    (tmp_path / "smelt.service").write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "smelt.service")], capture_output=True, text=True, check=False
    )
    assert "smelt.service" not in checked.stderr, checked.stderr


def test_the_kubernetes_example() -> None:
    documents = kubernetes()
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = serve_options(container["args"])
    assert options.host == "0.0.0.0" and options.port == container["ports"][0]["containerPort"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["httpGet"]["path"] in PUBLIC_PATHS and probe["httpGet"]["port"] == container["ports"][0]["name"]
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600, "loading takes minutes"
    patience = probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"]
    assert patience > 60, "the server restarts its engine itself"
    hook = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert options.shutdown_timeout + hook < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert str(options.api_key_file).startswith(mounts["keys"]), "the keys are where they are looked for"
    service = documents["Service"]["spec"]
    assert service["selector"] == documents["Deployment"]["spec"]["selector"]["matchLabels"]
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_an_option_that_does_not_exist_is_noticed() -> None:
    from smelt.errors import SmeltError

    with pytest.raises(SmeltError, match="no key 'api_key'"):
        serve_options(["serve", "x", "--api-key=y"])
    assert read_serve_config(None, {}) == serve_options(["serve", "x"])
