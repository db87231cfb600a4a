"""`smelt verify` names every changed file and loads nothing before all match; signatures bind a folder to a key."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import smelt.compression.passport.check as check
import smelt.compression.passport.reproduce as reproduction
from smelt.compression.recipe import run
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.run import compress
from smelt.subprocesses import python_environment
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Place, Smelt
from tests.tiny import BUILDS
from tests.trained import sentences

FILES = (
    "config.json",
    "generation_config.json",
    "measurements.json",
    "model.safetensors",
    "report.html",
    "smelt.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A language model `llama` that nobody trained, a text and a recipe."""
    place = Place(tmp_path_factory.mktemp("verify"))
    BUILDS["llama"]().save_pretrained(place.folder / "llama")
    character_tokenizer().save_pretrained(place.folder / "llama")
    (place.folder / "text.txt").write_text(sentences(300))
    data = {"source": place / "text.txt", "samples": 4, "seq_len": 16, "batch_size": 2}
    step = {"method": "fisher", "budget": {"parameters": 0.8}, "repair": "none"}
    place.recipe("llama.yaml", {"data": data, "evaluate": {"context": 32, "limit": 200}, "steps": [step]})
    return place


@pytest.fixture(scope="module")
def pruned(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact; it is verified by the tests."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "verify", lambda *_: None)
        compress(place / "llama", Recipe.load(place / "llama.yaml"), out, speed=False)
    torch.set_num_threads(threads)
    return out


@pytest.fixture
def copy(pruned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pruned, tmp_path / "copy"))


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the folder was loaded")

    monkeypatch.setattr(check, "probe_folder", refuse)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key pairs: `a.pem` with `a.pub` and `b.pem` with `b.pub`."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    folder = tmp_path_factory.mktemp("keys")
    for name, curve in (("a", ec.SECP256R1()), ("b", ec.SECP384R1())):
        key = ec.generate_private_key(curve)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(public)
    return folder


def flip(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_an_unchanged_folder_matches_and_loads(smelt_here: Smelt, copy: Path, tmp_path: Path) -> None:
    done = smelt_here("verify", str(copy), "--json", str(tmp_path / "result.json"))
    assert done.code == 0, done
    assert "all 8 files match" in done.out and "signature: none" in done.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["passed"] and result["check"]["loaded"] == "same logits" and result["failures"] == []


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_in_every_file(
    smelt_here: Smelt, copy: Path, tmp_path: Path, never_loaded: None, name: str
) -> None:
    assert {path.name for path in copy.iterdir()} == {*FILES, "passport.json"}
    flip(copy / name)
    done = smelt_here("verify", str(copy), "--json", str(tmp_path / "result.json"))
    assert done.code == 3 and f"failed: different: {name}" in done.out, done
    assert json.loads((tmp_path / "result.json").read_text())["check"]["changes"]["different"] == [name]


def test_missing_unexpected_and_shortened_files_are_found(smelt_here: Smelt, copy: Path, never_loaded: None) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "sub").mkdir()
    (copy / "sub" / "modeling.py").write_text("raise SystemExit")
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1])
    done = smelt_here("verify", str(copy))
    assert done.code == 3
    problems = "different: model.safetensors; missing: tokenizer.json; unexpected: sub/modeling.py"
    assert f"failed: {problems}" in done.out, done


def test_links_are_refused(smelt_here: Smelt, copy: Path, tmp_path: Path, never_loaded: None) -> None:
    (copy / "config.json").rename(tmp_path / "config.json")
    (copy / "config.json").symlink_to(tmp_path / "config.json")
    smelt_here("verify", str(copy)).refused("is a symbolic link")


def test_a_folder_without_a_passport_is_refused(smelt_here: Smelt, place: Place, tmp_path: Path) -> None:
    smelt_here("verify", place / "llama").refused("has no passport.json")
    smelt_here("verify", str(tmp_path / "nothing")).refused("is not a folder")
    smelt_here("verify", str(tmp_path), "--source", "x").refused("go with --reproduce")


