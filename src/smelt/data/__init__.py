"""Load text, labeled and multiple-choice data, images and demonstrations from files, the hub or the built-in set, and
batch them; name environments."""

from __future__ import annotations

import warnings
from pathlib import Path

from smelt.data.batches import Batch, image_batches, labeled_batches, text_batches
from smelt.data.demonstrations import (
    Demonstrations,
    demonstration_batches,
    has_demonstrations,
    load_demonstrations,
)
from smelt.data.environments import PREFIX as ENVIRONMENT_PREFIX
from smelt.data.environments import Environment, load_environment
from smelt.data.files import TEXT_SUFFIXES, Row, column_names, read_rows, suffix_of
from smelt.data.hub import is_hub, read_hub
from smelt.data.image_files import (
    LabeledImages,
    has_images,
    images_from_rows,
    load_image_archive,
    load_image_folder,
)
from smelt.data.labeled import LabeledData, labeled_from_rows, load_labeled
from smelt.data.multiple_choice import (
    MultipleChoiceData,
    MultipleChoiceItem,
    choices_from_rows,
    has_choices,
    load_choices,
)
from smelt.data.named_datasets import resolve_source
from smelt.data.prompts import PromptData, chats_from_rows, prompts_from_rows
from smelt.data.speech import SpeechData, has_speech, speech_from_rows
from smelt.data.text import TextData, load_text, text_from_rows
from smelt.errors import DataError

__all__ = [
    "Batch",
    "Demonstrations",
    "Environment",
    "LabeledData",
    "LabeledImages",
    "MultipleChoiceData",
    "MultipleChoiceItem",
    "PromptData",
    "SpeechData",
    "TextData",
    "demonstration_batches",
    "image_batches",
    "labeled_batches",
    "load_chats",
    "load_choices",
    "load_data",
    "load_labeled",
    "load_prompts",
    "load_text",
    "text_batches",
]

KINDS = ("text", "labeled", "choices", "images", "speech", "demonstrations", "environment")
_OLD_KINDS = {"labelled": "labeled"}  # the spelling before 0.2


def load_data(
    source: str | Path,
    *,
    kind: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    split: str = "evaluation",
) -> TextData | LabeledData | MultipleChoiceData | LabeledImages | SpeechData | Demonstrations | Environment:
    """Load data as `kind`, or as its columns suggest: speech, images, multiple choice, labeled, else text.

    A folder holds images, a NumPy archive images or demonstrations; `gym:NAME` is an environment.
    """
    source = resolve_source(source, split)
    if kind in _OLD_KINDS:
        message = f"the data kind `{kind}` is now called `{_OLD_KINDS[kind]}`; the old name will stop working."
        warnings.warn(message, FutureWarning, stacklevel=2)
        kind = _OLD_KINDS[kind]
    if kind is not None and kind not in KINDS:
        raise DataError(f"There is no kind of data '{kind}': expected one of {', '.join(KINDS)}.")
    if str(source).startswith(ENVIRONMENT_PREFIX):
        _check_kind(source, "environment", kind)
        return load_environment(str(source))
    path = Path(source)
    if suffix_of(path) == ".npz" and (kind == "demonstrations" or has_demonstrations(path)):
        _check_kind(source, "demonstrations", kind)
        return load_demonstrations(path)
    if path.is_dir() or suffix_of(path) == ".npz":
        _check_kind(source, "images", kind)
        return load_image_folder(path, split) if path.is_dir() else load_image_archive(path, split)
    if str(source) == "default" or (suffix_of(Path(source)) in TEXT_SUFFIXES and not is_hub(str(source))):
        if kind not in (None, "text"):
            raise DataError(f"{source} is plain text: it has no rows to read as {kind} data.")
        return load_text(source, column=text, split=split)
    rows = read_hub(str(source), split) if is_hub(str(source)) else read_rows(Path(source))
    if kind in ("demonstrations", "environment"):
        raise DataError(f"{source} is a table: demonstrations are a NumPy archive (.npz), an environment is gym:NAME.")
    kind = kind or _kind_of_content(rows) or _guess_kind(column_names(rows), label)
    if kind == "speech":
        return speech_from_rows(rows, str(source), path.parent, text=text)
    if kind == "images":
        return images_from_rows(rows, str(source), path.parent, image=text, label=label or "label")
    if kind == "choices":
        return choices_from_rows(rows, str(source))
    if kind == "labeled":
        return labeled_from_rows(rows, str(source), text=text, pair=pair, label=label or "label")
    return text_from_rows(rows, str(source), text)


def load_chats(source: str | Path, column: str, *, split: str = "evaluation") -> PromptData | None:
    """Load conversations with answers from a table or the hub; None if the column holds no lists of messages."""
    source = resolve_source(source, split)
    if str(source) == "default" or Path(source).is_dir() or suffix_of(Path(source)) in (*TEXT_SUFFIXES, ".npz"):
        return None
    rows = read_hub(str(source), split) if is_hub(str(source)) else read_rows(Path(source))
    return chats_from_rows(rows, str(source), column)


def load_prompts(source: str | Path, *, column: str | None = None, split: str = "evaluation") -> PromptData:
    """Load conversations to be answered from a table or the hub."""
    source = resolve_source(source, split)
    if str(source) == "default" or (suffix_of(Path(source)) in TEXT_SUFFIXES and not is_hub(str(source))):
        raise DataError(f"{source} is plain text: give rows with prompts, in a column prompt, messages or chosen.")
    rows = read_hub(str(source), split) if is_hub(str(source)) else read_rows(Path(source))
    return prompts_from_rows(rows, str(source), column)


def _check_kind(source: str | Path, actual: str, requested: str | None) -> None:
    if requested not in (None, actual):
        raise DataError(f"{source} holds {actual} and cannot be read as {requested} data.")


def _kind_of_content(rows: list[Row]) -> str | None:
    """Return the kind of rows that name or hold recordings or images."""
    return "speech" if has_speech(rows) else "images" if has_images(rows) else None


def _guess_kind(columns: list[str], label: str | None) -> str:
    if label is None and has_choices(columns):
        return "choices"
    return "labeled" if label is not None or "label" in columns else "text"
