"""What a run can be told, with defaults and checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smelt.config import parse, read_yaml, suggest
from smelt.errors import ConfigError
from smelt.train.gradients.settings import Settings
from smelt.train.trainer.gradient_sync import build_compressor, normalize_gradients, require_no_second_momentum

TASKS = ("language", "images")
PRECISIONS = ("off", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine")
DEVICES = ("auto", "cpu", "cuda")
_MAY_CHANGE = ("steps", "evaluate", "checkpoint", "timeout")  # when a run goes on


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from."""

    train: str = "default"  # text as everywhere in Smelt; images: a file or folder, or a name below SMELT_DATA
    evaluate: str | None = None  # None: the source's own test part, else its last tenth, not trained on
    length: int = 256  # tokens of a sequence (language)
    text: str | None = None  # the column that is read (language)

    def __post_init__(self) -> None:
        _at_least(2, length=self.length)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser that is handed the reduced gradients."""

    name: str = "adamw"  # or sgd
    lr: float = 3e-4
    weight_decay: float = 0.0  # of matrices only
    momentum: float = 0.0  # of sgd
    nesterov: bool = False  # of sgd
    beta1: float = 0.9  # of adamw
    beta2: float = 0.999  # of adamw
    epsilon: float = 1e-8  # of adamw

    def __post_init__(self) -> None:
        _one_of(OPTIMIZERS, name=self.name)
        _above_zero(lr=self.lr, epsilon=self.epsilon)
        _share(momentum=self.momentum, beta1=self.beta1, beta2=self.beta2)
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay is {self.weight_decay:g}; it must not be negative.")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0.")


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate goes over the steps."""

    name: str = "cosine"  # or constant
    warm_up: int = 0  # steps in which it rises from zero
    floor: float = 0.0  # share of it that a cosine ends at

    def __post_init__(self) -> None:
        _one_of(SCHEDULES, name=self.name)
        _at_least(0, warm_up=self.warm_up)
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor is {self.floor:g}; it is a share of the learning rate, from 0 to 1.")


@dataclass(frozen=True)
class EvaluateConfig:
    """How often the loss on held-out samples is taken."""

    every: int | None = None  # steps; None: at the end only
    samples: int = 256  # at most

    def __post_init__(self) -> None:
        _at_least(1, samples=self.samples, every=self.every)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often all that is needed to go on is written."""

    every: int | None = 500  # steps, and at the end; None: at the end only
    keep: int = 3  # of the newest

    def __post_init__(self) -> None:
        _at_least(1, keep=self.keep, every=self.every)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    model: str | dict[str, Any]  # a model as everywhere in Smelt, or the values of a transformers config
    task: str = "language"  # or images: a classifier
    tokenizer: str | None = None  # a model whose tokenizer is used; None: the model's own; a new model reads bytes
    data: DataConfig = field(default_factory=DataConfig)
    batch: int = 8  # samples of a worker in one pass
    accumulate: int = 1  # passes before gradients are sent
    steps: int = 1000
    seed: int = 0
    precision: str = "off"  # or bf16, fp16 (with a gradient scaler); weights stay float32
    clip: float | None = None  # largest norm of the gradient that the optimiser sees, after it was reduced
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    gradients: str | dict[str, Any] | None = "auto"  # none, bf16, or a compressor: exdyna:density=0.001, or its keys
    exchange: Settings = field(default_factory=Settings)  # how a compressor's values travel; not read with none
    vector_mb: float | None = None  # vectors that are compressed each by itself; None: the model is one
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    timeout: float = 60.0  # seconds that a worker waits for another before the run ends
    device: str = "auto"  # or cpu, cuda

    def __post_init__(self) -> None:
        for key, options in (("task", TASKS), ("precision", PRECISIONS), ("device", DEVICES)):
            _one_of(options, **{key: getattr(self, key)})
        _at_least(1, batch=self.batch, accumulate=self.accumulate, steps=self.steps)
        _at_least(0, seed=self.seed)
        _above_zero(timeout=self.timeout, clip=self.clip, vector_mb=self.vector_mb)
        object.__setattr__(self, "gradients", normalize_gradients(self.gradients))
        compressor = build_compressor(self.gradients)
        has_momentum = self.optimizer.name == "adamw" or self.optimizer.momentum > 0
        require_no_second_momentum(compressor, has_momentum)

    @classmethod
    def load(cls, path: Path, gradients: str | None = None) -> TrainConfig:
        """From a YAML file; `gradients` stands in place of what the file says about them."""
        content = read_yaml(path)
        if isinstance(content, dict) and gradients is not None:
            content["gradients"] = gradients
        if isinstance(content, dict) and content.get("precision") is False:
            content["precision"] = "off"  # YAML takes it for false
        if isinstance(content, dict) and "model" not in content:
            raise ConfigError(f"{path} does not say which `model` is trained: name one, or give the keys of a new one.")
        try:
            return parse(cls, content, "the configuration")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain data, defaults spelled out."""
        return asdict(self)

    def require_same(self, before: Any, folder: Path) -> None:
        """Refuse to go on with a run that was begun otherwise."""
        for key, value in self.to_json().items():
            known = before.get(key) if isinstance(before, dict) else None
            if key not in _MAY_CHANGE and known != value:
                raise ConfigError(
                    f"{folder} was begun with {key} = {known!r:.200}, and now it is {value!r:.200}; go on with the "
                    "same, or give another --out."
                )


def _one_of(options: tuple[str, ...], **values: str) -> None:
    for key, value in values.items():
        if value not in options:
            raise ConfigError(f"there is no {key} {value!r:.80}{suggest(value, list(options))}")


def _at_least(smallest: int, **values: int | None) -> None:
    for key, value in values.items():
        if value is not None and value < smallest:
            raise ConfigError(f"{key} is {value}; it must be at least {smallest}.")


def _above_zero(**values: float | None) -> None:
    for key, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{key} is {value:g}; it must be above 0.")


def _share(**values: float) -> None:
    for key, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{key} is {value:g}; it must be at least 0 and below 1.")
