"""The report page: complete, self-contained, escaped, and with the numbers of the run."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from smelt.report import render, write_report

VOID = {"meta", "br"}
HOSTILE = "\"><img src=x onerror=alert(1)><script>alert('x')</script>&amp;</title></style>"


class Page(HTMLParser):
    """A parsed page: elements with their attributes and direct text, and a check that every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]

    def headings(self) -> list[str]:
        return re.findall(
            "Before and after|Quality|Speed|What was kept|Sample completions|Steps|Recipe|Papers", self.text
        )


def test_every_number_of_the_run_is_there(run: dict[str, Any]) -> None:
    text = Page(render(run)).text
    for number in (
        *("23.60", "27.10", "+14.8 % (worse)", "+13.9 % to +15.8 %"),
        *("134.5 M", "113.3 M", "−15.8 %", "106.2 M", "538 MB", "453 MB", "17.3 GMACs", "14.6 GMACs"),
        *("1.21 GB", "1.03 GB", "182.4 ± 4.5 ms", "150.7 ± 3.6 ms", "1.21×", "1.18× to 1.25×"),
        *("+3.50", "+3.31 to +3.72", "1.1390 to 1.1580", "81.23 %", "1,234", "< 0.001", "0.1876"),
        *("61.2 s", "2 min 22 s", "840 ms", "3 min 24 s", "1.89 GB", "2.34 GB", "21.2 M", "210"),
        *("1,056 / 1,536", "damping: 0.01", "context of 1,024 tokens", "keep: 0.8", "25.3 GB", "5.22.2"),
    ):
        assert number in text, number
    for words in (run["title"], run["verdict"], run["created"], run["result"], run["recipe"], run["warnings"][0]):
        assert words in text
    assert all(sample["text"] in text for sample in run["samples"])


def test_heat_map_has_a_cell_for_every_head_and_fills_the_kept_ones(run: dict[str, Any]) -> None:
    html = render(run)
    assert len(Page(html).with_class("cell")) == sum(row["heads"]["of"] for row in run["kept"])
    rows = html.split('<span class="block-name">')[1:]
    assert len(rows) == len(run["kept"])
    for expected, row in zip(run["kept"], rows, strict=True):
        cells = re.findall(r'class="cell (kept|removed)"><title>kv group (\d+): (kept|removed)</title>', row)
        assert [int(index) for _, index, _ in cells] == list(range(expected["heads"]["of"]))
        assert [int(index) for style, index, _ in cells if style == "kept"] == expected["heads"]["kept"]
        assert all(style == said for style, _, said in cells)
        assert f"{len(expected['heads']['kept'])} / {expected['heads']['of']}" in row
        share = 100 * expected["ffn_channels"]["kept"] / expected["ffn_channels"]["of"]
        assert f'width="{share:.2f}%" height="12" rx="2" class="kept"' in row


