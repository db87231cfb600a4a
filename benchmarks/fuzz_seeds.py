"""Write the small valid files that benchmarks/fuzz_files.py mutates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from smelt.export import export
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model

# The seed folders and files of each kind.
SEED_KINDS: dict[str, list[tuple[str, str]]] = {
    "gguf": [("gguf", "model.gguf")],
    "safetensors": [("llama", "model.safetensors"), ("bert", "model.safetensors"), ("artifact", "model.safetensors")],
    "json": [
        ("llama", "config.json"),
        ("bert", "config.json"),
        ("artifact", "config.json"),
        ("artifact", "smelt.json"),
        ("artifact", "smelt.json"),
        ("llama", "generation_config.json"),
        ("llama", "tokenizer_config.json"),
        ("sharded", "model.safetensors.index.json"),
    ],
    "yaml": [("recipe1", "recipe.yaml"), ("recipe2", "recipe.yaml"), ("train", "train.yaml"), ("serve", "serve.yaml")],
    "parquet": [("rows1", "rows.parquet"), ("rows2", "rows.parquet"), ("rows3", "rows.parquet")],
    "tokenizer": [("llama", "tokenizer.json"), ("bert", "tokenizer.json"), ("pieces", "tokenizer.json")],
}
_SPECIAL = ["<s>", "</s>", "<unk>"]
_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_SERVE = "host: 127.0.0.1\nport: 8000\nmax_model_len: 512\nmax_num_seqs: 8\nkv_cache_gib: 0.5\ndevice: cpu\n"


def write_seeds(folder: Path) -> None:
    """Write every seed folder below `folder`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=270, num_key_value_heads=1, max_position_embeddings=64))
    model = Model(llama.eval(), _byte_tokenizer())
    for name in ("llama", "sharded", "pieces"):
        llama.save_pretrained(folder / name, max_shard_size="20KB" if name == "sharded" else "1GB")
        model.tokenizer.save_pretrained(folder / name)  # type: ignore[union-attr]
    _piece_tokenizer().save_pretrained(folder / "pieces")
    (folder / "artifact").mkdir()
    save_artifact(load(folder / "llama"), folder / "artifact")
    export(model, "gguf", folder / "gguf")
    bert = BertModel(BertConfig(**sizes, vocab_size=40, max_position_embeddings=32))
    bert.save_pretrained(folder / "bert")
    _word_tokenizer().save_pretrained(folder / "bert")
    _write_yaml(folder)
    _write_parquet(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("e", "r"), ("1", "2")]
    vocabulary = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({piece: number for number, piece in enumerate(vocabulary)}, merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])
    core.decoder = decoders.ByteLevel()
    return _fast(core)


def _piece_tokenizer() -> PreTrainedTokenizerFast:
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.!,'"]
    merges = [("r", "e"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n")]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(200))]
    vocabulary += [*("".join(pair) for pair in merges), *letters]
    numbers = {piece: number for number, piece in enumerate(vocabulary)}
    core = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _fast(core)


def _word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "##s", "##e", "the"]
    core = Tokenizer(models.WordPiece({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]")


def _fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _write_yaml(folder: Path) -> None:
    sources = {
        "recipe1/recipe.yaml": (_EXAMPLES / "prune-20.yaml").read_text(),
        "recipe2/recipe.yaml": (_EXAMPLES / "w4.yaml").read_text(),
        "train/train.yaml": (_EXAMPLES / "train" / "bytes.yaml").read_text(),
        "serve/serve.yaml": _SERVE,
    }
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _write_parquet(folder: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": f"row {n}", "label": n % 3, "score": n / 7, "tags": [n, None], "more": {"a": str(n)}}
        for n in range(40)
    ]
    tables = [pa.table({"text": [row["text"] for row in rows], "label": [row["label"] for row in rows]})]
    tables += [pa.Table.from_pylist(rows), pa.table({"text": pa.array(json.dumps(rows).split()).dictionary_encode()})]
    options: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "zstd", "row_group_size": 15},
        {"compression": "snappy", "data_page_version": "2.0"},
    ]
    for number, (content, option) in enumerate(zip(tables, options, strict=True), start=1):
        (folder / f"rows{number}").mkdir(parents=True, exist_ok=True)
        pq.write_table(content, folder / f"rows{number}" / "rows.parquet", **option)
