"""Loading from folders: every family round-trips, and missing weights are never invented."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from smelt.errors import ModelError
from smelt.models.artifact import save_artifact
from smelt.models.load import load, load_config, resolve, skeleton
from tests.tiny import BUILDS, ENCODER, inputs


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Write a small classifier with its tokenizer in Hugging Face format."""
    BUILDS["bert"]().save_pretrained(tmp_path / "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    hf.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def _rewrite(folder: Path, change: dict[str, str | None]) -> None:
    """Rename tensors, or remove those that map to None."""
    tensors = load_file(folder / "model.safetensors")
    kept = {change.get(name, name): tensor.clone() for name, tensor in tensors.items()}
    kept.pop(None, None)
    assert kept.keys() != tensors.keys()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _edit_config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize("family", BUILDS)
def test_every_family_round_trips(family: str, tmp_path: Path) -> None:
    network = BUILDS[family]()
    network.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert type(model.network) is type(network)
    assert not model.network.training
    assert model.source == str(tmp_path)
    given = inputs(family)
    assert torch.equal(model.network(**given).logits, network(**given).logits)


@pytest.mark.parametrize(
    ("network_class", "task"),
    [
        (hf.BertModel, "embedding"),
        (hf.BertForMaskedLM, "masked-language"),
        (hf.BertForSequenceClassification, "classification"),
    ],
)
def test_the_head_follows_the_file(network_class: type, task: str, tmp_path: Path) -> None:
    network_class(hf.BertConfig(**ENCODER)).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert type(model.network) is network_class
    assert model.task == task
    assert model.tokenizer is None


def test_the_tokenizer_is_loaded(bert: Path) -> None:
    tokenizer = load(bert).tokenizer
    assert tokenizer is not None
    assert tokenizer("good bad")["input_ids"] == [2, 5, 6, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_defaults_to_the_files(dtype: torch.dtype, bert: Path) -> None:
    hf.BertForSequenceClassification.from_pretrained(bert, dtype=dtype).save_pretrained(bert)
    _edit_config(bert, dtype="float32")  # the weights decide, not the config
    assert load(bert).network.dtype == dtype
    assert load(bert, dtype=torch.float64).network.dtype == torch.float64


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    network.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    given = inputs("llama")
    assert torch.equal(load(tmp_path).network(**given).logits, network(**given).logits)
    next(tmp_path.glob("model-00002*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-.* is missing"):
        load(tmp_path)


def test_old_names_of_norms_are_understood(bert: Path) -> None:
    expected = load(bert).network(**inputs("bert")).logits
    names = [name for name in load_file(bert / "model.safetensors") if ".LayerNorm." in name]
    _rewrite(bert, {name: name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in names})
    assert torch.equal(load(bert).network(**inputs("bert")).logits, expected)


def test_a_missing_head_is_an_error_not_a_random_one(bert: Path) -> None:
    _rewrite(bert, {"classifier.weight": None})
    with pytest.raises(ModelError, match=r"classifier\.weight is missing"):
        load(bert)


def test_a_missing_pooler_matters_only_under_a_head(bert: Path, tmp_path: Path) -> None:
    _rewrite(bert, {"bert.pooler.dense.weight": None})
    with pytest.raises(ModelError, match=r"pooler\.dense\.weight is missing"):
        load(bert)
    hf.BertModel(hf.BertConfig(**ENCODER), add_pooling_layer=False).save_pretrained(tmp_path / "encoder")
    first = load(tmp_path / "encoder")
    torch.manual_seed(1)  # the pooler's random weights must not depend on it
    second = load(tmp_path / "encoder")
    for name, tensor in first.network.state_dict().items():
        assert torch.equal(tensor, second.network.state_dict()[name]), name


def test_loading_leaves_the_random_numbers_alone(bert: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load(bert)
    assert torch.equal(torch.rand(1), expected)


def test_a_config_that_disagrees_with_the_weights(bert: Path) -> None:
    _edit_config(bert, intermediate_size=52)
    with pytest.raises(
        ModelError, match=r"intermediate\.dense\.weight is \[48, 32\], but the config expects \[52, 32\]"
    ):
        load(bert)


def test_a_mismatch_under_other_names_is_detected(bert: Path) -> None:
    """Names without the usual prefix pass the first comparison; the second catches them."""
    hf.BertModel(hf.BertConfig(**ENCODER)).save_pretrained(bert)
    _edit_config(bert, architectures=["BertForMaskedLM"], intermediate_size=52)
    with pytest.raises(ModelError, match="of another shape"):
        load(bert)


def test_the_generation_config_is_loaded(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    network.save_pretrained(tmp_path)
    values = {"eos_token_id": [7, 8], "temperature": 0.6, "do_sample": True, "custom_generate": "evil/code"}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    generation = load(tmp_path).network.generation_config
    assert generation.eos_token_id == [7, 8]
    assert generation.temperature == 0.6
    assert not hasattr(generation, "custom_generate")


def test_config_and_skeleton_allocate_no_memory(bert: Path) -> None:
    assert load_config(bert).hidden_size == 32
    empty = skeleton(bert)
    assert all(parameter.is_meta for parameter in empty.parameters())
    shapes = {name: parameter.shape for name, parameter in empty.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in load(bert).network.named_parameters()}


def test_a_skeleton_needs_no_weights(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    assert skeleton(bert).config.num_hidden_layers == 3
    with pytest.raises(ModelError, match="holds no weights"):
        load(bert)


def test_a_folder_that_smelt_wrote(bert: Path, tmp_path: Path) -> None:
    """`smelt.json` selects Smelt's own loader, which supports widths that the config cannot express."""
    model = load(bert)
    model.history.append({"method": "none"})
    (tmp_path / "artifact").mkdir()
    save_artifact(model, tmp_path / "artifact")
    loaded = load(tmp_path / "artifact")
    assert loaded.history == [{"method": "none"}]
    assert torch.equal(loaded.network(**inputs("bert")).logits, model.network(**inputs("bert")).logits)
    empty = skeleton(tmp_path / "artifact")
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert load_config(tmp_path / "artifact").hidden_size == 32


@pytest.mark.parametrize(
    "spec", ["nothing/here/at/all", "./models", "~/no-such-model", "model.gguf", "a/b.gguf", "smollm"]
)
def test_a_missing_path_error_suggests_alternatives(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no model at .*; give a bundled name \(smollm2-135m, minilm-l6\)"):
        load(spec)


def test_a_loose_file_is_refused(bert: Path) -> None:
    with pytest.raises(ModelError, match="give the model's folder"):
        load(bert / "model.safetensors")


def test_a_local_folder_takes_precedence_over_the_hub(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bert.parent / "owner").mkdir()
    bert.rename(bert.parent / "owner" / "name")
    monkeypatch.chdir(bert.parent)
    assert resolve("owner/name") == Path("owner/name")


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for loader in (load, load_config):
        with pytest.raises(ModelError, match=r"Qwen/Qwen2.5-0.5B.*hub cannot be reached") as caught:
            loader("Qwen/Qwen2.5-0.5B")
        assert "\n" not in str(caught.value)


def test_a_missing_device(bert: Path) -> None:
    for device in ("cuda:99", "abacus"):
        with pytest.raises(ModelError, match=f"'{device}' is not usable here"):
            load(bert, device=device)


def test_a_bfloat16_model_does_not_change_the_arithmetic_in_the_middle(tmp_path: Path) -> None:
    """On ARM CPUs without bfloat16 PyTorch disables oneDNN at its first such product; loading does it before."""
    BUILDS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path)
    network = load(tmp_path).network
    x, weight, bias = torch.randn(24, 32), torch.randn(64, 32), torch.randn(64)
    before = torch.nn.functional.linear(x, weight, bias)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # nor does it warn
        network(input_ids=torch.arange(5, 25)[None])
    assert torch.equal(torch.nn.functional.linear(x, weight, bias), before)
