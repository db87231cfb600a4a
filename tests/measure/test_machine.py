"""The machine description has what matters for speed and no host, user or folder name."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import pytest
import torch

from smelt.measure.machine import cpu_name, machine


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


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Intel(R)  Xeon(R)\n", "Intel(R) Xeon(R)"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nModel\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Neoverse N1"),
        ("CPU implementer\t: 0x46\nCPU part\t: 0xd0c\n", "ARM core 0xd0c of implementer 0x46"),
        ("processor\t: 0\n", ""),
    ],
)
def test_two_kinds_of_cpu_have_different_names(cpuinfo: str, name: str) -> None:
    """A latency table of one kind of ARM core must not be used on another."""
    assert cpu_name(cpuinfo) == name
