"""Training with little communication: gradient compression for DDP, FSDP2, pipelines and plain loops.

`compress_gradients` for DistributedDataParallel, `compress_replicas` between replicas of a sharded model (FSDP2),
`compress_stage` for pipeline stages, `CompressedStep` for everything else; `smelt.train.gradients.state` saves
residuals in a checkpoint.
"""

from smelt.train.gradients.autotune.auto import Auto
from smelt.train.gradients.compression import Compression
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
    compressor_named,
)
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.hsdp import compress_replicas
from smelt.train.gradients.pipeline.slack import densities_from_slack
from smelt.train.gradients.pipeline.stage import compress_stage
from smelt.train.gradients.settings import Settings
from smelt.train.gradients.step import CompressedStep

__all__ = [
    "DEFT",
    "DGC",
    "QSGD",
    "SAGE",
    "AdaComp",
    "Auto",
    "CLTk",
    "CompressedStep",
    "Compression",
    "EFSign",
    "ExDyna",
    "HardThreshold",
    "MiCRO",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "Settings",
    "TopK",
    "compress_gradients",
    "compress_replicas",
    "compress_stage",
    "compressor_named",
    "densities_from_slack",
]
