"""Read models from GGUF files: container, block formats, Llama-like networks, tokenizers."""

from smelt.models.gguf.llama import gguf_config, gguf_shapes, gguf_tensors
from smelt.models.gguf.packed import gguf_packed
from smelt.models.gguf.reader import GgufFile, read_gguf
from smelt.models.gguf.tokenizer import gguf_tokenizer

__all__ = ["GgufFile", "gguf_config", "gguf_packed", "gguf_shapes", "gguf_tensors", "gguf_tokenizer", "read_gguf"]
