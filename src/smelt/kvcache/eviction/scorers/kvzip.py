"""KVzip: attention on each token while the model reconstructs the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.errors import ModelError
from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer


@SCORERS.register(
    "kvzip",
    paper="Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, NeurIPS 2025 "
    "(arXiv 2505.23416)",
)
@dataclass(frozen=True)
class KVzip(Scorer):
    """Score by the largest attention of any query while the prompt is repeated; best quality, twice the prefill."""

    needs_reconstruction: ClassVar[bool] = True

    def score(self, inputs: AttentionInputs) -> Tensor:
        if inputs.reconstruction is None:
            raise ModelError(
                "kvzip needs the attention of a second pass that repeats the prompt, which was not run; "
                "use another scorer, such as snapkv or expected."
            )
        return inputs.reconstruction.float()
