"""Exports: the same model in the formats that other programs read."""

from smelt.export.run import EXPORTS, export

__all__ = ["EXPORTS", "export"]
