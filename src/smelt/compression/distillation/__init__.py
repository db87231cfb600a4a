"""Training at low precision: quantizers, losses and teachers, and one file per method; importing it registers them."""

from smelt.compression.distillation import qat, qdpo, speq, tsld

__all__ = ["qat", "qdpo", "speq", "tsld"]
