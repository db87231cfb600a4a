"""Measure the latency of a model: one forward, one decoded token, and two models interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smelt.errors import ModelError
from smelt.measure.clock import stopwatch, time_call
from smelt.models.inputs import complete_inputs, random_inputs
from smelt.models.model import Model

__all__ = ["Latency", "LatencyComparison", "compare_latency", "decode_latency", "latency", "time_call"]

_IMAGE_SIDE = 224  # the training size of image models without a fixed size (ResNet)
_RESAMPLES = 2000


@dataclass(frozen=True)
class Latency:
    """Median and interquartile range of the timed calls, with the settings they depend on.

    `length` is the number of tokens per row, or of frames of a spectrogram; an image and an observation count as one.
    `tokens_per_second` counts the same.
    """

    median_ms: float
    spread_ms: float
    repeats: int
    warmup: int
    batch: int
    length: int
    device: str
    dtype: str
    tokens_per_second: float


@dataclass(frozen=True)
class LatencyComparison:
    """Two models timed alternately. `ratio` is base over new: above 1 the new model is faster."""

    new: Latency
    base: Latency
    ratio: float
    ratio_low: float
    ratio_high: float
    confidence: float


def latency(
    model: Model,
    *,
    batch: int = 1,
    length: int = 128,
    warmup: int = 3,
    repeats: int = 20,
    min_seconds: float = 0.0,
    seed: int = 0,
) -> Latency:
    """Time one forward over random token ids, pixels, spectrograms or observations, whichever the model reads."""
    with _inference(model):
        forward = _forward(model, batch, length, seed)
        seconds = time_call(forward, warmup=warmup, repeats=repeats, min_seconds=min_seconds, device=model.device)
    return _summary(model, seconds, warmup=warmup, batch=batch, length=_length(model, length))


def decode_latency(
    model: Model, *, prompt: int = 128, tokens: int = 32, batch: int = 1, warmup: int = 4, seed: int = 0
) -> Latency:
    """Time one token of greedy decoding after a random prompt of `prompt` tokens."""
    _check_decoding(model, prompt + warmup + tokens + 1)
    with _inference(model):
        step = _decode_step(model, _token_ids(model, batch, prompt, seed))
        seconds = time_call(step, warmup=warmup, repeats=tokens, device=model.device)
    return _summary(model, seconds, warmup=warmup, batch=batch, length=prompt, tokens_per_call=1)


def compare_latency(
    new: Model,
    base: Model,
    *,
    batch: int = 1,
    length: int = 128,
    warmup: int = 3,
    repeats: int = 20,
    seed: int = 0,
    confidence: float = 0.95,
) -> LatencyComparison:
    """Time both models alternately (new, base, new, base ...), so that drift of the machine affects both equally."""
    seconds = _time_alternately(new, base, lambda model: _forward(model, batch, length, seed), warmup, repeats)
    new_latency, base_latency = (
        _summary(model, seconds[:, column], warmup=warmup, batch=batch, length=_length(model, length))
        for column, model in enumerate((new, base))
    )
    return _comparison(new_latency, base_latency, seconds, confidence, seed)


def _time_alternately(
    new: Model, base: Model, make_call: Callable[[Model], Callable[[], object]], warmup: int, repeats: int
) -> np.ndarray:  # [repeats, 2]
    if new.device != base.device:
        raise ModelError(f"The two models are on {new.device} and {base.device}: put both on one device.")
    clock = stopwatch(new.device)
    with _inference(new), _inference(base):
        calls = [make_call(model) for model in (new, base)]
        rounds = [[clock(call) for call in calls] for _ in range(warmup + repeats)]
    return np.array(rounds[warmup:])


def _comparison(new: Latency, base: Latency, seconds: np.ndarray, confidence: float, seed: int) -> LatencyComparison:
    low, high = ratio_interval(seconds[:, 0], seconds[:, 1], confidence=confidence, seed=seed)
    return LatencyComparison(new, base, base.median_ms / new.median_ms, low, high, confidence)


def ratio_interval(new: np.ndarray, base: np.ndarray, *, confidence: float, seed: int) -> tuple[float, float]:
    """Return the bootstrap interval of median(base) / median(new), resampling the pairs of measurements."""
    sampled = np.random.default_rng(seed).integers(len(new), size=(_RESAMPLES, len(new)))  # [resamples, rounds]
    ratios = np.median(base[sampled], axis=1) / np.median(new[sampled], axis=1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float(low), float(high)


@contextmanager
def _inference(model: Model) -> Iterator[None]:
    """Use eval mode without gradients; restore the network's mode afterwards."""
    training = model.network.training
    model.network.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.network.train(training)


