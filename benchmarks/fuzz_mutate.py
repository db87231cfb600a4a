"""Mutate files for benchmarks/fuzz_files.py: bytes, length fields, and the structure of JSON and YAML."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import yaml

_NUMBERS = [0, 1, -1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]
_VALUES: list[Any] = [
    *_NUMBERS, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), True, False, None, "", "x", "\0",
    "../../etc/passwd", "\ud800", "a" * 5000, "(a+)+$", "{{ 7 * 7 }}", "https://host.invalid/x", "9" * 400,
    [], {}, [[]], [None], {"": 0},
]  # fmt: skip
_TOKENS = ["[", "]", "{", "}", ":", ",", '"', "&a ", "*a", "<<: ", "? ", "- ", "!!python/object:os.system ",
           "!!binary ", "1:10:10", ".nan", "~", "|", ">", "%YAML 1.2", "---", "\t", "#", "'", "1e999",
           "0x", "\u2028"]  # fmt: skip


def mutate_bytes(content: bytes, other: bytes, rng: random.Random, start: int = 0, stop: int | None = None) -> bytes:
    """Apply one to four edits between `start` and `stop`; `other` is spliced from."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = min(stop or len(data), len(data))
        at = rng.randrange(min(start, end), max(end, 1) + 1)
        rng.choice(_BYTE_EDITS)(data, other, at, rng)
    return bytes(data)


def _flip_bit(data: bytearray, _: bytes, at: int, rng: random.Random) -> None:
    if at < len(data):
        data[at] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, _: bytes, at: int, rng: random.Random) -> None:
    if at < len(data):
        data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _truncate(data: bytearray, _: bytes, at: int, __: random.Random) -> None:
    del data[at:]


def _delete(data: bytearray, _: bytes, at: int, rng: random.Random) -> None:
    del data[at : at + rng.choice((1, 2, 4, 8, 64))]


def _repeat(data: bytearray, _: bytes, at: int, rng: random.Random) -> None:
    size = rng.choice((1, 4, 8, 32, 200))
    data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))


def _splice(data: bytearray, other: bytes, at: int, rng: random.Random) -> None:
    begin = rng.randrange(len(other) + 1)
    data[at : at + rng.choice((0, 8, 64))] = other[begin : begin + rng.choice((8, 64, 512))]


def _set_number(data: bytearray, _: bytes, at: int, rng: random.Random) -> None:
    """Overwrite what may be a length, a count or an offset."""
    layout = rng.choice(("<I", "<Q", ">I", "<H"))
    size = struct.calcsize(layout)
    value = rng.choice([*_NUMBERS, len(data), len(data) - at, len(data) * 2, rng.randrange(2**16)])
    data[at : at + size] = struct.pack(layout, value & (256**size - 1))


_BYTE_EDITS = [_flip_bit, _flip_bit, _set_byte, _truncate, _delete, _repeat, _splice, _set_number, _set_number]


