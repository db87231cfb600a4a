"""`smelt compress --method carve-experts` from files of text: saved, verified, inspected, evaluated, quantized; what
cannot work is one sentence.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smelt.models.carved_experts import carved_layers, describe_carving
from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.cli.conftest import Place, Smelt
from tests.compression.pruning.test_carve_experts import counting

QUICK = ["samples=8", "seq_len=32", "router_epochs=4", "batch_size=4"]
SETTINGS = [part for setting in QUICK for part in ("--set", setting)]


@pytest.fixture
def domains(place: Place, tmp_path: Path) -> str:
    """Return a text and a column of a table."""
    rows = [{"question": "x", "answer": counting(300)}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"domains=[{place / 'text.txt'},{tmp_path}/sums.jsonl:answer]"


@pytest.mark.usefixtures("quick")
def test_carving_from_the_command_line(place: Place, smelt_here: Smelt, domains: str, tmp_path: Path) -> None:
    out = str(tmp_path / "carved")
    data = ["--data", place / "text.txt", "--samples", "8", "--length", "32"]
    done = smelt_here(
        "compress", place / "llama", "--method", "carve-experts", "--set", domains, *SETTINGS, *data, "-o", out,
        "--no-speed",
    )  # fmt: skip
    assert done.code == 0, done.err
    (step,) = json.loads((tmp_path / "carved" / "measurements.json").read_text())["steps"]
    assert step["facts"]["routed_shares"] and step["facts"]["mask_stability"] > 0.5
    assert "1 of 2 experts" in smelt_here("inspect", out).out
    assert smelt_here("verify", out).code == 0
    assert smelt_here("eval", out, "--data", place / "text.txt", "--limit", "200").code == 0
    smelt_here("export", out, "--to", "gguf", "-o", str(tmp_path / "x.gguf")).refused("carved into experts")

    model = load(out)
    assert len(carved_layers(model.network)) == 3
    prompt = [5, 6, 7, 8]
    wanted = model.network.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    engine = Engine(out, expert_slots=1)
    request = engine.submit(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
    while engine.busy:
        engine.step()
    assert request.output == wanted[0, 4:].tolist()

    small = str(tmp_path / "small")
    quantize = ["--method", "rtn", "--set", "bits=8", "--set", "group_size=-1", *data, "-o", small, "--no-speed"]
    done = smelt_here("compress", out, *quantize)
    assert done.code == 0, done.err
    again = load(small)
    assert describe_carving(again.network) == describe_carving(model.network)
    layers = quantized_layers(again.network)
    assert "model.layers.0.mlp.experts.1.down_proj" in layers and "model.layers.0.mlp.down_proj" in layers
    assert not any(path.startswith("expert_router") for path in layers)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "needs at least two"),
        (["domains=[a.txt]"], "needs at least two"),
        (["domains=[no-such-file.txt,{text}]"], "no-such-file.txt"),
        (["domains=[{text},{text}]", "experts=3"], "2 domains are too few for 3 experts"),
        (["domains=[{text},{text}]", "width=1.5"], "width of carve-experts"),
        (["domains=[{text},{text}]", "samples=8", "seq_len=32"], "nothing to route"),
    ],
)
def test_what_cannot_be_carved(
    settings: list[str], words: str, place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    flags = [part for each in settings for part in ("--set", each.format(text=place / "text.txt"))]
    data = ["--data", place / "text.txt", "--samples", "8", "--length", "32"]
    out = ["-o", str(tmp_path / "out"), "--no-speed"]
    smelt_here("compress", place / "llama", "--method", "carve-experts", *flags, *data, *out).refused(words)


@pytest.mark.usefixtures("quick")
def test_other_models_are_refused(place: Place, smelt_here: Smelt, domains: str, tmp_path: Path) -> None:
    arguments = ["--method", "carve-experts", "--set", domains, "-o", str(tmp_path / "out")]
    smelt_here("compress", place / "bert", *arguments, "--data", place / "rows.jsonl").refused("from decoders")
