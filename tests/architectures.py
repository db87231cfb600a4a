"""Tiny random networks of many architectures, as transformers builds them: the inputs of tests and of
`benchmarks/architectures.py`.

Every architecture is a row of data: the model type, the head, and what its tiny config needs beyond the usual sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerFast

import smelt.models.config  # noqa: F401  (registers Smelt's own networks with transformers)

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CONTEXT, IMAGE = 64, 96, 4, 2, 16, 99, 128, 32

# The usual names of sizes, and the tiny values they get where a config has the field.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim"], HIDDEN),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "hidden_dim"], INNER),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], INNER),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], HEADS),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], HEADS),
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    **dict.fromkeys(["max_position_embeddings", "n_positions"], CONTEXT),
    "image_size": IMAGE,
    "patch_size": 8,
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "embedding_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # a tied random network repeats its last token, whatever else it computes
}


@dataclass(frozen=True)
class Architecture:
    """A model type with a head (the ending of an auto class of transformers), and fields of its tiny config."""

    model_type: str
    head: str = "CausalLM"
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        return tiny_config(self.model_type, **self.fields)

    def build(self, seed: int = 0) -> PreTrainedModel:
        """Build the network with random weights whose outputs differ between inputs."""
        torch.manual_seed(seed)
        auto = getattr(transformers, f"AutoModelFor{self.head}") if self.head else transformers.AutoModel
        network: PreTrainedModel = auto.from_config(self.config()).eval()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.05)
                else:  # norms, sinks: no two values are the same
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return network

    def save(self, folder: Path, seed: int = 0) -> PreTrainedModel:
        """Write a folder as transformers does, with a tokenizer for text; return the network."""
        network = self.build(seed)
        network.save_pretrained(folder)
        if network.main_input_name == "input_ids":
            write_tokenizer(folder)
        return network


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose words are w0, w1, ..."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", unk_token="w3").save_pretrained(folder)


def tiny_config(model_type: str, **fields: Any) -> Any:
    """Return a config of this type with tiny sizes; `fields` replace others."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    sizes = {
        name: size
        for name, size in _SIZES.items()
        if name in vars(default) and not isinstance(getattr(default, name), list | tuple)
    }
    return config_class(**{**sizes, **fields})


