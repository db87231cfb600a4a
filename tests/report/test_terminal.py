"""The terminal table: the same rows as the page, with text shown verbatim."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from smelt.report import summary_table
from smelt.report.terminal import sample_lines


def render_text(run: dict[str, Any]) -> str:
    console = Console(width=120, record=True, force_terminal=False, file=io.StringIO())
    console.print(summary_table(run))
    return console.export_text()


def test_table_contains_the_run(run: dict[str, Any]) -> None:
    lines = render_text(run).splitlines()

    def cells(label: str) -> list[str]:
        line = next(line for line in lines if label in line)
        return [cell.strip() for cell in line.strip("│┃ ").split("│")][1:]

    assert cells("perplexity on wikitext2") == ["23.60", "27.10", "+14.8 % (worse)"]
    assert cells("parameters ") == ["134.5 M", "113.3 M", "−15.8 %"]
    assert cells("parameters in blocks") == ["106.2 M", "85.0 M", "−20.0 %"]
    assert cells("weight bytes") == ["538 MB", "453 MB", "−15.8 %"]
    assert cells("MACs, 128 tokens") == ["17.3 GMACs", "14.6 GMACs", "−15.7 %"]
    assert cells("peak memory") == ["1.21 GB", "1.03 GB", "−14.9 %"]
    assert cells("forward, batch 1, 128 tokens, cpu") == ["182.4 ± 4.5 ms", "150.7 ± 3.6 ms", "1.21× faster"]


def test_a_size_that_stayed_the_same_is_left_out(run: dict[str, Any]) -> None:
    run["size"]["macs"]["after"] = run["size"]["macs"]["before"]
    text = render_text(run)
    assert "MACs" not in text and "weight bytes" in text


def test_markup_in_a_name_is_shown_verbatim(run: dict[str, Any]) -> None:
    run["title"] = "[red]model[/red]"
    run["quality"]["metric"] = "[bold]metric[/]"
    text = render_text(run)
    assert "[red]model[/red]" in text and "[bold]metric[/] on wikitext2" in text


def test_an_empty_run_is_an_empty_table() -> None:
    assert summary_table({"title": "t", "model": "m"}).row_count == 0


def test_the_caption_says_what_computed_the_layers(run: dict[str, Any]) -> None:
    row = {"streams": 64, "share_of_roofline": 0.25}
    run["engine"] = {
        "after": {"backend": "fused", "layers": {"[hopper]": 7}, "copy_bandwidth": 4e12, "rows": [row]},
    }
    text = " ".join(render_text(run).split())
    for expected in ("(fused)", "Linear layers: 7 [hopper]", "25% at 64", "4,000 GB/s of a large copy"):
        assert expected in text


def test_samples_are_one_line_each() -> None:
    samples = [{"who": "after", "prompt": "Once", "text": " upon\n\na time"}]
    items = [{"text": "a\nb", "label": 1, "before": 1, "after": guess} for guess in (0, 1)]
    run = {"title": "t", "model": "m", "samples": samples, "predictions": items}
    assert sample_lines(run) == ["after: Once … upon a time", "1 → 0 (label 1): a b"]
