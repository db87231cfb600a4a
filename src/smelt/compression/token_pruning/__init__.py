"""Token pruning of encoders, one file per method; importing the package registers them."""

from smelt.compression.token_pruning import ltp, token_ratio, token_topk

__all__ = ["ltp", "token_ratio", "token_topk"]
