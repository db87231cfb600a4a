"""KVzip: what is looked at while the model repeats the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.errors import ModelError
from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer


@dataclass(frozen=True)
class KVzip(Scorer):
    """The most attention that any query of the group gives a token while the prompt is repeated."""

    name: ClassVar[str] = "kvzip"
    paper: ClassVar[str] = (
        "Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, NeurIPS 2025 "
        "(arXiv 2505.23416)"
    )
    needs_reconstruction: ClassVar[bool] = True

    def score(self, seen: AttentionInputs) -> Tensor:
        if seen.reconstruction is None:
            raise ModelError(
                "kvzip needs the attention of a second pass that repeats the prompt, which was not made here; "
                "use another scorer, such as snapkv or expected."
            )
        return seen.reconstruction.float()
