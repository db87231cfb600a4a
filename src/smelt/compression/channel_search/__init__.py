"""Search of the channels of convolutions, one file per method; importing the package registers them."""

from smelt.compression.channel_search import nce

__all__ = ["nce"]
