"""A killed run continues with --resume and ends with the same bytes; mismatches are refused in one sentence."""

from __future__ import annotations

import json
import random
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from smelt.compression.methods import METHODS
from smelt.compression.pruning.magnitude import Magnitude
from tests.cli.conftest import Done, Forked, Moment, Place, Smelt, llama_recipe, resume, same_bytes

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "interrupt.py"
KILLED = -9


def compress(forked: Forked, place: Place, out: Path, *more: str, moment: Moment | None = None) -> Done:
    recipe = place / "llama.yaml"
    return forked("compress", place / "llama", "-r", recipe, "-o", str(out), "--no-speed", *more, moment=moment)


@pytest.fixture(scope="session")
def whole(place: Place, forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert compress(forked, place, out).code == 0
    return out


@pytest.fixture(scope="session")
def stopped(place: Place, forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a run killed after its step, to be copied."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    assert compress(forked, place, out, moment=Moment("step-0.json")).code == KILLED
    return out.with_name("out.partial")


def unfinished(stopped: Path, folder: Path) -> Path:
    """Copy the killed run; return its output path."""
    shutil.copytree(stopped, folder / "out.partial")
    return folder / "out"


def test_a_run_killed_at_every_file_it_writes_ends_with_the_same_bytes(
    place: Place, forked: Forked, whole: Path, tmp_path: Path
) -> None:
    """Each attempt gets a file or two further and is killed at the next rename."""
    out, seen = tmp_path / "out", set()
    for life in range(50):
        done = compress(forked, place, out, *resume(out), moment=Moment(number=2 + life % 2, before=True))
        if done.code != KILLED:
            break
        assert not out.exists()
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
        seen |= {str(path.relative_to(out.with_name("out.partial"))) for path in tmp_path.rglob("*.[js]*")}
    assert done.code == 0, done
    assert life > 7
    assert {"step-0-work/gradients-00008.safetensors", "step-0-work/block-001.safetensors", "step-0.json"} <= seen
    assert same_bytes(out, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_steps_and_a_kill_between_them(place: Place, forked: Forked, tmp_path: Path) -> None:
    content = llama_recipe(place, repair="tune")
    content["steps"].append({"method": "magnitude", "budget": {"parameters": 0.9}})
    recipe = place.recipe("two.yaml", content)
    arguments = ["compress", place / "llama", "-r", recipe, "--no-speed", "-o"]
    assert forked(*arguments, str(tmp_path / "whole")).code == 0
    assert forked(*arguments, str(tmp_path / "out"), moment=Moment("step-0.json")).code == KILLED
    assert forked(*arguments, str(tmp_path / "out"), "--resume").code == 0
    assert same_bytes(tmp_path / "out", tmp_path / "whole")
    history = json.loads((tmp_path / "out" / "smelt.json").read_text())["history"]
    assert [step["method"] for step in history] == ["fisher", "magnitude"]


def test_random_kills_in_three_kinds_of_steps(place: Place, forked: Forked, tmp_path: Path) -> None:
    """Before or after a random rename, by a fixed seed; benchmarks/interrupt.py covers all methods."""
    content = llama_recipe(place)
    content["steps"] = [
        {"method": "wanda-sp", "budget": {"parameters": 0.9}, "ffn_multiple": 16, "head_multiple": 2},
        {"method": "gptq", "group_size": 16},
        {"method": "kv-cache", "format": "int4-asym/8@float16"},
    ]
    arguments = ["compress", place / "llama", "-r", place.recipe("three.yaml", content), "--no-speed", "-o"]
    assert forked(*arguments, str(tmp_path / "whole")).code == 0
    draw, out = random.Random(0), tmp_path / "out"
    for _ in range(6):
        moment = Moment(number=draw.randint(1, 4), before=draw.random() < 0.5)
        assert forked(*arguments, str(out), *resume(out), moment=moment).code == KILLED
        assert not out.exists()
    assert forked(*arguments, str(out), *resume(out)).code == 0
    assert same_bytes(out, tmp_path / "whole")


def test_spilled_activations_of_killed_runs_do_not_accumulate(place: Place, forked: Forked, tmp_path: Path) -> None:
    recipe = place.recipe("limited.yaml", {**llama_recipe(place), "memory_limit": "1 kB"})
    out = str(tmp_path / "out")
    arguments = ["compress", place / "llama", "-r", recipe, "-o", out, "--no-speed"]
    piles = []
    for block in ("block-001.safetensors", "block-002.safetensors"):
        assert forked(*arguments, *resume(out), moment=Moment(block)).code == KILLED
        piles.append({path.name for path in (tmp_path / "out.partial").glob("activations-*")})
    assert all(piles) and not piles[0] & piles[1]
    assert forked(*arguments, "--resume").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_resumed_run_does_not_repeat_finished_steps(
    place: Place, forked: Forked, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    out = unfinished(stopped, tmp_path)
    done = compress(forked, place, out, "--resume")
    assert done.code == 0, done
    assert "step 1 of 1" not in done.err
    assert same_bytes(out, whole)


def test_without_resume_an_unfinished_run_is_reported(
    place: Place, smelt_here: Smelt, stopped: Path, tmp_path: Path
) -> None:
    out = unfinished(stopped, tmp_path)
    done = smelt_here("compress", place / "llama", "-r", place / "llama.yaml", "-o", str(out))
    done.refused("add --resume")
    assert (tmp_path / "out.partial" / "step-0.json").exists()


def test_resuming_where_there_is_nothing_to_resume(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["compress", place / "llama", "-r", place / "llama.yaml", "-o", str(tmp_path / "out"), "--resume"]
    smelt_here(*arguments).refused("there is nothing to resume at")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["recipe", "seed", "model"])
def test_resuming_another_run_is_refused(
    what: str, place: Place, smelt_here: Smelt, quick: None, stopped: Path, tmp_path: Path
) -> None:
    out = unfinished(stopped, tmp_path)
    recipe = place.recipe("other.yaml", llama_recipe(place, budget={"parameters": 0.7}))
    arguments = {
        "recipe": [place / "llama", "-r", recipe],
        "seed": [place / "llama", "-r", place / "llama.yaml", "--seed", "5"],
        "model": [place / "bert", "-r", place / "llama.yaml"],
    }
    done = smelt_here("compress", *arguments[what], "-o", str(out), "--resume")
    done.refused("of something else")
    assert not out.exists()
    assert (tmp_path / "out.partial" / "step-0.json").exists()


def test_resuming_with_other_data_in_the_same_file_is_refused(
    place: Place, forked: Forked, smelt_here: Smelt, tmp_path: Path
) -> None:
    """The checkpoint comes from the old text: mixing both would give a wrong result."""
    (tmp_path / "text.txt").write_text(Path(place / "text.txt").read_text())
    arguments = ["compress", place / "llama", "-r", place / "llama.yaml", "-o", str(tmp_path / "out")]
    arguments += ["--data", str(tmp_path / "text.txt")]
    assert forked(*arguments, moment=Moment("gradients-00000.safetensors")).code == KILLED
    (tmp_path / "text.txt").write_text(Path(place / "text.txt").read_text()[1000:])
    smelt_here(*arguments, "--resume").refused("the calibration data has changed")


def test_resuming_with_other_weights_at_the_same_path_is_refused(
    place: Place, forked: Forked, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    """Before and after would come from different models."""
    model = shutil.copytree(place / "llama", tmp_path / "model")
    arguments = ["compress", str(model), "-r", place / "llama.yaml", "-o", str(tmp_path / "out"), "--no-speed"]
    assert forked(*arguments, moment=Moment("quality-before.json")).code == KILLED
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    smelt_here(*arguments, "--resume").refused("the source model has changed")
    content[-1] ^= 1
    weights.write_bytes(content)
    assert smelt_here(*arguments, "--resume").code == 0


def test_weights_that_change_during_the_run_are_noticed(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result would be compared with another model than it was made from."""
    model = shutil.copytree(place / "llama", tmp_path / "model")
    apply = Magnitude.apply

    def replace_the_source(self: Magnitude, *arguments: Any) -> dict[str, Any]:
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes() + b"x")
        return apply(self, *arguments)

    monkeypatch.setattr(Magnitude, "apply", replace_the_source)
    recipe = place.recipe("m.yaml", {"steps": [{"method": "magnitude", "budget": {"parameters": 0.8}}]})
    done = smelt_here("compress", str(model), "-r", recipe, "-o", str(tmp_path / "out"), "--no-speed")
    done.refused("the source model has changed since the run")
    assert not (tmp_path / "out").exists()


def test_resuming_with_another_evaluation_text_in_the_same_file_is_refused(
    place: Place, forked: Forked, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    """Before and after would be measured on different texts."""
    file, text = tmp_path / "test.txt", Path(place / "text.txt").read_text()
    file.write_text(text)
    arguments = ["compress", place / "llama", "-r", place / "llama.yaml", "-o", str(tmp_path / "out"), "--no-speed"]
    arguments += ["--eval-data", str(file)]
    assert forked(*arguments, moment=Moment("step-0.json")).code == KILLED
    file.write_text(text[:-1] + "x")
    smelt_here(*arguments, "--resume").refused("the evaluation data has changed")


def test_damaged_pieces_are_computed_again(
    place: Place, smelt_here: Smelt, quick: None, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    """One flipped bit in each piece of the unfinished run."""
    names = ["quality-before.json", "quality-before.safetensors", "step-0.json"]
    names += ["step-0/model.safetensors", "step-0/smelt.json", "step-0/config.json"]
    for number, name in enumerate(names):
        out = unfinished(stopped, tmp_path / str(number))
        file = tmp_path / str(number) / "out.partial" / name
        content = bytearray(file.read_bytes())
        content[len(content) * 3 // 4] ^= 1
        file.write_bytes(content[: len(content) // 2] if number % 2 else content)
        done = smelt_here(
            "compress", place / "llama", "-r", place / "llama.yaml", "-o", str(out), "--resume", "--no-speed"
        )
        assert done.code == 0 and "is damaged" in done.err, done
        assert ("step 1 of 1" in done.err) == name.startswith("step"), done.err
        assert same_bytes(out, whole)


def test_a_damaged_manifest_is_named(place: Place, smelt_here: Smelt, stopped: Path, tmp_path: Path) -> None:
    out = unfinished(stopped, tmp_path)
    file = tmp_path / "out.partial" / "run.json"
    content = file.read_text()
    arguments = ["compress", place / "llama", "-r", place / "llama.yaml", "-o", str(out), "--resume"]
    for damaged in ("", content[: len(content) // 2], content.replace("0.8", "0.7")):
        file.write_text(damaged)
        smelt_here(*arguments).refused(f"{file} of the unfinished run is damaged")
    assert (tmp_path / "out.partial" / "step-0.json").exists()


def test_two_runs_on_one_output(place: Place, forked: Forked, whole: Path, tmp_path: Path) -> None:
    """One succeeds, the other is told in one sentence and destroys nothing."""
    out = str(tmp_path / "out")
    arguments = ["compress", place / "llama", "-r", place / "llama.yaml", "-o", out, "--no-speed"]
    runs = [running.wait() for running in [forked.start(*arguments) for _ in range(3)]]
    succeeded = [done for done in runs if done.code == 0]
    assert len(succeeded) == 1, runs
    for done in runs:
        if done.code != 0:
            done.refused("exists already" if "exists already" in done.err else "out.partial is in use by process ")
    assert same_bytes(tmp_path / "out", whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_corrected_later_step_reuses_the_finished_ones(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    content = llama_recipe(place, repair="none")
    content["steps"].append({"method": "magnitude", "budget": {"parameters": 0.9}, "max_sparsity": 0.001})
    late = place.recipe("late.yaml", content)
    content["steps"][1]["max_sparsity"] = 0.5
    corrected = place.recipe("corrected.yaml", content)
    arguments = ["compress", place / "llama", "-o", str(tmp_path / "out"), "--no-speed", "-r"]
    done = smelt_here(*arguments, late)
    done.refused("budget")
    assert "finished steps are kept in" in done.err
    done = smelt_here(*arguments, corrected, "--resume")
    assert done.code == 0 and "step 1 of 2" not in done.err and "step 2 of 2" in done.err, done
    assert (
        smelt_here("compress", place / "llama", "-o", str(tmp_path / "whole"), "--no-speed", "-r", corrected).code == 0
    )
    assert same_bytes(tmp_path / "out", tmp_path / "whole")


def test_an_unrelated_folder_at_the_work_path_is_not_touched(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious.txt").write_text("mine")
    done = smelt_here("compress", place / "llama", "-r", place / "llama.yaml", "-o", str(tmp_path / "out"), "--resume")
    done.refused("is not an unfinished run")
    assert (tmp_path / "out.partial" / "precious.txt").read_text() == "mine"


def test_the_benchmark_of_kills_has_a_recipe_for_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    recipes = runpy.run_path(str(BENCHMARK))["RECIPES"]
    covered = {step["method"] for _, steps in recipes.values() for step in steps}
    assert {name for name in METHODS if METHODS[name].__module__.startswith("smelt.")} <= covered
