"""`widths: uniform`: every layer ends with the same width, so that other programs open the pruned model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import smelt
from smelt.errors import RecipeError
from tests.cli.conftest import Place, Smelt, bert_recipe, llama_recipe

PROBE = torch.tensor([[1, 5, 9, 20, 3, 7]])
EVERYWHERE = "opens in: Smelt, transformers, vLLM, llama.cpp (smelt export --to gguf)"


@pytest.mark.parametrize(
    ("method", "repair"),
    [("fisher", "full"), ("magnitude", "none"), ("flap", "none"), ("wanda-sp", "none"), ("taylor", "tune")],
)
def test_a_pruned_model_opens_in_transformers_and_exports_to_gguf(
    method: str, repair: str, place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    step = {"method": method, "repair": repair, "widths": "uniform", "ffn_multiple": 4}
    recipe = place.recipe("uniform.yaml", llama_recipe(place, **step))
    out = tmp_path / "out"
    planned = smelt_here("plan", place / "llama", "-r", recipe, "--json", str(tmp_path / "plan.json"))
    assert planned.code == 0 and "llama.cpp" in json.loads((tmp_path / "plan.json").read_text())["opens_in"][-1]
    done = smelt_here("compress", place / "llama", "-r", recipe, "-o", str(out), "--no-speed")
    assert done.code == 0, done
    assert EVERYWHERE in done.out and EVERYWHERE in (out / "report.html").read_text()
    model = smelt.load(str(out))
    removed = json.loads((out / "measurements.json").read_text())["size"]["block_parameters"]
    assert removed["after"] <= 0.8 * removed["before"]
    assert len({tuple(part.units for part in block.parts) for block in model.anatomy.blocks}) == 1
    (out / "smelt.json").rename(tmp_path / "smelt.json")  # transformers must not need it
    network = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(network(PROBE).logits, model.network(PROBE).logits)
    (tmp_path / "smelt.json").rename(out / "smelt.json")
    gguf = tmp_path / "small.gguf"
    assert smelt_here("export", str(out), "--to", "gguf", "--no-tokenizer", "-o", str(gguf)).code == 0
    with torch.no_grad():
        torch.testing.assert_close(smelt.load(str(gguf)).network(PROBE).logits, network(PROBE).logits)


def test_an_encoder_keeps_its_heads_and_opens_in_transformers(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    recipe = place.recipe("uniform.yaml", bert_recipe(place, widths="uniform", ffn_multiple=4))
    done = smelt_here("compress", place / "bert", "-r", recipe, "-o", str(tmp_path / "out"), "--no-speed")
    assert done.code == 0, done
    assert json.loads((tmp_path / "out" / "measurements.json").read_text())["opens_in"] == ["Smelt", "transformers"]
    model = smelt.load(str(tmp_path / "out"))
    assert all(part.units == part.original_units for part in model.anatomy.parts if part.kind == "heads")
    (tmp_path / "out" / "smelt.json").unlink()
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(network(PROBE).logits, model.network(PROBE).logits)


def test_free_widths_open_in_smelt_only(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("plan", place / "llama", "-r", place / "llama.yaml", "--json", str(tmp_path / "plan.json"))
    assert done.code == 0 and json.loads((tmp_path / "plan.json").read_text())["opens_in"] == ["Smelt"]


@pytest.mark.parametrize(
    ("bits", "programs"),
    [
        (8, ["Smelt", "transformers (smelt export --to compressed-tensors)", "vLLM ("]),  # GGUF has no groups of 16
        (None, ["Smelt", "transformers", "vLLM", "llama.cpp ("]),
    ],
)
def test_the_plan_of_a_quantized_result(
    bits: int | None, programs: list[str], place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    content = llama_recipe(place)
    content["steps"] = [{"method": "rtn", "bits": bits, "group_size": 16}] if bits else [{"method": "kv-cache"}]
    content["steps"][0] |= {} if bits else {"format": "int4-asym/16@float16"}
    recipe = place.recipe("quantized.yaml", content)
    done = smelt_here("plan", place / "llama", "-r", recipe, "--json", str(tmp_path / "plan.json"))
    assert done.code == 0, done
    opens_in = json.loads((tmp_path / "plan.json").read_text())["opens_in"]
    assert len(opens_in) == len(programs)
    assert all(found.startswith(expected) for found, expected in zip(opens_in, programs, strict=True)), opens_in


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"method": "flap", "widths": "uniform"}, "drop the biases"),
        ({"widths": "uniform", "intercept": True}, "drop the biases"),
        ({"widths": "uniform", "budget": {"latency": 0.8}}, "no latency budget"),
        ({"widths": "equal"}, "widths"),
    ],
)
def test_what_other_programs_could_not_open_is_refused(
    step: dict[str, object], words: str, place: Place, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        smelt.plan(place / "llama", smelt.Recipe.parse(llama_recipe(place, **step)), tmp_path)
