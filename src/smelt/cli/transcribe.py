"""`smelt transcribe`: print what is said in recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, console, write_json
from smelt.errors import ModelError
from smelt.progress import progress_bars

AudioArgument = Annotated[
    list[Path], typer.Argument(metavar="AUDIO", help="Recordings (WAV, FLAC, OGG, MP3) of any rate; resampled.")
]


def run(
    model: ModelArgument,
    audio: AudioArgument,
    batch_size: Annotated[int, typer.Option(min=1, help="Recordings in a batch, padded to the longest.")] = 8,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
) -> None:
    from smelt.data import SpeechData
    from smelt.measure.logits import eval_mode
    from smelt.measure.speech import transcribe
    from smelt.models.load import load, skeleton
    from smelt.models.model import Model

    data = SpeechData("the recordings", audio, ("",) * len(audio))
    for index in range(len(data)):
        data.check(index)
    task = Model(skeleton(model)).task
    if task != "speech":
        raise ModelError(f"{model} is a model for {task}, but transcripts need one for speech.")
    loaded = load(model, device=device)
    texts: list[str] = []
    with progress_bars() as progress, eval_mode(loaded.network):
        for start in progress.track(range(0, len(data), batch_size), "transcription"):
            texts += transcribe(loaded, data, range(start, min(start + batch_size, len(data))))
    for path, text in zip(audio, texts, strict=True):
        console.print(text if len(audio) == 1 else f"{path}: {text}", soft_wrap=True)
    transcripts = [{"file": str(path), "text": text} for path, text in zip(audio, texts, strict=True)]
    write_json(json_file, {"model": model, "transcripts": transcripts})
