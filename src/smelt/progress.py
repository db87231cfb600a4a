"""Progress bars on standard error, shown only on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

Item = TypeVar("Item")


class Progress(Protocol):
    """Progress reporter: `track` wraps the iterable of a loop."""

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]: ...


class NullProgress:
    """No-op progress reporter."""

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
        yield from items


class ProgressBars:
    """Progress reporter with one bar per loop; bars of nested loops are stacked."""

    def __init__(self, progress: RichProgress):
        self._progress = progress

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
        if total is None and isinstance(items, Sized):
            total = len(items)
        task = self._progress.add_task(description, total=total)
        try:
            for item in items:
                yield item
                self._progress.advance(task)
        finally:
            self._progress.remove_task(task)


def show_cursor() -> None:
    """Show the cursor of the terminal again after a process with progress bars was killed."""
    Console(stderr=True).show_cursor()


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield progress bars on a terminal, a NullProgress elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield NullProgress()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as progress:
        yield ProgressBars(progress)
