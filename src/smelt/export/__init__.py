"""Export models to the formats of other programs."""

from smelt.export.run import EXPORTS, export

__all__ = ["EXPORTS", "export"]