def _plain(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    return values


_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_MULTIPLIERS = {
    **{"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 3.0},
}
_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"head_dim": 8, "num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1},
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def _language_and_vision(model_type: str, text_type: str, vision_type: str, **fields: Any) -> Architecture:
    text_config = _plain(tiny_config(text_type, **fields.pop("text", {})))
    vision_config = _plain(tiny_config(vision_type, **{**_VISION, **fields.pop("vision", {})}))
    return Architecture(
        model_type, "ImageTextToText", {"text_config": text_config, "vision_config": vision_config, **fields}
    )


DECODERS = (
    *(Architecture(name) for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")),
    Architecture("gpt2", fields={"tie_word_embeddings": True}),
    Architecture("opt", fields={"word_embed_proj_dim": HIDDEN, "tie_word_embeddings": True}),
    *(Architecture(name) for name in ("mixtral", "qwen3_moe", "olmoe", "gemma")),
    Architecture("gemma2", fields={"sliding_window": 16, "query_pre_attn_scalar": 16}),
    Architecture("gemma3_text", fields={**_WINDOWS, "query_pre_attn_scalar": 16}),
    Architecture("phi"),
    Architecture("phi3", fields={"original_max_position_embeddings": CONTEXT, "rope_parameters": _PARTIAL_ROPE}),
    Architecture("phimoe"),
    Architecture("gpt_oss", fields={**_WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    Architecture("deepseek_v2", fields=_LATENT),
    Architecture("deepseek_v3", fields=_LATENT),
    Architecture(
        "llama4_text",
        fields={
            "intermediate_size_mlp": INNER,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "layer_types": ["chunked_attention", "full_attention"],
            "interleave_moe_layer_step": 2,
        },
    ),
    Architecture("qwen2_moe", fields={"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}),
    Architecture(
        "qwen3_next",
        fields={
            "shared_expert_intermediate_size": 48,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    *(Architecture(name) for name in ("glm", "glm4")),
    Architecture("glm4_moe", fields={"first_k_dense_replace": 1, "n_shared_experts": 1}),
    *(Architecture(name, fields=_MULTIPLIERS) for name in ("granite", "granitemoe")),
    Architecture("cohere"),
    Architecture("cohere2", fields=_WINDOWS),
    *(Architecture(name) for name in ("olmo", "olmo2")),
    Architecture("olmo3", fields=_WINDOWS),
    Architecture("nemotron", fields={"num_key_value_heads": KV_HEADS}),
    Architecture("exaone4", fields=_WINDOWS),
    *(Architecture(name) for name in ("seed_oss", "ernie4_5")),
    Architecture(
        "ernie4_5_moe",
        fields={
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": -1,
        },
    ),
    Architecture("ministral", fields=_WINDOWS),
    Architecture("helium"),
    Architecture(
        "lfm2",
        fields={"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "block_multiple_of": 16},
    ),
    *(Architecture(name) for name in ("starcoder2", "stablelm")),
    Architecture("falcon", fields={"num_kv_heads": KV_HEADS, "new_decoder_architecture": True}),
    Architecture("bloom"),
    Architecture("mpt", fields={"max_seq_len": CONTEXT, "expansion_ratio": 2}),
    Architecture("gpt_neox", fields={"rotary_pct": 0.5}),
    Architecture("gptj", fields={"rotary_dim": 8}),
    Architecture("gpt_neo", fields={"attention_types": [[["global", "local"], 1]], "window_size": 16}),
    Architecture("gpt_bigcode"),
    Architecture("mamba", fields={"intermediate_size": 128, "state_size": 8, "time_step_rank": 8}),
    Architecture("mamba2", fields={"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}),
    Architecture("recurrent_gemma", fields={"lru_width": HIDDEN, "attention_window_size": 16}),
    Architecture("codegen", fields={"rotary_dim": 8}),
    Architecture("apertus"),
    Architecture("arcee"),
    Architecture("all_attention", fields={"num_persistent_vectors": 12, "position_size": HIDDEN}),
)
ENCODERS = (
    *(Architecture(name, "SequenceClassification") for name in ("bert", "roberta", "distilbert", "mpnet")),
    Architecture("modernbert", "MaskedLM", {"local_attention": 16}),
    Architecture("deberta", "SequenceClassification", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Architecture(
        "deberta-v2",
        "SequenceClassification",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    ),
    Architecture("electra", "SequenceClassification"),
    Architecture("albert", "MaskedLM"),
    Architecture("nomic_bert", ""),
    Architecture("eurobert", "MaskedLM"),
)
OTHERS = (
    Architecture("t5", "Seq2SeqLM", {"d_kv": HEAD_DIM}),
    Architecture("bart", "Seq2SeqLM"),
    Architecture(
        "whisper",
        "SpeechSeq2Seq",
        {
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    Architecture(
        "wav2vec2",
        "CTC",
        {
            "conv_dim": [32, 32],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    Architecture("vit", "ImageClassification"),
    Architecture("deit", "ImageClassification"),
    Architecture("dinov2", "ImageClassification"),
    Architecture(
        "swin",
        "ImageClassification",
        {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    ),
    Architecture("convnext", "ImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2}),
    Architecture("resnet", "ImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2]}),
    Architecture(
        "clip",
        "",
        {
            "text_config": _plain(tiny_config("clip_text_model")),
            "projection_dim": 32,
            "vision_config": _plain(tiny_config("clip_vision_model", **_VISION)),
        },
    ),
    Architecture(
        "siglip",
        "",
        {
            "text_config": _plain(tiny_config("siglip_text_model", projection_size=32)),
            "vision_config": _plain(tiny_config("siglip_vision_model", **_VISION)),
        },
    ),
    _language_and_vision("llava", "llama", "clip_vision_model", image_token_index=90),
    _language_and_vision(
        "gemma3",
        "gemma3_text",
        "siglip_vision_model",
        image_token_index=90,
        mm_tokens_per_image=4,
        text={**_WINDOWS, "query_pre_attn_scalar": 16},
    ),
    _language_and_vision("paligemma", "gemma", "siglip_vision_model", image_token_index=90, projection_dim=HIDDEN),
    _language_and_vision("mistral3", "mistral", "pixtral", image_token_index=90, vision={"head_dim": 16}),
    _language_and_vision(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_5_vl_vision",
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        vision={"depth": 2, "num_heads": 2, "out_hidden_size": HIDDEN},
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    ),
)
ARCHITECTURES = {row.model_type: row for row in (*DECODERS, *ENCODERS, *OTHERS)}