def test_the_page_loads_nothing_from_the_network(run: dict[str, Any]) -> None:
    html = render(run)
    assert re.findall(r"https?://[^\"]*", html) == ["https://arxiv.org/abs/2204.09656"]
    page = Page(html)
    assert ("a", {"href": "https://arxiv.org/abs/2204.09656", "rel": "noreferrer"}) in page.elements
    names = {name for name, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image"}
    assert not [attributes for _, attributes in page.elements if {"src", "srcset", "xlink:href"} & set(attributes)]
    assert "url(" not in html and "@import" not in html
    policies = [attributes for _, attributes in page.elements if attributes.get("http-equiv")]
    assert [policy["content"] for policy in policies] == ["default-src 'none'; style-src 'unsafe-inline'"]


def poisoned(value: Any) -> Any:
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    return value


def test_hostile_text_in_every_field_is_escaped(run: dict[str, Any]) -> None:
    hostile = poisoned(run)
    for free_keys in (hostile["machine"], hostile["quality"]["settings"], hostile["steps"][0]["facts"]):
        free_keys[HOSTILE] = HOSTILE
    page, clean = Page(render(hostile)), Page(render(run))
    strange = {name for name, _ in page.elements} - {name for name, _ in clean.elements}
    assert not strange
    assert not [attributes for _, attributes in page.elements if any(key.startswith("on") for key in attributes)]
    assert page.text.count(HOSTILE) > 30, "the text itself is shown"


@pytest.mark.parametrize("words", ["see javascript:alert(1)", 'arXiv 2204.09656" onclick="x', "http://evil.example"])
def test_only_an_arxiv_number_becomes_a_link(run: dict[str, Any], words: str) -> None:
    run["papers"] = [{"method": "m", "citation": words}]
    links = [attributes["href"] for name, attributes in Page(render(run)).elements if name == "a"]
    assert links == (["https://arxiv.org/abs/2204.09656"] if "2204" in words else [])


def test_only_title_and_model_are_needed() -> None:
    page = Page(render({"title": "a title", "model": "a model"}))
    assert page.headings() == [] and "a title" in page.text and "a model" in page.text
    assert not page.with_class("figure") and not page.with_class("warning") and not page.with_class("verdict")


PARTS = {
    "size": ["Before and after"],
    "quality": ["Before and after", "Quality"],
    "speed": ["Before and after", "Speed"],
    "memory": ["Before and after"],
    "kept": ["What was kept"],
    "samples": ["Sample completions"],
    "steps": ["Steps"],
    "recipe": ["Recipe"],
    "papers": ["Papers"],
}


@pytest.mark.parametrize("part", PARTS)
def test_each_section_works_alone(run: dict[str, Any], part: str) -> None:
    page = Page(render({"title": "t", "model": "m", part: run[part]}))
    assert page.headings() == PARTS[part]


def test_a_missing_verdict_is_generated(run: dict[str, Any]) -> None:
    del run["verdict"]
    expected = (
        "Parameters 134.5 M → 113.3 M (−15.8 %); perplexity on wikitext2 23.60 → 27.10 (+14.8 %, worse); "
        "1.21× faster (forward, batch 1, 128 tokens, cpu)"
    )
    assert expected in Page(render(run)).text
    run["size"]["parameters"]["after"] = run["size"]["parameters"]["before"]  # as after quantization
    run["size"]["block_parameters"]["after"] = run["size"]["block_parameters"]["before"]
    assert "Weight bytes 538 MB → " in Page(render(run)).text


def test_a_size_that_stayed_the_same_is_left_out(run: dict[str, Any]) -> None:
    run["size"]["parameters"]["after"] = run["size"]["parameters"]["before"]
    run["size"]["macs"]["after"] = run["size"]["macs"]["before"] + 1  # the same as text
    del run["kept"], run["verdict"]
    text = Page(render(run)).text
    assert "MACs" not in text and "134.5 M" not in text and "106.2 M" in text
    run["quality"]["after"] = run["quality"]["before"]
    assert "unchanged" in Page(render(run)).text, "that quality did not change is a result"


def test_a_data_file_is_named_without_its_folders(run: dict[str, Any]) -> None:
    run["quality"]["data"] = "/home/someone/data/reviews/dev.csv"
    text = Page(render(run)).text
    assert "someone" not in text and text.count("on reviews/dev.csv") >= 2


def test_a_model_folder_is_named_without_its_parents(run: dict[str, Any]) -> None:
    assert "someone" not in Page(render(run | {"model": "/home/someone/models/tiny"})).text


def test_a_smaller_kv_cache_is_a_size(run: dict[str, Any]) -> None:
    """Two steps that change its format are one row: before the first and after the last."""
    facts = [
        {"kv_cache_bits_per_token_before": before, "kv_cache_bits_per_token_after": after}
        for before, after in ((8192, 4096.0), (4096.0, 2048.0))
    ]
    run |= {"steps": [{"name": "kv-cache", "facts": each} for each in facts] + [{"name": "rtn"}], "size": {}}
    del run["verdict"]
    text = Page(render(run)).text
    assert "KV cache per token 1.02 kB → 256 B (−75.0 %)" in text
    assert text.count("KV cache per token") == 4, "the sentence, a figure, a row and the title of its bars"


def test_bars_show_every_quantity_before_and_after(run: dict[str, Any]) -> None:
    html = render(run)
    table = html[html.index("Before and after") : html.index("<h2>Quality")]
    bars = re.findall(r'width="([\d.]+)%" height="8" rx="2" class="(before|after)"', table)
    assert len(bars) == 2 * len(re.findall("<tr>", table[table.index("<tbody>") :]))
    assert bars[:2] == [(f"{100 * 23.6 / 27.1:.2f}", "before"), ("100.00", "after")]


def test_the_recipe_is_folded(run: dict[str, Any]) -> None:
    assert re.search(r"<details><summary>[^<]*</summary><pre>seed: 0", render(run))


def test_facts_of_a_step_are_said_in_words(run: dict[str, Any]) -> None:
    facts = {
        "repaired": 60, "gave_up": False, "bytes_before": 538_060_032, "bytes_after": 171_000_000, "head_untied": True,
        "widths_without_hadamard": [], "error_share": {"underflow": 0.25, "rounding": 0.75}, "some_new_fact": [3, 5],
        "block_parameters_before": 7, "loss_before": 2.5,
    }  # fmt: skip
    run["steps"] = [{"name": "m", "facts": facts}]
    html = render(run)
    said = re.findall("<div>([^<]*)</div>", html[html.index('class="facts"') :])
    assert said == [
        "projections refitted: 60",
        "weight bytes: 538 MB → 171 MB",
        "head untied from the embedding",
        "error share: underflow 0.25, rounding 0.75",
        "some new fact: 3, 5",
        "loss before: 2.5",
    ]


def test_curves_of_a_step_that_trains_are_drawn(run: dict[str, Any]) -> None:
    assert "Training" not in render(run)
    run["steps"][0]["facts"] = {"loss_curve": [[1, 4.0], [2, 1.0]], "mean_alpha_curve": [[1, 10.0]], "final_loss": 1.0}
    page = Page(render(run))
    name = run["steps"][0]["name"]
    assert f"loss of {name}" in page.text and f"mean alpha of {name}" in page.text and "training step" in page.text
    assert "loss curve" not in page.text and "final loss: 1" in page.text
    lines = [attributes["points"] for tag, attributes in page.elements if tag == "polyline"]
    assert any(points is not None and len(points.split()) == 2 for points in lines)


def test_predictions_of_a_classifier_are_shown(run: dict[str, Any]) -> None:
    run["predictions"] = [{"text": "<fine> film", "label": "positive", "before": "positive", "after": "negative"}]
    del run["samples"]
    page = Page(render(run))
    assert "Sample predictions" in page.text and "<fine> filmpositivepositivenegative" in page.text


def warnings_of(run: dict[str, Any], **speed: Any) -> list[str]:
    entry = {**run["speed"][0], **speed}
    html = render({"title": "t", "model": "m", "speed": [entry]})
    return re.findall(r"<b>Not faster\. </b>([^<]*)</div>", html)


def test_a_slowdown_is_reported(run: dict[str, Any]) -> None:
    name = "forward, batch 1, 128 tokens, cpu"
    assert warnings_of(run) == []
    assert warnings_of(run, ratio=0.8, ratio_low=0.78, ratio_high=0.82) == [f"{name}: 1.25× slower."]
    assert warnings_of(run, ratio=1.01, ratio_low=0.97, ratio_high=1.05) == [f"{name}: no measurable change."]
    unmeasured = {"ratio": None, "ratio_low": None, "ratio_high": None}
    assert warnings_of(run, **unmeasured) == []
    swapped = {"before": run["speed"][0]["after"], "after": run["speed"][0]["before"]}
    assert warnings_of(run, **unmeasured, **swapped) == [f"{name}: 1.21× slower."]


def test_a_served_model_shows_what_its_users_see() -> None:
    row = {"streams": 8, "tokens_per_second": 1234.5, "first_token_ms": 20.0, "share_of_roofline": 0.25}
    after = {
        "backend": "fused-gpu",
        "layers": {"hopper": 7, "dense bfloat16": 1},
        "copy_bandwidth": 4e12,
        "rows": [row],
        "layer_backends": {
            **{f"model.layers.{block}.mlp.up_proj": "hopper" for block in range(7)},
            "model.layers.7.mlp.up_proj": "dense bfloat16",
            "lm_head": "dense bfloat16",
        },
    }
    before = {"layer_backends": {"model.layers.0.mlp.up_proj": "dense float16"}}
    entry = {"name": "served, 8 streams, chat", "device": "cuda", "ratio": 0.9}
    entry |= {"before": {**row, "median_ms": 6.0, "tokens_per_second": 1371.0}, "after": {**row, "median_ms": 6.5}}
    engine = {"before": before, "after": after, "slowdown": "slower at 8: <cause>"}
    run = {"title": "t", "model": "m", "speed": [entry], "engine": engine}
    text = Page(render(run)).text
    for expected in (
        "1,234 tokens/s, first token 20 ms", "1,371 tokens/s", "7 hopper, 1 dense bfloat16", "(fused-gpu)",
        "25% at 8", "4,000 GB/s", "Slower at 8: <cause>.", "hopper (7), dense bfloat16 (1)", "dense float16 (1)",
    ):  # fmt: skip
        assert expected in text
    assert "mlp.up_proj" in text and "layers.7" not in text and "lm_head" in text
    del engine["before"], after["layer_backends"]  # of a report that was written before layers were listed
    assert "7 hopper" in Page(render(run)).text


@pytest.mark.parametrize("timed", [True, False])
def test_what_the_speed_guard_decided_is_said(run: dict[str, Any], timed: bool) -> None:
    run["steps"] = [{"name": "a"}, {"name": "b", "speed_guard": {"sentence": "guard: 3 of <21> layers stay"}}]
    if not timed:
        del run["speed"]
    assert "Guard: 3 of <21> layers stay." in Page(render(run)).text
    times = {"became": "int8", "time_ratios": {"int4": 1.3, "int8": 0.8}}
    run["steps"][1]["speed_guard"]["layers"] = {f"model.layers.{i}.mlp.up_proj": times for i in range(2)}
    text = Page(render(run)).text
    assert "int4 1.30x, int8 0.80x" in text and text.count("mlp.up_proj") == 1


def test_a_share_changes_by_a_difference_also_from_one(run: dict[str, Any]) -> None:
    run["quality"] = {"metric": "accuracy", "before": 1.0, "after": 0.9, "higher_is_better": True}
    assert "−0.1000 (worse)" in Page(render(run)).text


def test_a_quality_change_within_its_interval_is_not_called_worse(run: dict[str, Any]) -> None:
    run["quality"].update(metric="accuracy", higher_is_better=True, before=0.9002, after=0.8945)
    run["quality"]["comparison"] = {"difference": -0.0057, "low": -0.0126, "high": 0.0011}
    assert "−0.0057 (within noise)" in Page(render(run)).text
    run["quality"]["comparison"]["high"] = -0.001
    assert "−0.0057 (worse)" in Page(render(run)).text
    run["quality"].update(higher_is_better=False)
    assert "−0.0057 (better)" in Page(render(run)).text


def test_a_model_that_broke_is_still_reported(run: dict[str, Any]) -> None:
    run["quality"].update(after=float("inf"))
    run["quality"]["comparison"].update(difference=float("inf"), high=float("inf"), kl=float("nan"))
    run["speed"][0]["after"] = {"median_ms": 0.0}
    run["speed"][0]["before"] = {"median_ms": 0.0, "spread_ms": None}
    text = Page(render(run)).text
    assert "not finite" in text and "(worse)" in text


def test_samples_are_shown_side_by_side() -> None:
    samples = [("before", "b1"), ("before", "b2"), ("after", "a1"), ("after", "a2")]
    text = Page(
        render({"title": "t", "model": "m", "samples": [{"who": who, "text": text} for who, text in samples]})
    ).text
    assert text.index("b1") < text.index("a1") < text.index("b2") < text.index("a2")


def test_flips_may_be_a_count_or_a_fraction(run: dict[str, Any]) -> None:
    run["quality"]["comparison"]["flips"] = 0.0234
    assert "flipped answers2.34 %" in Page(render(run)).text


def test_an_integer_graph_says_what_was_checked_and_where_the_noise_is() -> None:
    ratios = {f"layer.{index} (linear)": 60.0 - index for index in range(10)}
    run = {"title": "t", "model": "m", "steps": [{"name": "integer-only", "facts": {"sqnr_db": ratios}}]}
    assert "signal to quantization noise" not in render(run)
    page = render(run | {"integer_graph": {"tensors": {"int8": 1200, "int32": 34}}})
    assert "saw 1,234 tensors" in page and "none is floating point: 1,200 int8, 34 int32" in page
    worst_first = page.index("layer.9 (linear)") < page.index("layer.2 (linear)") < page.index("<summary>all 10 layers")
    assert worst_first and page.count("layer.9 (linear)") == 2 and page.count("layer.0 (linear)") == 1
    floats = render(run | {"integer_graph": {"tensors": {"int8": 1, "float32": 2}}})
    assert "floating point: float32" in floats and "none is" not in floats


def test_channels_of_a_convolution_network() -> None:
    blocks = [{"block": 0, "channels": [{"of": 64, "kept": 32}, {"of": 128, "kept": 128}]}]
    page = Page(render({"title": "t", "model": "m", "kept": blocks}))
    assert "32 / 64" in page.text and "128 / 128" in page.text and not page.with_class("cell")


def test_rendering_does_not_modify_the_run(run: dict[str, Any]) -> None:
    before = copy.deepcopy(run)
    assert render(run) == render(run) and run == before


def test_report_is_written_atomically(run: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    run["samples"][0]["text"] = "half a character \ud83d"
    write_report(run, path)
    written = path.read_text(encoding="utf-8")
    assert written.startswith("<!doctype html>") and written.rstrip().endswith("</html>")
    del run["title"]
    with pytest.raises(KeyError):
        write_report(run, path)
    assert path.read_text(encoding="utf-8") == written
    path.unlink()
    path.mkdir()
    run["title"] = "cannot replace a folder"
    with pytest.raises(OSError):
        write_report(run, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
