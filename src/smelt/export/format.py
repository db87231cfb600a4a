"""The contract of an export format: write a model, verify it by reading it back, and report what was written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from smelt.models.model import Model


@dataclass(frozen=True)
class Export:
    """What was written: how many tensors of which kind, and what a user should know of it."""

    kinds: dict[str, int]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExportFormat(ABC):
    """One format of the world outside. A subclass is a frozen dataclass; its fields are the options of the format."""

    name: ClassVar[str]
    file: ClassVar[str | None] = None  # where the format is a single file: its name inside the folder

    @abstractmethod
    def write(self, model: Model, folder: Path) -> Export:
        """Write the model into an empty folder, or raise FormatError with what the format cannot express."""

    @abstractmethod
    def verify(self, model: Model, folder: Path) -> None:
        """Read the folder back and raise FormatError unless it holds the model."""