def mutate_json(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Edit the parsed value, or the text."""
    if rng.random() < 0.2:
        return mutate_bytes(content, other, rng)
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _edit_tree(value, rng)
    if rng.random() < 0.01:  # deeper than any parser goes
        return content[:-1].rstrip() + b',"deep":' + b'{"a":[' * 5000 + b"]}" * 5000 + b"}"
    raw = json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:  # a duplicated key
        begin = raw.find(b"{", rng.randrange(len(raw) + 1))
        raw = raw[: begin + 1] + rng.choice((b'"a":1,"a":2,', b'"model_type":"gpt2",', b'"":{},')) + raw[begin + 1 :]
    return raw


def _edit_tree(value: Any, rng: random.Random) -> Any:
    containers = _containers(value)
    if not containers:
        return copy.deepcopy(rng.choice(_VALUES))
    parent = rng.choice(containers) if rng.random() < 0.5 else value
    key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    while parent is not rng.choice(containers) and isinstance(parent[key], dict | list) and parent[key]:
        parent = parent[key]  # walk down, so that small branches are edited as often as large ones
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    rng.choice(_TREE_EDITS)(parent, key, containers, rng)
    return value


def _containers(value: Any) -> list[Any]:
    """Return the objects and lists with content in a parsed value, itself included."""
    found, pending = [], [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list) and value:
            found.append(value)
            pending += value.values() if isinstance(value, dict) else value
    return found


def _replace(parent: Any, key: Any, _: list[Any], rng: random.Random) -> None:
    parent[key] = copy.deepcopy(rng.choice(_VALUES))  # a later edit must not change the list of values


def _remove(parent: Any, key: Any, _: list[Any], __: random.Random) -> None:
    del parent[key]


def _transplant(parent: Any, key: Any, containers: list[Any], rng: random.Random) -> None:
    """Put a copy of another subtree here."""
    parent[key] = json.loads(json.dumps(rng.choice(containers)))


def _nest(parent: Any, key: Any, _: list[Any], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 3, 70, 200))):
        parent[key] = [parent[key]] if rng.random() < 0.7 else {"a": parent[key]}


def _grow(parent: Any, key: Any, _: list[Any], rng: random.Random) -> None:
    value = parent[key]
    if isinstance(value, list | str):
        parent[key] = value * rng.choice((2, 10, 1000 if len(value) < 100 else 3))
    elif isinstance(value, int | float):
        parent[key] = value * rng.choice((-1, 2, 1000, 10**9)) + rng.choice((0, 1, -1))
    else:
        parent[key] = [value, value]


def _rename(parent: Any, key: Any, _: list[Any], rng: random.Random) -> None:
    if isinstance(parent, dict):
        parent[rng.choice(("", key + "x", key.upper(), "__class__", "x" * 3000))] = parent.pop(key)


_TREE_EDITS: list[Callable[[Any, Any, list[Any], random.Random], None]] = [
    _replace, _replace, _replace, _remove, _transplant, _nest, _grow, _rename,
]  # fmt: skip


def mutate_yaml(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Edit lines and tokens, or the parsed value."""
    choice = rng.random()
    if choice < 0.2:
        return mutate_bytes(content, other, rng)
    if choice < 0.6:
        value = yaml.safe_load(content)
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = _edit_tree(value, rng)
        try:
            return yaml.safe_dump(value, default_flow_style=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        except (RecursionError, yaml.YAMLError):
            return mutate_bytes(content, other, rng)
    lines = content.decode().splitlines()
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(len(lines))
        position = rng.randrange(len(lines[at]) + 1)
        lines[at] = rng.choice((lines[at], " " + lines[at], lines[at] + "\n" + lines[at], ""))
        lines[at] = lines[at][:position] + rng.choice(_TOKENS) * rng.choice((1, 1, 2, 500)) + lines[at][position:]
    return "\n".join(lines).encode()


def mutate_tokenizer(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Edit tokens, merges and switches so that most files load and are used, or edit it as any JSON."""
    if rng.random() < 0.6:
        return mutate_json(content, other, rng)
    value = json.loads(content)
    model, added = value["model"], value["added_tokens"]
    for _ in range(rng.choice((1, 2, 5, 40))):
        token = rng.choice(list(model["vocab"]))
        edit = rng.randrange(6)
        if edit == 0 and len(model["vocab"]) > 1:
            del model["vocab"][token]
        elif edit == 1:
            model["vocab"][token] = rng.choice((0, 1, len(model["vocab"]), 2**32 - 1, rng.randrange(300)))
        elif edit == 2 and model.get("merges"):
            del model["merges"][rng.randrange(len(model["merges"]))]
        elif edit == 3 and added:
            rng.choice(added).update(rng.choice(({"content": token}, {"id": rng.randrange(400)}, {"special": False})))
        elif edit == 4:
            model["unk_token"] = rng.choice((token, None, "", "\0"))
        else:
            switches = [key for key, switch in model.items() if isinstance(switch, bool)]
            model.update({key: rng.random() < 0.5 for key in switches})
    return json.dumps(value).encode()


def mutate_safetensors(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Edit the header as JSON with a correct or wrong length, or any bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    if rng.random() < 0.3:
        return mutate_bytes(content, other, rng, 0, rng.choice((8, 8 + length, len(content))))
    header = mutate_json(content[8 : 8 + length], other, rng)
    stated = len(header) if rng.random() < 0.85 else rng.choice(_NUMBERS) % 2**64
    return struct.pack("<Q", stated) + header + content[8 + length :]


def mutate_footer(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Edit the footer of a Parquet file, or any bytes."""
    (length,) = struct.unpack("<I", content[-8:-4])
    start = len(content) - 8 - length
    if rng.random() < 0.5:  # single bits of the pages or the footer: most other edits end in the parser of the footer
        data = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            _flip_bit(data, other, rng.randrange(len(data)), rng)
        return bytes(data)
    return mutate_bytes(content, other, rng, *rng.choice(((start, len(content)), (0, start))))


def mutate_gguf(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Edit the metadata and the tensor records, which precede the data, or any bytes."""
    header = content.find(b"output_norm.weight") + 64
    return mutate_bytes(content, other, rng, 0, rng.choice((32, header, header, header, len(content))))
