"""Progress of long work: bars on a terminal and in notebooks, elsewhere a line every 20 seconds on standard error."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

Item = TypeVar("Item")
INTERVAL = 20.0  # seconds between two lines
_RUN = 100  # steps of the bar of a whole run


class Progress(Protocol):
    """Progress reporter: `track` wraps the iterable of a loop."""

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]: ...


class RunProgress(Progress, Protocol):
    """Progress reporter of a run of several phases, which also shows the time left of the whole run."""

    def schedule(self, seconds: Mapping[str, float]) -> None:
        """Announce the phases in order, with the seconds that each is expected to take."""

    def enter(self, phase: str) -> None:
        """Begin a phase; those before it are over."""


class NullProgress:
    """No-op progress reporter."""

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
        yield from items

    def schedule(self, seconds: Mapping[str, float]) -> None:
        pass

    def enter(self, phase: str) -> None:
        pass


@dataclass
class Loop:
    """A loop that `track` follows."""

    description: str
    total: int | None
    start: float
    done: int = 0

    def left(self, now: float) -> float | None:
        """Return the seconds it will go on at its mean speed; None while that is unknown."""
        if self.total is None or not self.done:
            return None
        return (now - self.start) / self.done * max(0, self.total - self.done)


@dataclass
class RunClock:
    """Estimates the time left of a run from planned seconds per phase, corrected by how long phases have taken."""

    clock: Callable[[], float] = time.monotonic
    planned: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    loops: list[Loop] = field(default_factory=list)  # the current ones, the outermost first

    def __post_init__(self) -> None:
        self.start = self._entered = self.clock()
        self._finished: dict[str, float] = {}  # seconds that phases took which are over

    def schedule(self, seconds: Mapping[str, float]) -> None:
        self.planned = dict(seconds)

    def enter(self, phase: str) -> None:
        now = self.clock()
        if self.phase in self.planned:
            self._finished[self.phase] = now - self._entered
        self.phase, self._entered = phase, now

    @property
    def outermost(self) -> Loop | None:
        """The loop around all others; a snapshot, since a thread reads while loops begin and end."""
        return next(iter(tuple(self.loops)), None)

    def left(self) -> float | None:
        """Return the estimated seconds until the end of the run, or of the outermost loop if no phases are planned."""
        now = self.clock()
        loop = self.outermost
        in_loop = loop.left(now) if loop is not None else None
        if self.phase not in self.planned:
            return in_loop
        names = list(self.planned)
        later = sum(self.planned[name] for name in names[names.index(self.phase) + 1 :])
        expected = self._correction * self.planned[self.phase] - (now - self._entered)
        return max(in_loop or 0.0, expected, 0.0) + self._correction * later

    @property
    def _correction(self) -> float:
        """How much longer phases take than planned, over those that are finished."""
        finished = dict(self._finished)  # a copy, since the run goes on in another thread
        planned = sum(self.planned[name] for name in finished)
        return sum(finished.values()) / planned if planned > 0 else 1.0

    def fraction(self) -> float | None:
        """Return the share of the run that is over, by time."""
        left, loop = self.left(), self.outermost
        start = loop.start if loop is not None and self.phase not in self.planned else self.start
        elapsed = self.clock() - start
        return None if left is None or elapsed + left <= 0 else elapsed / (elapsed + left)

    def line(self) -> str:
        """Describe the state in one line: percent, phase, loop, time left."""
        fraction, left = self.fraction(), self.left()
        what = [] if fraction is None else [f"{100 * fraction:.0f} %"]
        what += [self.phase] if self.phase else []
        if (loop := self.outermost) is not None:
            done = f"{loop.done}{'' if loop.total is None else f' of {loop.total}'}"
            what.append(done if self.phase.endswith(loop.description) else f"{loop.description} {done}")
        if left is not None:
            what.append(f"about {duration(left)} left")
        else:
            what.append(f"{duration(self.clock() - self.start)} so far")
        return ", ".join(what)


def duration(seconds: float) -> str:
    """Format seconds for people: 40 s, 12 min, 1 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _Reporter:
    """Keeps the state of loops and phases; subclasses show it."""

    def __init__(self) -> None:
        self.state = RunClock()

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
        if total is None and isinstance(items, Sized):
            total = len(items)
        loop = Loop(description, total, self.state.clock())
        self.state.loops.append(loop)
        self._begin(loop)
        try:
            for item in items:
                yield item
                loop.done += 1
                self._advance(loop)
        finally:
            self.state.loops.remove(loop)
            self._end(loop)

    def schedule(self, seconds: Mapping[str, float]) -> None:
        self.state.schedule(seconds)

    def enter(self, phase: str) -> None:
        self.state.enter(phase)

    def _begin(self, loop: Loop) -> None:
        pass

    def _advance(self, loop: Loop) -> None:
        pass

    def _end(self, loop: Loop) -> None:
        pass


class ProgressBars(_Reporter):
    """Progress reporter with one bar per loop, stacked, below the bar of the run if it has phases."""

    def __init__(self, progress: RichProgress):
        super().__init__()
        self._progress = progress
        self._run = progress.add_task("", total=_RUN, visible=False, left=None)
        self._tasks: dict[int, object] = {}

    def enter(self, phase: str) -> None:
        super().enter(phase)
        self._show_run()

    def _begin(self, loop: Loop) -> None:
        self._tasks[id(loop)] = self._progress.add_task(loop.description, total=loop.total, left=None)

    def _advance(self, loop: Loop) -> None:
        left = loop.left(self.state.clock())
        self._progress.update(self._tasks[id(loop)], advance=1, left=left)  # type: ignore[arg-type]
        self._show_run()

    def _end(self, loop: Loop) -> None:
        self._progress.remove_task(self._tasks.pop(id(loop)))  # type: ignore[arg-type]

    def _show_run(self) -> None:
        fraction = self.state.fraction()
        if self.state.planned and fraction is not None:
            description = f"all phases, now: {self.state.phase}"
            completed, left = int(_RUN * fraction), self.state.left()
            self._progress.update(self._run, description=description, completed=completed, left=left, visible=True)


class ProgressLines(_Reporter):
    """Progress reporter without a terminal: a thread prints a line every `interval` seconds."""

    def __init__(self, interval: float = INTERVAL) -> None:
        super().__init__()
        self._interval, self._stop = interval, threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> ProgressLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _print(self) -> None:
        while not self._stop.wait(self._interval):
            if self.state.loops or self.state.phase:
                print(f"  {self.state.line()}", file=sys.stderr, flush=True)


class _TimeLeft(ProgressColumn):
    """Our own estimate of the time left."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text("" if left is None else f"{duration(left)} left", style="progress.remaining")


def show_cursor() -> None:
    """Show the cursor of the terminal again after a process with progress bars was killed."""
    Console(stderr=True).show_cursor()


@contextmanager
def progress_bars() -> Iterator[RunProgress]:
    """Yield progress bars on a terminal and in a notebook with ipywidgets, lines elsewhere."""
    console = Console(stderr=True)
    in_notebook = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    if not (console.is_terminal or in_notebook):
        with ProgressLines() as lines:
            yield lines
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _TimeLeft())
    with RichProgress(*columns, console=console, transient=True) as progress:
        yield ProgressBars(progress)
