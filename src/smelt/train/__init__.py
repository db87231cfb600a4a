"""Training with little communication: gradient compressors and the hooks that apply them.

`compress_gradients` for DistributedDataParallel, `compress_hsdp` for sharded replicas (FSDP2), `compress_stage` for
pipeline stages, `CompressedStep` for everything else; `smelt.train.gradients.checkpoint` saves and resumes residuals.
"""

from typing import Any

from smelt.config import parse, warn_renamed
from smelt.train.gradients.autotune.auto import Auto
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressors import (
    DEFT,
    DGC,
    QSGD,
    SAGE,
    AdaComp,
    CLTk,
    EFSign,
    ExDyna,
    HardThreshold,
    MiCRO,
    OneBit,
    PowerSGD,
    RandomK,
    SIDCo,
    TopK,
    create_compressor,
)
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.hsdp import compress_hsdp
from smelt.train.gradients.pipeline.slack import densities_from_slack
from smelt.train.gradients.pipeline.stage import compress_stage
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.gradients.step import CompressedStep

__all__ = [
    "DEFT",
    "DGC",
    "QSGD",
    "SAGE",
    "AdaComp",
    "Auto",
    "BucketedCompression",
    "CLTk",
    "CompressedStep",
    "CompressionSettings",
    "EFSign",
    "ExDyna",
    "HardThreshold",
    "MiCRO",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "TopK",
    "compress_gradients",
    "compress_hsdp",
    "compress_stage",
    "create_compressor",
    "densities_from_slack",
]


def _build_settings(**values: Any) -> CompressionSettings:
    """Accept the old names of the fields too."""
    return parse(CompressionSettings, values, "the settings")


_RENAMED: dict[str, tuple[str, Any]] = {
    "Compression": ("BucketedCompression", BucketedCompression),
    "Settings": ("CompressionSettings", _build_settings),
    "compress_replicas": ("compress_hsdp", compress_hsdp),
    "compressor_named": ("create_compressor", create_compressor),
}


def __getattr__(name: str) -> Any:
    """Return what a name of version 0.1 is called now."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new_name, value = _RENAMED[name]
    warn_renamed(name, new_name, "smelt.train")
    return value
