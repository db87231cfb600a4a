"""Gradient compression: compressors, error feedback, collectives, and hooks for DDP, HSDP and pipelines."""
