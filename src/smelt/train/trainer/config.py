"""The configuration of a training run: keys, defaults and checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from smelt.config import parse, renamed, renamed_keys, suggest
from smelt.errors import ConfigError
from smelt.strict_yaml import read_yaml
from smelt.train.fp8.settings import ChunkedSettings, Fp8Settings
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.trainer.gradient_sync import build_compressor, check_single_momentum, normalize_gradients

TASKS = ("language", "images", "diffusion")
FP8, FP8_CHUNKED = "fp8", "fp8-chunked"
PRECISIONS = ("off", "bf16", "fp16", FP8, FP8_CHUNKED)
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine")
DEVICES = ("auto", "cpu", "cuda")
_MAY_CHANGE = ("steps", "evaluate", "checkpoint", "timeout")  # when a run is resumed


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from."""

    train: str = "default"  # text as everywhere in Smelt, or images: a file or folder, or a name below SMELT_DATA
    evaluate: str | None = None  # None: the source's own test split, else its last tenth, which is not trained on
    seq_len: int = renamed("length", default=256)  # tokens per sequence (language)
    column: str | None = renamed("text", default=None)  # the column to read (language)

    def __post_init__(self) -> None:
        _check_at_least(2, seq_len=self.seq_len)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer that applies the reduced gradients."""

    name: str = "adamw"  # or sgd
    lr: float = 3e-4
    weight_decay: float = 0.0  # of matrices only
    momentum: float = 0.0  # of sgd
    nesterov: bool = False  # of sgd
    beta1: float = 0.9  # of adamw
    beta2: float = 0.999  # of adamw
    epsilon: float = 1e-8  # of adamw

    def __post_init__(self) -> None:
        _check_choice(OPTIMIZERS, name=self.name)
        _check_positive(lr=self.lr, epsilon=self.epsilon)
        _check_fraction(momentum=self.momentum, beta1=self.beta1, beta2=self.beta2)
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay is {self.weight_decay:g}; it must not be negative.")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0.")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning-rate schedule."""

    name: str = "cosine"  # or constant
    warmup_steps: int = renamed("warm_up", default=0)  # steps in which it rises linearly
    min_lr_ratio: float = renamed("floor", default=0.0)  # fraction of the learning rate at which a cosine ends

    def __post_init__(self) -> None:
        _check_choice(SCHEDULES, name=self.name)
        _check_at_least(0, warmup_steps=self.warmup_steps)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(
                f"min_lr_ratio is {self.min_lr_ratio:g}; it must be a fraction of the learning rate, from 0 to 1."
            )