def test_a_passport_that_leads_outside_is_refused(smelt_here: Smelt, copy: Path, never_loaded: None) -> None:
    content = json.loads((copy / "passport.json").read_text())
    content["files"]["../x"] = {"bytes": 1, "sha256": "0" * 64}
    (copy / "passport.json").write_text(json.dumps(content))
    smelt_here("verify", str(copy)).refused("'../x', which is not a file inside the folder")


def test_other_logits_fail_here_and_are_not_compared_elsewhere(
    smelt_here: Smelt, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passport = json.loads((copy / "passport.json").read_text())
    computed = {"sha256": "0" * 64, "shape": passport["probe"]["shape"], "finite": True}
    monkeypatch.setattr(check, "probe_folder", lambda *_, **__: computed)
    done = smelt_here("verify", str(copy))
    assert done.code == 3 and "failed: the model computes other logits" in done.out
    passport["run"]["versions"]["torch"] = "1.0"
    (copy / "passport.json").write_text(json.dumps(passport))
    done = smelt_here("verify", str(copy))
    assert done.code == 0 and "loaded in a clean process: finite outputs" in done.out
    assert "logits are not compared: torch 1.0 then" in done.out
    for wrong, words in (({"finite": False}, "NaN or infinity"), ({"shape": [1]}, "outputs of shape [1]")):
        monkeypatch.setattr(check, "probe_folder", lambda *_, wrong=wrong, **__: {**computed, **wrong})
        done = smelt_here("verify", str(copy))
        assert done.code == 3 and words in done.out, done


def test_a_run_is_reproduced_and_a_difference_named(
    smelt_here: Smelt, quick: None, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passport = json.loads((copy / "passport.json").read_text())
    monkeypatch.setattr(check, "probe_folder", lambda *_, **__: passport["probe"])
    done = smelt_here("verify", str(copy), "--reproduce")
    assert done.code == 0 and "reproduced: 6 files, byte for byte" in done.out, done

    def other_bytes(source: str, recipe: Recipe, out: Path, **options: Any) -> None:
        compress(source, recipe, out, **options)
        flip(out / "model.safetensors")

    monkeypatch.setattr(reproduction, "compress", other_bytes)
    done = smelt_here("verify", str(copy), "--reproduce")
    assert done.code == 3 and "the repeated run wrote other bytes (different: model.safetensors)" in done.out, done


def test_inspect_shows_the_passport(smelt_here: Smelt, pruned: Path) -> None:
    done = smelt_here("inspect", str(pruned))
    assert "8 files, made from" in done.out and "by fisher" in done.out
    assert "license of the source: not stated" in done.out


def test_a_signature_binds_the_folder_to_the_key(
    smelt_here: Smelt, copy: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passport = json.loads((copy / "passport.json").read_text())
    monkeypatch.setattr(check, "probe_folder", lambda *_, **__: passport["probe"])
    smelt_here("sign", str(copy), "--key", str(keys / "c.pem")).refused("c.pem cannot be read")
    done = smelt_here("verify", str(copy), "--public-key", str(keys / "a.pub"))
    assert done.code == 3 and "failed: there is no model.sig" in done.out
    assert smelt_here("sign", str(copy), "--key", str(keys / "a.pem")).code == 0
    envelope = json.loads((copy / "model.sig").read_text())["dsseEnvelope"]
    serialization = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["serialization"]
    assert serialization["allow_symlinks"] is False and serialization["ignore_paths"] == ["model.sig"]
    done = smelt_here("verify", str(copy), "--public-key", str(keys / "a.pub"))
    assert done.code == 0 and "signature: valid" in done.out, done
    assert "signature: not checked" in smelt_here("verify", str(copy)).out
    done = smelt_here("verify", str(copy), "--public-key", str(keys / "b.pub"))
    assert done.code == 3 and "was not signed with the given key" in done.out, done
    (copy / "passport.json").write_text((copy / "passport.json").read_text() + " ")  # same content, other bytes
    done = smelt_here("verify", str(copy), "--public-key", str(keys / "a.pub"))
    assert done.code == 3 and "the signature is for other files: different: passport.json" in done.out, done


@pytest.mark.parametrize("part", ["payload", "sig", "payloadType", "mediaType", "cut"])
def test_a_damaged_signature_is_refused(
    smelt_here: Smelt, copy: Path, keys: Path, never_loaded: None, part: str
) -> None:
    assert smelt_here("sign", str(copy), "--key", str(keys / "a.pem")).code == 0
    bundle = json.loads((copy / "model.sig").read_text())
    envelope = bundle["dsseEnvelope"]
    section = {"sig": envelope["signatures"][0], "mediaType": bundle}.get(part, envelope)
    if part != "cut":
        section[part] = ("B" if section[part][8] != "B" else "C").join((section[part][:8], section[part][9:]))
        (copy / "model.sig").write_text(json.dumps(bundle))
    else:
        (copy / "model.sig").write_text("{}")
    done = smelt_here("verify", str(copy), "--public-key", str(keys / "a.pub"))
    assert done.code == 3 and "failed: " in done.out, done


def test_a_changed_folder_is_not_signed(smelt_here: Smelt, copy: Path, keys: Path) -> None:
    flip(copy / "config.json")
    smelt_here("sign", str(copy), "--key", str(keys / "a.pem")).refused("different: config.json")
    assert not (copy / "model.sig").exists()


def test_a_bad_key_is_refused_before_any_work(smelt_here: Smelt, place: Place, keys: Path, tmp_path: Path) -> None:
    arguments = ("compress", place / "llama", "-r", place / "llama.yaml", "-o", str(tmp_path / "out"))
    smelt_here(*arguments, "--sign-key", str(keys / "a.pub")).refused("is not a private key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["rsa", "secp256k1"])
def test_keys_of_other_kinds_are_refused(smelt_here: Smelt, copy: Path, keys: Path, tmp_path: Path, kind: str) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256K1())
    (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pub").write_bytes(public)
    smelt_here("sign", str(copy), "--key", str(tmp_path / "key")).refused("is not of the curve P-256, P-384 or P-521")
    smelt_here("verify", str(copy), "--public-key", str(tmp_path / "key.pub")).refused("is not of the curve P-256")


def test_compress_signs(
    smelt_here: Smelt, quick: None, place: Place, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_check_loading", lambda *_: ("same logits", None, ()))
    evaluate = {"source": place / "text.txt", "context": 32, "limit": 200}
    recipe = place.recipe("rtn.yaml", {"steps": [{"method": "rtn", "group_size": 16}], "evaluate": evaluate})
    arguments = ("compress", place / "llama", "-r", recipe, "-o", str(tmp_path / "out"), "--no-speed")
    assert smelt_here(*arguments, "--sign-key", str(keys / "b.pem")).code == 0
    done = smelt_here("verify", str(tmp_path / "out"), "--public-key", str(keys / "b.pub"))
    assert done.code == 0 and "signature: valid" in done.out, done


def reference(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the reference implementation of OpenSSF model signing."""
    command = [sys.executable, "-m", "model_signing", *arguments]
    return subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)


def test_the_reference_implementation_agrees(
    smelt_here: Smelt, copy: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts our signature, refuses a changed folder, and we accept its signature."""
    pytest.importorskip("model_signing")
    passport = json.loads((copy / "passport.json").read_text())
    monkeypatch.setattr(check, "probe_folder", lambda *_, **__: passport["probe"])
    assert smelt_here("sign", str(copy), "--key", str(keys / "b.pem")).code == 0
    signature = ("--signature", str(copy / "model.sig"))
    checked = ("verify", "key", str(copy), *signature, "--public_key", str(keys / "b.pub"))
    done = reference(*checked)
    assert done.returncode == 0, done
    flip(copy / "config.json")
    assert reference(*checked).returncode != 0
    flip(copy / "config.json")
    (copy / "model.sig").unlink()
    done = reference("sign", "key", str(copy), *signature, "--private_key", str(keys / "a.pem"))
    assert done.returncode == 0, done
    done = smelt_here("verify", str(copy), "--public-key", str(keys / "a.pub"))
    assert done.code == 0 and "signature: valid" in done.out, done
    flip(copy / "passport.json")
    assert smelt_here("verify", str(copy), "--public-key", str(keys / "a.pub")).code != 0
