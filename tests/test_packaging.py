"""The distribution: its name, its extras, and every message that tells how to install it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from smelt.errors import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_messages_name_our_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert install_command() == "pip install smeltml"
    assert install_command("serve") == "pip install 'smeltml[serve]'"


def test_every_extra_in_a_message_exists() -> None:
    named = {
        extra
        for path in SOURCES
        for extra in re.findall(r"install_command\(['\"]([\w-]+)['\"]\)", path.read_text(encoding="utf-8"))
    }
    assert named >= {"serve", "ray", "parquet"}
    assert named <= set(PROJECT["optional-dependencies"])


def test_no_message_installs_a_package_of_somebody_else() -> None:
    """`smelt` on PyPI is not ours, so only `install_command` writes such a line."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for path in (*SOURCES, *pages):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?smelt(?!ml)", text), path
        assert not re.search(r"\bsmelt\[[a-z]", text), path