@dataclass(frozen=True)
class EvaluateConfig:
    """How often the held-out loss is computed."""

    every: int | None = None  # steps; None: only at the end
    samples: int = 256  # at most

    def __post_init__(self) -> None:
        _check_at_least(1, samples=self.samples, every=self.every)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a checkpoint is written."""

    every: int | None = 500  # steps, and at the end; None: only at the end
    keep: int = 3  # of the newest

    def __post_init__(self) -> None:
        _check_at_least(1, keep=self.keep, every=self.every)


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    model: str | dict[str, Any]  # a model as everywhere in Smelt, or the values of a transformers config
    task: str = "language"  # or images: a classifier; diffusion: a class-conditional generator of images
    tokenizer: str | None = None  # a model whose tokenizer is used; None: the model's own; a new model reads bytes
    data: DataConfig = field(default_factory=DataConfig)
    batch_size: int = renamed("batch", default=8)  # samples per rank and micro-step
    gradient_accumulation_steps: int = renamed("accumulate", default=1)  # micro-steps before gradients are sent
    steps: int = 1000
    seed: int = 0
    # or bf16, fp16 (with a gradient scaler), fp8 (scaled FP8 GEMMs, the rest in bf16), all with float32 weights; or
    # fp8-chunked: FP8 GEMMs with 16-bit accumulators and weights, emulated (Wang et al., 2018)
    precision: str = "off"
    fp8: Fp8Settings = field(default_factory=Fp8Settings)  # of precision fp8
    fp8_chunked: ChunkedSettings = field(default_factory=ChunkedSettings)  # of precision fp8-chunked
    compile: bool = False  # forward and backward by torch.compile, by block; fp8 gains no time without it
    cuda_graphs: bool = True  # on one GPU: replay forward and backward as CUDA graphs; false: kernel by kernel
    max_grad_norm: float | None = renamed("clip", default=None)  # max norm of the reduced gradient
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    gradients: str | dict[str, Any] | None = "auto"  # none, bf16, or a compressor: exdyna:density=0.001, or its keys
    # how compressed gradients are sent; ignored with none
    exchange: CompressionSettings = field(default_factory=CompressionSettings)
    # size of the buckets that are compressed separately; None: the model is one
    bucket_cap_mb: float | None = renamed("vector_mb", default=None)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    timeout: float = 60.0  # seconds that a rank waits for another before the run ends
    device: str = "auto"  # or cpu, cuda

    def __post_init__(self) -> None:
        for key, choices in (("task", TASKS), ("precision", PRECISIONS), ("device", DEVICES)):
            _check_choice(choices, **{key: getattr(self, key)})
        _check_at_least(
            1,
            batch_size=self.batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            steps=self.steps,
        )
        _check_at_least(0, seed=self.seed)
        _check_positive(timeout=self.timeout, max_grad_norm=self.max_grad_norm, bucket_cap_mb=self.bucket_cap_mb)
        object.__setattr__(self, "gradients", normalize_gradients(self.gradients))
        compressor = build_compressor(self.gradients)
        has_momentum = self.optimizer.name == "adamw" or self.optimizer.momentum > 0
        check_single_momentum(compressor, has_momentum)

    @classmethod
    def load(cls, path: Path, gradients: str | None = None, precision: str | None = None) -> TrainConfig:
        """Read a YAML file; `gradients` and `precision` override what the file says about them."""
        content = read_yaml(path)
        for key, value in (("gradients", gradients), ("precision", precision)):
            if isinstance(content, dict) and value is not None:
                content[key] = value
        if isinstance(content, dict) and content.get("precision") is False:
            content["precision"] = "off"  # YAML reads it as false
        if isinstance(content, dict) and "model" not in content:
            raise ConfigError(f"{path} does not say which `model` to train: name one, or give the keys of a new one.")
        try:
            return parse(cls, content, "the configuration")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with defaults spelled out."""
        return asdict(self)

    def check_same_run(self, before: Any, folder: Path) -> None:
        """Refuse to resume a run that was started with another configuration."""
        before = _current_keys(type(self), before) if isinstance(before, dict) else {}
        defaults = type(self)(model=self.model).to_json()  # of keys that the version it was started with did not have
        for key, value in self.to_json().items():
            old_value = before.get(key, defaults[key])
            if key not in _MAY_CHANGE and old_value != value:
                raise ConfigError(
                    f"{folder} was started with {key} = {old_value!r:.200}, and now it is {value!r:.200}; resume with "
                    "the same, or give another --out."
                )


def _current_keys(cls: type, content: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of a configuration that an older version wrote."""
    current: dict[str, Any] = {}
    old_keys, types = renamed_keys(cls), get_type_hints(cls)
    for key, value in content.items():
        name = old_keys.get(key, key)
        nested = is_dataclass(types.get(name)) and isinstance(value, dict)
        current[name] = _current_keys(types[name], value) if nested else value
    return current


def _check_choice(choices: tuple[str, ...], **values: str) -> None:
    for key, value in values.items():
        if value not in choices:
            raise ConfigError(f"there is no {key} {value!r:.80}{suggest(value, list(choices))}")


def _check_at_least(minimum: int, **values: int | None) -> None:
    for key, value in values.items():
        if value is not None and value < minimum:
            raise ConfigError(f"{key} is {value}; it must be at least {minimum}.")


def _check_positive(**values: float | None) -> None:
    for key, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{key} is {value:g}; it must be above 0.")


def _check_fraction(**values: float) -> None:
    for key, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{key} is {value:g}; it must be at least 0 and below 1.")
