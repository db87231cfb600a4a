"""Where an artifact came from: the source model with its license, the data, the versions and the machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from smelt.compression.passport.document import PASSPORT
from smelt.data import (
    Demonstrations,
    Environment,
    LabeledData,
    LabeledImages,
    MultipleChoiceData,
    PromptData,
    SpeechData,
    TextData,
)
from smelt.errors import ModelError
from smelt.fingerprint import fingerprint_of
from smelt.measure.evaluate import Data
from smelt.measure.machine import machine
from smelt.models.bundled import BUNDLED
from smelt.models.gguf import read_gguf
from smelt.models.json_file import read_object
from smelt.models.load import resolve
from smelt.strict_yaml import load_yaml

NOT_STATED = "not stated"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_MAX_CARD_BYTES = 2**20
_MAX_LICENSE = 100


def describe_source(source: str, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return the name of the source model, the hashes of its files, and its license."""
    return {
        "name": source,
        "sha256": fingerprint_of(hashes),
        "files": dict(hashes),
        "license": license_of(source),
    }


def license_of(source: str) -> str:
    """Return the license that a model states: in its card, its configuration or a license file; it is not checked."""
    if source in BUNDLED:
        return BUNDLED[source].license
    path = resolve(source, config_only=True)
    if path.is_file():
        return _as_license(read_gguf(path).metadata.get("general.license")) or NOT_STATED
    return _inherited(path) or _in_card(path / "README.md") or _in_config(path) or _in_file(path) or NOT_STATED


def describe_data(data: Data | PromptData | None) -> dict[str, Any] | None:
    """Return the name, kind, number of items and content hash of loaded data."""
    if data is None:
        return None
    digest = hashlib.sha256()
    items = 0
    for item in _items(data):
        items += 1
        for value in item:
            encoded = str(value).encode("utf-8", errors="surrogatepass")
            digest.update(b"%d:" % len(encoded))
            digest.update(encoded)
        digest.update(b"\n")
    kinds = {
        TextData: "text",
        LabeledData: "labeled",
        MultipleChoiceData: "choices",
        LabeledImages: "images",
        SpeechData: "speech",
        PromptData: "prompts",
        Demonstrations: "demonstrations",
        Environment: "environment",
    }
    return {"name": data.name, "kind": kinds[type(data)], "items": items, "sha256": digest.hexdigest()}


def calibration_warning(source: str, data: Data) -> str | None:
    """Return a warning if the passport of a model says that it was calibrated on this data."""
    path = Path(source) / PASSPORT
    sections = read_object(path).get("data") if path.is_file() else None
    used = sections.get("calibration") if isinstance(sections, dict) else None
    described = describe_data(data)
    if not isinstance(used, dict) or described is None:
        return None
    if used.get("sha256") != described["sha256"] and used.get("name") != described["name"]:
        return None
    return f"{source} was calibrated on {data.name}, so the measured quality may be too good; evaluate on other data."


def describe_run(device: str, offload: bool, created: str) -> dict[str, Any]:
    """Return what a repeated run may have otherwise: versions, machine and date."""
    facts = machine()
    versions = {name: metadata.version(name) for name in _PACKAGES}
    for name in ("smelt", "python"):
        versions[name] = facts[name]
    hardware = {name: value for name, value in facts.items() if name not in versions}
    return {"created": created, "device": device, "offload": offload, "versions": versions, "machine": hardware}


def _items(data: Data | PromptData) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, TextData):
        yield from ((document,) for document in data.documents)
    elif isinstance(data, LabeledData):
        second = data.second or ("",) * len(data)
        labels = np.asarray(data.labels).tolist()
        yield from zip(data.first, second, labels, strict=True)
    elif isinstance(data, LabeledImages):
        for index in range(len(data)):
            label = None if data.labels is None else int(data.labels[index])
            yield hashlib.sha256(data.content(index)).hexdigest(), label
    elif isinstance(data, Demonstrations):
        for observation, action in zip(data.observations, data.actions, strict=True):
            yield observation.tobytes().hex(), action.tobytes().hex()
    elif isinstance(data, Environment):
        yield from ((data.id, seed) for seed in range(data.episodes))
    elif isinstance(data, SpeechData):
        for index in range(len(data)):
            yield hashlib.sha256(data.content(index)).hexdigest(), data.texts[index]
    elif isinstance(data, PromptData):
        for messages in data.conversations:
            yield tuple(value for message in messages for value in message.values())
    else:
        for item in data.items:
            yield tuple(vars(item).values())


def _inherited(folder: Path) -> str | None:
    """Return what the passport of an artifact says about the license of its own source."""
    if not (folder / PASSPORT).is_file():
        return None
    source = read_object(folder / PASSPORT).get("source")
    return _as_license(source.get("license")) if isinstance(source, dict) else None


def _in_card(path: Path) -> str | None:
    """Return `license` of the front matter of a model card."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CARD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    match = _FRONT_MATTER.match(text.replace("\r\n", "\n"))
    if match is None:
        return None
    try:
        values = load_yaml(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    name = values.get("license")
    return _as_license(values.get("license_name") if name == "other" else name) or _as_license(name)


def _in_config(folder: Path) -> str | None:
    try:
        return _as_license(read_object(folder / "config.json").get("license"))
    except ModelError:
        return None


def _in_file(folder: Path) -> str | None:
    """Return the first line of a license file, with the file's name."""
    for path in sorted(folder.glob("LICENSE*")):
        try:
            with path.open("rb") as file:
                lines = file.read(4096).decode("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        first = next((line.strip() for line in lines if line.strip()), "")
        return f"{path.name}: {first}"[:_MAX_LICENSE] if first else path.name
    return None


def _as_license(value: Any) -> str | None:
    """Return a license as one line of text; None if it is not one."""
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        return None
    return " ".join(", ".join(names).split())[:_MAX_LICENSE]
