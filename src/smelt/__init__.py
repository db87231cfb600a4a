"""Smelt: a trained model, some data and a budget in; a smaller, faster model out, proven and reloadable."""

__version__ = "0.1.0"
