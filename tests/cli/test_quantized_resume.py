"""A killed quantization run resumes block by block and ends with the same bytes."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Forked, Moment, Place, resume, same_bytes


def test_a_resumed_quantization_ends_with_the_same_bytes(place: Place, forked: Forked, tmp_path: Path) -> None:
    recipe = place.recipe(
        "gptq.yaml",
        {
            "data": {"source": place / "text.txt", "samples": 16, "seq_len": 32, "batch_size": 2},
            "evaluate": {"context": 64, "limit": 1500},
            "steps": [{"method": "gptq", "group_size": 16}],
        },
    )
    arguments = ["compress", place / "llama", "-r", recipe, "--no-speed", "-o"]
    out = str(tmp_path / "out")
    uninterrupted = forked(*arguments, str(tmp_path / "whole"))
    assert uninterrupted.code == 0, uninterrupted
    for block in ("block-0.safetensors", "block-1.json"):  # before and after its facts are written
        assert forked(*arguments, out, *resume(out), moment=Moment(block)).code == -9
        assert (tmp_path / "out.partial" / "step-0-work" / block).exists()
        assert not (tmp_path / "out").exists()
    resumed = forked(*arguments, out, "--resume")
    assert resumed.code == 0, resumed
    assert same_bytes(tmp_path / "out", tmp_path / "whole")
