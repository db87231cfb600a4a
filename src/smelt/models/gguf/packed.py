"""Convert quantized matrices of a GGUF file to Smelt's formats: same codes, no rounding.

Blocks without a minimum (Q4_0, Q5_0, Q8_0, Q6_K) become symmetric integers with exactly the weights of the file. Blocks
with a minimum (Q4_1, Q5_1, Q4_K, Q5_K) get the zero point -minimum / scale in float32, so their weights agree up to
float32 rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedConfig

from smelt.models.gguf.blocks import Levels
from smelt.models.gguf.llama import gguf_names, to_transformers_order
from smelt.models.gguf.reader import GgufFile
from smelt.numerics.format import QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer

TABLE, HEAD = "model.embed_tokens", "lm_head"
_PLAIN_BLOCK = 32  # weights per block; such blocks have a float16 scale, larger ones a product of two


def gguf_packed(file: GgufFile, config: PreTrainedConfig) -> dict[str, QuantizedTensor]:
    """Return each quantized matrix by the path of its layer.

    The embedding table is not included, since lookups read single rows; if it is tied to the head, the head is.
    """
    sources = {name.removesuffix(".weight"): source for source, name in gguf_names(file) if name.endswith(".weight")}
    table = sources.pop(TABLE)
    if HEAD not in sources:
        sources[HEAD] = table
    quantized_sources = {path: source for path, source in sources.items() if file.entries[source].format.bits}
    return {path: _quantized(file, source, f"{path}.weight", config) for path, source in quantized_sources.items()}


def _quantized(file: GgufFile, source: str, name: str, config: PreTrainedConfig) -> QuantizedTensor:
    entry = file.entries[source]
    levels = entry.format.read(file.bytes(source).reshape(-1, entry.format.bytes))
    assert isinstance(levels, Levels)
    rows = entry.shape[0]
    codes = to_transformers_order(levels.codes.reshape(rows, -1), name, file, config)
    scale = to_transformers_order(levels.scale.reshape(rows, -1, 1), name, file, config)
    scale_dtype = "float16" if entry.format.weights == _PLAIN_BLOCK else "float32"
    size, width = levels.codes.shape[-1], entry.format.bits
    if levels.minimum is None:
        number_format = Integer(size, scale_dtype, width)  # type: ignore[arg-type]
        return QuantizedTensor(number_format, torch.from_numpy(codes), QuantParams(torch.from_numpy(scale)))
    minimum = to_transformers_order(levels.minimum.reshape(rows, -1, 1), name, file, config)
    constant = scale == 0  # all weights of the group equal its minimum
    scale = np.where(constant, np.float32(1), scale)
    codes = np.where(np.repeat(constant[..., 0], size, axis=1), np.uint8(0), codes)
    zero = -minimum / scale
    number_format = Integer(size, scale_dtype, width, symmetric=False, zero_dtype="float32")  # type: ignore[arg-type]
    return QuantizedTensor(
        number_format, torch.from_numpy(codes), QuantParams(torch.from_numpy(scale), torch.from_numpy(zero))
    )
