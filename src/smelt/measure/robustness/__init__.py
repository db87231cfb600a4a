"""Robustness of a model: bit flips in its storage, range clipping, adversarial inputs, planted back doors."""
