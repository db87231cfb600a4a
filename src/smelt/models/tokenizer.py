"""Load and save tokenizers."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from smelt.errors import ModelError, is_panic
from smelt.models.config import hub_offline, quiet_transformers, read_config
from smelt.models.json_file import one_line
from smelt.models.tokenizer_file import check_tokenizer_files

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
]

_PROBE = "Hello, 1 + 1 = 2!\n\u00e9\U0001f600"


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder in Hugging Face format; None if it has no tokenizer files."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    check_tokenizer_files(folder)
    try:
        with quiet_transformers(), hub_offline():
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), config=config, local_files_only=True, trust_remote_code=False
            )
            tokenizer(_PROBE)  # some contradictions show only now
            return tokenizer
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        # Third-party code on untrusted values may raise anything.
        raise ModelError(f"the tokenizer in {folder} cannot be loaded ({one_line(error)}).") from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of a tokenizer, without the truncation and padding of its last call, which it keeps."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(folder)


def load_tokenizer_only(path: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or GGUF file without importing the slow modules that load weights."""
    if path.is_file():
        from smelt.models.gguf import gguf_tokenizer, read_gguf

        return gguf_tokenizer(read_gguf(path))
    return load_tokenizer(path, read_config(path))
