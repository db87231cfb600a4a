"""Training at low precision: quantizers, losses and teachers, and one file per method; importing it registers them."""

from smelt.compression.distillation import feature_losses, qat, speq, teacher_intervention, tsld

__all__ = ["feature_losses", "qat", "speq", "teacher_intervention", "tsld"]
