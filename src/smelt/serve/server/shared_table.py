"""Numbers that the API processes of a server share, in memory that all of them map: a row for each process."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

_METRIC_COLUMNS = 1024  # of counters and histograms; ServerMetrics needs about 500


class SharedTable:
    """A table of floats. A process changes its own row only, so that nothing is locked, and reads all rows.

    Every process allocates the same columns in the same order. `descriptor` is a file in memory that all inherit;
    without one there is a single process.
    """

    def __init__(self, num_keys: int = 0, rows: int = 1, row: int = 0, descriptor: int | None = None) -> None:
        columns = _METRIC_COLUMNS + 8 * (num_keys + 1)
        size = 8 * rows * columns
        if descriptor is not None:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(-1 if descriptor is None else descriptor, size)
        self._descriptor, self._num_columns, self._allocated = descriptor, columns, 0
        self._rows = [memoryview(memory).cast("d")[i * columns : (i + 1) * columns] for i in range(rows)]
        self._row = row

    def allocate(self, count: int) -> Cells:
        start, self._allocated = self._allocated, self._allocated + count
        assert self._allocated <= self._num_columns
        return Cells([row[start : self._allocated] for row in self._rows], self._row)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes; the kernel releases the lock of one that dies."""
        if self._descriptor is None:
            yield
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class Cells:
    """Some columns of a table."""

    def __init__(self, rows: list[memoryview[float]], row: int) -> None:
        self._rows = rows
        self.own = rows[row]  # of this process
        self.common = rows[0]  # changed by any process, under the table's lock

    def total(self, column: int) -> float:
        """Return the sum over all processes."""
        return sum(row[column] for row in self._rows)

    def totals(self) -> list[float]:
        return [self.total(column) for column in range(len(self.own))]

    def clear(self, row: int) -> None:
        """Zero the cells of a process that has ended."""
        self._rows[row][:] = memoryview(bytes(self._rows[row].nbytes)).cast("d")


def private_cells(count: int) -> Cells:
    """Return cells of one process that are in no table."""
    return Cells([memoryview(bytearray(8 * count)).cast("d")], 0)
