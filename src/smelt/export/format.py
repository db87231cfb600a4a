"""The contract of an export format: write a model, verify it by reading it back, and report what was written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from smelt.models.model import Model


@dataclass(frozen=True)
class Export:
    """What was written: the number of tensors by type, and notes for the user."""

    tensor_types: dict[str, int]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExportFormat(ABC):
    """An export format. Subclasses are frozen dataclasses; their fields are the options of the format."""

    name: ClassVar[str]
    file: ClassVar[str | None] = None  # name inside the folder, if the format is a single file

    def check(self, model: Model) -> None:  # noqa: B027  (a format may find out only when it writes)
        """Raise FormatError if the format cannot express the model; the weights may be on the meta device."""

    @abstractmethod
    def write(self, model: Model, folder: Path) -> Export:
        """Write the model into an empty folder, or raise FormatError with what the format cannot express."""

    @abstractmethod
    def verify(self, model: Model, folder: Path) -> None:
        """Read the folder back and raise FormatError unless it contains the same model."""
