"""One method on the command line instead of a recipe file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Done, Place, Smelt


def compress(smelt_here: Smelt, place: Place, out: Path, *more: str) -> Done:
    data = ["--data", place / "text.txt", "--set", "ragged=true", "--no-speed"]
    return smelt_here("compress", place / "llama", "-o", str(out), *data, *more)


def test_a_method_and_its_parameters(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    done = compress(smelt_here, place, tmp_path / "out", "--method", "rtn", "--bits", "3", "--group-size", "16")
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "out" / "smelt.json").read_text())
    [step] = content["recipe"]["steps"]
    assert (step["method"], step["bits"], step["group_size"], step["allow_partial_group"]) == ("rtn", 3, 16, True)
    assert {scheme["weight"] for scheme in content["quantized"].values()} == {"int3-asym/16@float16"}


def test_invalid_combinations(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(smelt_here, place, out).refused("either a recipe (-r FILE) or one method")
    both = ["--method", "rtn", "-r", place / "llama.yaml"]
    compress(smelt_here, place, out, *both).refused("either a recipe (-r FILE) or one method")
    recipe = ["compress", place / "llama", "-o", str(out), "-r", place / "llama.yaml"]
    smelt_here(*recipe, "--bits", "4").refused("--bits goes with --method")
    compress(smelt_here, place, out, "--method", "rtm").refused("there is no method 'rtm'")
    compress(smelt_here, place, out, "--method", "rtn", "--bits", "9").refused("2 to 8 bits, not 9")
    compress(smelt_here, place, out, "--method", "rtn", "--set", "bits").refused("name=value")
    compress(smelt_here, place, out, "--method", "rtn", "--set", "color=red").refused("no parameter 'color'")
    assert not out.exists()
