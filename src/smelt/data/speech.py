"""Load recordings with transcripts: a table with a column `audio`, `path` or `file` and a column `text`.

Paths are relative to the table; Parquet may hold the encoded recordings, as bytes or as `{bytes, path}`. Recordings
stay encoded until they are needed. Their length is read from their header and limited before they are decoded.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.signal import resample_poly

from smelt.data.files import Row, column_names, column_values, text_column
from smelt.data.image_files import encoded_source, holds_media, read_encoded
from smelt.data.limits import list_names
from smelt.errors import DataError, install_command

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
AUDIO_COLUMNS = ("audio", "path", "file")
TEXT_COLUMNS = ("text", "transcript", "transcription", "sentence")
MAX_SAMPLES = 2**28  # of one recording, all channels: 93 minutes of 48 kHz mono, 1 GiB decoded


@dataclass(frozen=True, eq=False)
class SpeechData:
    """Recordings and what is said in them."""

    name: str
    sources: Sequence[Path | bytes]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int] | np.ndarray) -> SpeechData:
        """Return the recordings at these indices, in this order."""
        return replace(
            self, sources=[self.sources[i] for i in indices], texts=tuple(self.texts[int(i)] for i in indices)
        )

    def content(self, index: int) -> bytes:
        """Return a recording as it is stored."""
        source = self.sources[index]
        return source if isinstance(source, bytes) else read_encoded(source)

    def check(self, index: int) -> None:
        """Raise if a recording cannot be decoded, is empty, or contains NaN or infinity."""
        _decode(self.content(index), self.where(index))

    def decode(self, index: int, sampling_rate: int) -> np.ndarray:
        """Return a recording as mono samples in float32, resampled to this rate."""
        samples, rate = _decode(self.content(index), self.where(index))
        if rate == sampling_rate:
            return samples
        common = math.gcd(rate, sampling_rate)
        return np.asarray(resample_poly(samples, sampling_rate // common, rate // common), dtype=np.float32)

    def where(self, index: int) -> str:
        """Return how an error names a recording."""
        source = self.sources[index]
        return str(source) if isinstance(source, Path) else f"recording {index + 1} of {self.name}"


def speech_from_rows(
    rows: list[Row], source: str, folder: Path, *, audio: str | None = None, text: str | None = None
) -> SpeechData:
    """Convert the rows of a table; relative paths are relative to `folder`."""
    columns = column_names(rows)
    audio = audio or next((name for name in AUDIO_COLUMNS if name in columns), None)
    text = text or next((name for name in TEXT_COLUMNS if name in columns), None)
    if audio is None or text is None:
        raise DataError(
            f"{source} needs a column of recordings ({', '.join(AUDIO_COLUMNS)}) and one of transcripts "
            f"({', '.join(TEXT_COLUMNS)}); it has {list_names(columns)}."
        )
    values = enumerate(column_values(rows, audio, source), start=1)
    sources = [encoded_source(value, folder, f"{source}, row {number}", "recording") for number, value in values]
    return SpeechData(source, sources, text_column(rows, text, source))


def has_speech(rows: list[Row]) -> bool:
    """Return whether the first row of a table names or holds a recording."""
    return holds_media(rows[0], AUDIO_COLUMNS, AUDIO_SUFFIXES, _looks_like_audio)


def _looks_like_audio(content: bytes) -> bool:
    return content.startswith((b"fLaC", b"OggS", b"ID3", b"\xff\xfb")) or content[8:12] == b"WAVE"


@contextmanager
def _opened(content: bytes, where: str) -> Iterator[Any]:
    """Open a recording as a SoundFile and check the length and rate in its header."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise DataError(f"recordings need one more package: {install_command('audio')}.") from error
    try:
        if not content:
            raise DataError(f"{where} is empty: give a recording with at least one sample.")
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.frames * file.channels > MAX_SAMPLES or file.frames < 0:
                raise DataError(f"{where} has more than {MAX_SAMPLES:,} samples: split it into shorter recordings.")
            if not file.frames:
                raise DataError(f"{where} is empty: give a recording with at least one sample.")
            if not 1_000 <= file.samplerate <= 768_000:
                raise DataError(f"{where} has the impossible rate of {file.samplerate} Hz.")
            yield file
    except DataError:
        raise
    except Exception as error:  # decoders of untrusted bytes raise many types
        reason = " ".join(str(getattr(error, "error_string", error)).split()).rstrip(".")
        raise DataError(f"{where} cannot be decoded as audio ({reason[:200]}).") from error


def _decode(content: bytes, where: str) -> tuple[np.ndarray, int]:
    """Return the samples of a recording, its channels averaged, and their rate."""
    with _opened(content, where) as file:
        samples: np.ndarray = file.read(dtype="float32", always_2d=True)  # [frames, channels]
        rate = int(file.samplerate)
    if not len(samples):
        raise DataError(f"{where} is empty: give a recording with at least one sample.")
    if not np.isfinite(samples).all():
        raise DataError(f"{where} contains samples that are NaN or infinite.")
    return samples.mean(axis=1), rate
