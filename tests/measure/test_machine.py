"""The machine description has what matters for speed and no host, user or folder name."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import torch

from smelt.measure.machine import machine


def test_machine_reports_hardware_and_versions() -> None:
    facts = machine()
    assert facts["cpu"] and facts["cores"] >= 1 and facts["memory_bytes"] > 10**8
    assert facts["threads"] == torch.get_num_threads()
    assert facts["torch"] == torch.__version__ and facts["python"] == platform.python_version()
    assert {"os", "transformers", "smelt"} <= set(facts)


def test_machine_has_no_personal_names() -> None:
    values = [str(value) for value in machine().values()]
    private = {platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd())} - {""}
    assert not [value for value in values for secret in private if secret in value]
    json.dumps(machine())