def _forward(model: Model, batch: int, length: int, seed: int) -> Callable[[], object]:
    network = model.network
    if _takes_images(model):
        pixels = _pixels(model, batch, seed)
        return lambda: network(pixel_values=pixels)
    if model.task == "policy":
        inputs = {name: tensor.to(model.device) for name, tensor in random_inputs(network, batch).items()}
        return lambda: network(**inputs)
    if model.task == "speech":
        spectrograms = _spectrograms(model, batch, length, seed)
        return lambda: network(**spectrograms)
    _check_length(model, length)
    token_ids = _token_ids(model, batch, length, seed)
    if model.task == "language":
        return lambda: network(input_ids=token_ids, use_cache=False)
    return lambda: network(input_ids=token_ids)


def _decode_step(model: Model, prompt: Tensor) -> Callable[[], object]:
    """Return a function that decodes one token per call."""
    network = model.network
    output = network(input_ids=prompt, past_key_values=model.new_cache(), use_cache=True)
    cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)  # [batch, 1]

    def step() -> None:
        nonlocal cache, token
        output = network(input_ids=token, past_key_values=cache, use_cache=True)
        cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)

    return step


def _token_ids(model: Model, batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.network.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.device)


def _pixels(model: Model, batch: int, seed: int) -> Tensor:
    config = model.network.config
    side = getattr(config, "image_size", _IMAGE_SIDE)
    height, width = (side, side) if isinstance(side, int) else side
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn((batch, config.num_channels, height, width), generator=generator)
    return pixels.to(device=model.device, dtype=model.network.dtype)


def _spectrograms(model: Model, batch: int, length: int, seed: int) -> dict[str, Tensor]:
    """Return random spectrograms and, for an encoder-decoder, the first tokens of the decoder."""
    shape = (batch, model.network.config.num_mel_bins, _length(model, length))
    features = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    features = features.to(device=model.device, dtype=model.network.dtype)
    return complete_inputs(model.network, {"input_features": features})


def _takes_images(model: Model) -> bool:
    return bool(model.network.main_input_name == "pixel_values")


def _length(model: Model, length: int) -> int:
    positions = getattr(model.network.config, "max_source_positions", None)
    if model.task == "speech" and positions is not None:
        return 2 * int(positions)  # frames: Whisper pads every recording to 30 seconds, and two convolutions halve it
    return 1 if _takes_images(model) or model.task == "policy" else length


def _check_decoding(model: Model, length: int) -> None:
    if model.task != "language":
        raise ModelError(f"{_name(model)} has no language head, so it decodes no tokens: time its forward instead.")
    _check_length(model, length)


def _check_length(model: Model, length: int) -> None:
    max_positions = getattr(model.network.config, "max_position_embeddings", None)
    if max_positions is not None and length > max_positions:
        raise ModelError(f"{_name(model)} takes at most {max_positions} tokens, not {length}: use a smaller length.")


def _name(model: Model) -> str:
    return model.source or "This model"


def _summary(
    model: Model, seconds: np.ndarray, *, warmup: int, batch: int, length: int, tokens_per_call: int | None = None
) -> Latency:
    lower, median, upper = np.percentile(seconds, [25, 50, 75])
    tokens = batch * (length if tokens_per_call is None else tokens_per_call)
    return Latency(
        median_ms=float(median) * 1000,
        spread_ms=float(upper - lower) * 1000,
        repeats=len(seconds),
        warmup=warmup,
        batch=batch,
        length=length,
        device=str(model.device),
        dtype=str(model.network.dtype).removeprefix("torch."),
        tokens_per_second=tokens / float(median),
    )
