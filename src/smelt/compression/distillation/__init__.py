"""Training at low precision: quantizers, losses and teachers, and one file per method; importing it registers them."""

from smelt.compression.distillation import qail, qat, speq, sqil, tsld

__all__ = ["qail", "qat", "speq", "sqil", "tsld"]
