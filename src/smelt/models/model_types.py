"""The model types that Smelt lets transformers build from untrusted files.

A config may describe a second model: a backbone, a text or vision model, an encoder or decoder. Some types download
that one from the hub, or run code of other packages. So a type is loaded if its config class has no nested config and
no backbone, or if it is listed in `NESTED`: then every nested config is checked like the outer one, and must be of a
type without nested configs. Requests to the hub fail in any case while a config is read or a network built.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING

from smelt.errors import ModelError
from smelt.models.families import GUIDE

# Types that build other models by name, with other packages, or with code from the hub.
_REFUSED = {
    *("rag", "timm_wrapper", "timm_backbone", "encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"),
    *("vision-text-dual-encoder", "layoutlmv2", "layoutxlm", "mra", "yoso", "rwkv", "gemma3n_vision"),
    *("musicgen_decoder", "musicgen_melody_decoder", "qwen2_5_omni_audio_encoder", "qwen2_5_omni_bigvgan"),
    *("qwen2_5_omni_dit", "qwen2_5_omni_talker", "qwen2_5_omni_text", "qwen2_5_omni_vision_encoder"),
}
# Types with nested configs that are loaded: dual encoders, vision-language models, and types with a nested group of
# settings. Their configs name no other model.
NESTED = frozenset(
    {
        *("clip", "siglip", "siglip2", "mpt", "dbrx"),
        *("gemma3", "paligemma", "llava", "llava_next", "llava_onevision", "mistral3", "llama4", "idefics3", "smolvlm"),
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "aya_vision", "got_ocr2", "lfm2_vl", "qwen2_audio"),
    }
)
_NEAREST = {
    "deberta_v2": "deberta-v2", "deberta-v3": "deberta-v2", "deberta_v3": "deberta-v2", "xlm_roberta": "xlm-roberta",
    "gpt-neox": "gpt_neox", "gpt-oss": "gpt_oss", "gpt-j": "gptj", "mamba-2": "mamba2", "whisper-large": "whisper",
}  # fmt: skip


def check_loadable(model_type: str, where: str, *, nested: bool = False) -> None:
    """Raise unless configs of this type are built; `nested`: inside of another config."""
    reason = _refusal(model_type, nested)
    if reason is not None:
        raise ModelError(f"{where} has the model_type {model_type!r:.80}, which Smelt does not load: {reason}.")


@cache
def _refusal(model_type: str, nested: bool) -> str | None:
    if model_type not in CONFIG_MAPPING:
        hint = f"; did you mean {_NEAREST[model_type]!r}" if model_type in _NEAREST else ""
        return (
            "this version of transformers has no such type, and Smelt never runs code that comes with a model"
            f"{hint} ({GUIDE})"
        )
    if model_type in _REFUSED:
        return "it builds other models by name or with other packages, which untrusted files must not choose"
    config_class = CONFIG_MAPPING[model_type]
    if config_class.sub_configs and (nested or model_type not in NESTED):
        return (
            "its config describes further models, and it is not among the types whose nested configs are checked; save "
            f"the part that you want to compress as a model of its own ({GUIDE})"
        )
    if any("backbone" in name for name in _field_names(config_class)):
        return "its config names a backbone, and untrusted files must not choose one"
    return None


def _field_names(config_class: Any) -> set[str]:
    names: set[str] = set()
    for ancestor in config_class.__mro__:
        names.update(getattr(ancestor, "__annotations__", {}))
    return names | set(vars(config_class))


def is_loadable(model_type: str) -> bool:
    """Return whether models of this type are loaded."""
    return _refusal(model_type, nested=False) is None
