"""Training at low precision: quantizers, losses and teachers, and one file per method; importing it registers them."""

from smelt.compression.distillation import qat, speq, tsld

__all__ = ["qat", "speq", "tsld"]
