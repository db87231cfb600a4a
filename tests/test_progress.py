"""Progress: bars on a terminal, lines elsewhere, and the time left of a whole run."""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import redirect_stderr

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

import smelt.progress
from smelt.progress import Loop, NullProgress, ProgressBars, ProgressLines, RunClock, duration, progress_bars


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_planned_and_then_corrected_by_what_phases_took() -> None:
    clock = Clock()
    state = RunClock(clock)
    state.schedule({"load": 10.0, "step": 30.0, "save": 20.0})
    state.enter("load")
    assert state.left() == 60.0
    clock.now += 5
    assert state.left() == 55.0 and state.fraction() == pytest.approx(5 / 60)
    clock.now += 15  # twice the plan, so everything is expected to take twice as long
    state.enter("step")
    assert state.left() == 2 * (30 + 20)
    clock.now += 30
    assert state.left() == 70.0 and state.fraction() == pytest.approx(50 / 120)
    state.enter("save")  # 50 s for planned 40 s
    assert state.left() == pytest.approx(20 * 50 / 40)


def test_a_loop_that_is_slower_than_planned_raises_the_time_left() -> None:
    clock = Clock()
    state = RunClock(clock)
    state.schedule({"step": 10.0, "save": 5.0})
    state.enter("step")
    loop = Loop("blocks", 10, clock())
    state.loops.append(loop)
    clock.now, loop.done = clock.now + 40, 4  # 10 s per block
    assert state.left() == 6 * 10 + 5
    assert state.line() == "38 %, step, blocks 4 of 10, about 65 s left"
    loop.description = "step"  # methods name their loop after themselves
    assert state.line() == "38 %, step, 4 of 10, about 65 s left"


def test_without_phases_the_outermost_loop_counts() -> None:
    clock = Clock()
    state = RunClock(clock)
    state.loops += [Loop("windows", 4, clock()), Loop("inner", 100, clock(), done=99)]
    assert state.left() is None and state.line() == "windows 0 of 4, 0 s so far"
    clock.now, state.loops[0].done = clock.now + 30, 1
    assert state.line() == "25 %, windows 1 of 4, about 2 min left"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (4800, "1 h 20 min")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_lines_appear_while_a_single_item_takes_long() -> None:
    """The lines come from a thread: an item of many minutes must not silence them."""
    with redirect_stderr(io.StringIO()) as printed, ProgressLines(interval=0.05) as progress:
        progress.schedule({"step 1": 100.0})
        progress.enter("step 1")
        for _ in progress.track(["one"], "blocks"):
            time.sleep(0.4)
    lines = printed.getvalue().splitlines()
    line = re.compile(r"  \d+ %, step 1(, blocks 0 of 1)?, about \d+ (s|min) left")  # on a busy machine some come later
    assert all(map(line.fullmatch, lines)) and sum("blocks 0 of 1" in each for each in lines) >= 3, lines


def test_no_line_appears_in_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", printed := io.StringIO())
    with progress_bars() as progress:
        assert list(progress.track(range(3), "blocks")) == [0, 1, 2]
    assert printed.getvalue() == ""


def test_lines_are_twenty_seconds_apart() -> None:
    assert smelt.progress.INTERVAL == 20.0


def test_bars_show_the_loop_and_the_run() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with RichProgress(console=console) as rich:
        progress = ProgressBars(rich)
        progress.schedule({"load": 1.0, "step": 9.0})
        progress.enter("step")
        for number in progress.track(range(4), "blocks"):
            descriptions = {task.description: task for task in rich.tasks if task.visible}
            assert descriptions["blocks"].completed == number and "all phases, now: step" in descriptions
        assert "blocks" not in {task.description for task in rich.tasks}


def test_a_loop_that_raises_leaves_no_bar_and_no_state() -> None:
    progress = ProgressLines()
    with pytest.raises(KeyError):
        for _ in progress.track(range(3), "blocks"):
            raise KeyError
    assert progress.state.loops == []


def test_null_progress_has_phases_too() -> None:
    progress = NullProgress()
    progress.schedule({"load": 1.0})
    progress.enter("load")
    assert list(progress.track([1, 2], "x")) == [1, 2]
