"""Training at low precision: quantizers, losses and teachers, and one file per method; importing it registers them."""

from smelt.compression.distillation import (
    efficientqat,
    feature_losses,
    finetune,
    integer_qat,
    matquant,
    qail,
    qat,
    qdpo,
    qlora,
    speq,
    sqil,
    teacher_intervention,
    tsld,
)

__all__ = [
    "efficientqat",
    "feature_losses",
    "finetune",
    "integer_qat",
    "matquant",
    "qail",
    "qat",
    "qdpo",
    "qlora",
    "speq",
    "sqil",
    "teacher_intervention",
    "tsld",
]
