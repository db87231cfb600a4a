"""`smelt export`: from an artifact to a verified output, or one sentence and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Smelt
from tests.export.quantized_models import encoder, network, quantized, scheme


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized language model with a tokenizer, as `smelt compress` writes it."""
    folder = tmp_path_factory.mktemp("artifact")
    model = quantized(network(), scheme("int4/32@float16"))
    model.tokenizer = character_tokenizer()
    save_artifact(model, folder)
    return folder


def test_to_compressed_tensors(artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here(
        "export", str(artifact), "--to", "compressed-tensors", "-o", str(tmp_path / "out"),
        "--json", str(tmp_path / "result.json"), "--seed", "3",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "14 pack-quantized" in done.out and "read back" in done.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["files"].keys() == {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= result["files"].keys()
    assert result["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    read = load(tmp_path / "out")
    assert read.tokenizer is not None and len(quantized_layers(read.network)) == 14


def test_to_a_single_gguf_file(artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    out = tmp_path / "made" / "small.gguf"
    done = smelt_here("export", str(artifact), "--to", "gguf", "-o", str(out), "--no-tokenizer", "--type", "f16")
    assert done.code == 0, done.err
    assert "14 Q4_0" in done.out
    assert [file.name for file in out.parent.iterdir()] == ["small.gguf"]
    assert load(out).network.config.hidden_size == 64


def test_an_exported_folder_can_be_inspected(artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    assert smelt_here("export", str(artifact), "--to", "compressed-tensors", "-o", str(tmp_path / "out")).code == 0
    assert smelt_here("inspect", str(tmp_path / "out")).code == 0


def test_export_is_deterministic(artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    for name in ("one", "two"):
        for form, out in (("compressed-tensors", name), ("gguf", f"{name}.gguf")):
            more = ["--no-tokenizer"] if form == "gguf" else []
            assert smelt_here("export", str(artifact), "--to", form, "-o", str(tmp_path / out), *more).code == 0
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


class TestBadInput:
    """Exit code 2, one sentence, and nothing written."""

    def refused(self, smelt_here: Smelt, tmp_path: Path, words: str, *arguments: str) -> None:
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        smelt_here("export", *arguments).refused(words)
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before

    def test_a_missing_folder(self, smelt_here: Smelt, tmp_path: Path) -> None:
        arguments = [str(tmp_path / "nowhere"), "--to", "gguf", "-o", str(tmp_path / "out")]
        self.refused(smelt_here, tmp_path, "no model at", *arguments)

    def test_an_existing_output(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        self.refused(smelt_here, tmp_path, "exists already", str(artifact), "--to", "gguf", "-o", str(tmp_path / "out"))

    def test_an_output_inside_a_file(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        arguments = [str(artifact), "--to", "gguf", "-o", str(tmp_path / "file" / "out")]
        self.refused(smelt_here, tmp_path, "could not be written", *arguments)

    def test_an_unknown_format(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        arguments = [str(artifact), "--to", "safe", "-o", str(tmp_path / "out")]
        self.refused(smelt_here, tmp_path, "there are compressed-tensors, gguf, onnx", *arguments)

    def test_an_option_of_another_format(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        arguments = [str(artifact), "--to", "compressed-tensors", "-o", str(tmp_path / "out"), "--type", "q8_0"]
        self.refused(smelt_here, tmp_path, "has no option type", *arguments)

    def test_an_unknown_type(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        arguments = [str(artifact), "--to", "gguf", "-o", str(tmp_path / "out"), "--type", "q1"]
        self.refused(smelt_here, tmp_path, "no GGUF type 'q1'", *arguments)

    def test_a_tokenizer_that_gguf_cannot_store(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        arguments = [str(artifact), "--to", "gguf", "-o", str(tmp_path / "out.gguf")]
        self.refused(smelt_here, tmp_path, "--no-tokenizer", *arguments)

    def test_a_model_that_the_format_cannot_express(self, smelt_here: Smelt, tmp_path: Path) -> None:
        network(num_hidden_layers=1).save_pretrained(tmp_path / "plain")
        encoder(num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
        plain, other, out = str(tmp_path / "plain"), str(tmp_path / "encoder"), str(tmp_path / "out")
        self.refused(smelt_here, tmp_path, "not quantized", plain, "--to", "compressed-tensors", "-o", out)
        self.refused(smelt_here, tmp_path, "an encoder to onnx", other, "--to", "gguf", "-o", out)

    def test_a_pruned_model_with_different_layer_widths(self, smelt_here: Smelt, tmp_path: Path) -> None:
        model = Model(network())
        part = next(part for part in model.anatomy.parts if part.kind == "ffn_channels")
        keep_units(model.network, part, range(part.units - 32))
        model = quantized(model.network, scheme("int4/32@float16"))
        (tmp_path / "pruned").mkdir()
        save_artifact(model, tmp_path / "pruned")
        for form in ("gguf", "compressed-tensors"):
            arguments = [str(tmp_path / "pruned"), "--to", form, "-o", str(tmp_path / "out")]
            self.refused(smelt_here, tmp_path, "different widths", *arguments)

    def test_a_corrupt_packed_file(self, artifact: Path, smelt_here: Smelt, tmp_path: Path) -> None:
        broken = Path(shutil.copytree(artifact, tmp_path / "broken"))
        file = broken / "model.safetensors"
        data = file.read_bytes()
        arguments = [str(broken), "--to", "compressed-tensors", "-o", str(tmp_path / "out")]
        file.write_bytes(data[:-64])
        self.refused(smelt_here, tmp_path, "cut off", *arguments)
        file.write_bytes(data)
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith(".codes"))
        save_file({**tensors, name: tensors[name].to(torch.int32)}, file, metadata={"format": "pt"})
        self.refused(smelt_here, tmp_path, name, *arguments)

    def test_an_export_that_fails_verification(
        self, artifact: Path, smelt_here: Smelt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wrongly written codes are detected by reading them back, and no folder is written."""
        monkeypatch.setattr("smelt.export.compressed_tensors._to_int32_words", lambda octets: _words_of_ones(octets))
        arguments = [str(artifact), "--to", "compressed-tensors", "-o", str(tmp_path / "out")]
        self.refused(smelt_here, tmp_path, "could not be verified", *arguments)


def _words_of_ones(octets: torch.Tensor) -> torch.Tensor:
    return torch.ones(*octets.shape[:-1], -(-octets.shape[-1] // 4), dtype=torch.int32)
