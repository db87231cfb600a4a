"""Training at low precision: quantizers, losses and teachers, and one file per method; importing it registers them."""

from smelt.compression.distillation import efficientqat, qat, qdpo, speq, tsld

__all__ = ["efficientqat", "qat", "qdpo", "speq", "tsld"]
