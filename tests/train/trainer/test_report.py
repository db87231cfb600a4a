"""The training report shows the numbers of the log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from smelt.cli.app import call, program
from smelt.errors import SmeltError
from smelt.report.plots import Scale, downsample, make_scale
from smelt.report.training import render_training, summary
from smelt.train.trainer.run_folder import RunFolder
from tests.train.trainer.runs import language, run_training


def log_entry(step: int, **changes: Any) -> dict[str, Any]:
    phases = {"data": 0.001, "forward": 0.002, "backward": 0.003, "reduce": 0.004, "optimizer": 0.005}
    return {
        "step": step, "seconds": 0.5 * step, "samples": 8 * step, "loss": 4.0 / step, "lr": 0.1, "grad_norm": 1.0,
        "skipped": False, "bytes": 1000.0, "total_bytes": 1000.0 * step, "intra_node_bytes": 0.0, "density": 0.011,
        "build_up": 1.1, "padding": 0.25, "phases": phases, **changes,
    }  # fmt: skip


def metadata(method: str = "exdyna") -> dict[str, Any]:
    return {
        "config": {"steps": 4, "gradients": {"method": method}, "data": {"train": "default"}},
        "world_size": 2, "backend": "gloo", "parameters": 1234, "model_type": "llama", "decision": None,
        "machine": {"cpu": "<b>a processor</b>"},
    }  # fmt: skip


def make_run(name: str = "one", **changes: Any) -> dict[str, Any]:
    lines = [log_entry(step) for step in (1, 2, 3, 4)]
    lines[-1]["evaluation"] = {"loss": 1.25, "perplexity": 3.49}
    return {"name": name, "metadata": metadata(), "log": lines, **changes}


def curves(page: str) -> list[list[tuple[int, int]]]:
    polylines = re.findall(r'<polyline points="([^"]*)"', page)
    return [[tuple(map(int, point.split(","))) for point in points.split()] for points in polylines]  # type: ignore[misc]


def test_numbers_of_the_log_are_on_the_page() -> None:
    page = render_training([make_run()])
    for text in ("1.00", "1.25", "3.49", "4 kB", "1 kB", "1.1", "0.25", "2.0 s", "llama", "1,234"):
        assert text in page, text
    for milliseconds in ("1.000", "2.000", "3.000", "4.000", "5.000", "15.000"):
        assert f">{milliseconds}</td>" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "&lt;b&gt;a processor" in page


def test_every_graph_has_a_title_on_both_axes() -> None:
    page = render_training([make_run()])
    assert len(re.findall(r'class="axis-title y-title">[^<]+<', page)) == page.count('class="graph"') > 4
    assert len(re.findall(r'class="axis-title">[^<]+</text>', page)) == page.count('class="graph"') + 1  # the phases


def test_curves_go_through_the_points_of_the_log() -> None:
    loss = curves(render_training([make_run()]))[0]
    assert len(loss) == 4
    assert [place for place, _ in loss] == sorted(place for place, _ in loss)
    heights = [height for _, height in loss]  # 0 is above: 4, 2, 1.33, 1 of a scale from 0.85 to 4.16
    assert heights == pytest.approx(
        [10_000 * (1 - (4 / step - 0.85) / (4.1575 - 0.85)) for step in (1, 2, 3, 4)], abs=1
    )


def test_several_runs_are_distinguished_and_a_wide_axis_is_logarithmic() -> None:
    plain = make_run("plain", metadata=metadata("none"))
    plain["log"] = [log_entry(step, bytes=1e6, total_bytes=1e6 * step, padding=None) for step in (1, 2, 3, 4)]
    page = render_training([make_run(), plain])
    assert "one (exdyna)" in page and "plain (none)" in page
    assert "run0" in page and "run1" in page
    assert "Plain DDP overlaps communication with backward" in page
    assert ">10 kB<" in page and ">1 MB<" in page
    assert Scale("", 1, 100, True).position(10) == pytest.approx(0.5)
    assert make_scale("", [0.0, 0.0]).last > 0


def test_an_unfinished_run_says_so_and_a_run_without_padding_has_no_graph() -> None:
    short = make_run()
    short["log"] = [log_entry(1, padding=None)]
    page = render_training([short])
    assert "one has finished 1 of 4 steps" in page
    assert "<h3>Padding" not in page and "<h3>Density" in page
    assert summary(short)["padding"] is None


def test_many_points_are_averaged() -> None:
    points, every = downsample([(float(position), float(position % 2)) for position in range(4000)])
    assert (len(points), every) == (400, 10)
    assert all(value == 0.5 for _, value in points)


def smelt(*words: str) -> int:
    return call(program(list(words)), list(words))


def test_the_command_reads_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, method in (("sparse", "exdyna:density=0.05"), ("auto", "auto:steps=2")):
        run_training(2, language(tmp_path, gradients=method), tmp_path / name)
    assert smelt("train-report", str(tmp_path / "sparse"), "--json", str(tmp_path / "summary.json")) == 0
    page = (tmp_path / "sparse" / "report.html").read_text()
    lines = RunFolder(tmp_path / "sparse").read_log()
    report = json.loads((tmp_path / "summary.json").read_text())["sparse"]
    assert (report["steps"], report["loss"], report["bytes"]) == (6, lines[-1]["loss"], lines[-1]["total_bytes"])
    assert f"{lines[-1]['loss']:.2f}" in page and f"{lines[-1]['loss']:.2f}" in capsys.readouterr().out
    assert (
        smelt("train-report", str(tmp_path / "sparse"), str(tmp_path / "auto"), "-o", str(tmp_path / "two.html")) == 0
    )
    both = (tmp_path / "two.html").read_text()
    assert "Measurements of auto for auto" in both and "predicted exposed communication, ms" in both
    assert RunFolder(tmp_path / "auto").read_metadata()["decision"]["choices"][0] in both


@pytest.mark.parametrize(
    ("lines", "words"), [(None, "run.json does not exist"), ("", "no step"), ("{}\n", "no step of")]
)
def test_a_folder_that_is_not_a_run_is_refused(lines: str | None, words: str, tmp_path: Path) -> None:
    if lines is not None:
        RunFolder(tmp_path).write_metadata(metadata())
        (tmp_path / "run.jsonl").write_text(lines)
    with pytest.raises(SmeltError, match=words):
        smelt("train-report", str(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps(log_entry(1)) + "\n" + json.dumps(log_entry(2))[:40])
    assert RunFolder(tmp_path).read_log() == [log_entry(1)]


def test_several_runs_need_an_output_path(tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match="give -o with the page"):
        smelt("train-report", str(tmp_path), str(tmp_path))
