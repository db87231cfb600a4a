"""Byte-level BPE and SentencePiece-like tokenizers that fit the small test networks."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<unk>"]
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("e", "r"), ("1", "2")]


def byte_level(*, digits: bool = True, regex: bool = True) -> PreTrainedTokenizerFast:
    """Return a `smollm` tokenizer, which splits digits, or a `gpt-2` one, which does not."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE({piece: number for number, piece in enumerate(vocabulary)}, MERGES))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words]) if digits else words
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )  # fmt: skip


def pieces(*, start: bool = True) -> PreTrainedTokenizerFast:
    """Return a SentencePiece BPE tokenizer with byte fallback, a prefix space and BOS, like Llama 2."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzHIT.!,'"]
    merges = [("r", "e"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n"), ("e", "r"), ("o", "r"), ("▁", "w")]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["".join(pair) for pair in reversed(merges)] + letters  # token IDs do not determine the merge order
    core = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(vocabulary)}, merges,
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in vocabulary[:3]])
    if start:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
