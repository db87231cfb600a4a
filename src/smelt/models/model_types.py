"""The model types that Smelt lets transformers build from untrusted files.

transformers knows many more. Some of them build a second model from a field of the config (a backbone, a text or vision
model, an encoder or decoder), and about twenty download that one from the hub. The types here build nothing but
themselves: their config classes have neither nested configs nor backbones, which a test checks.
"""

from __future__ import annotations

from smelt.models.families import FAMILIES

_COMPRESSED = {model_type for family in FAMILIES for model_type in family.model_types}

# Not compressed, but loaded and measured.
_DECODERS = {
    *("apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4"),
    *("falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss"),
    *("gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "ministral", "ministral3", "nemotron", "olmo"),
    *("olmo2", "olmo3", "persimmon", "phi", "phi3", "phimoe", "qwen2_moe", "seed_oss", "stablelm", "starcoder2"),
}
_ENCODERS = {
    *("albert", "convbert", "deberta", "deberta-v2", "electra", "ernie", "mobilebert", "modernbert", "nomic_bert"),
    *("rembert", "roberta-prelayernorm", "squeezebert", "xlm-roberta-xl"),
}
_IMAGE_NETWORKS = {
    *("beit", "convnext", "convnextv2", "deit", "dinov2", "efficientnet", "levit", "mobilenet_v1", "mobilenet_v2"),
    *("mobilevit", "poolformer", "pvt", "regnet", "segformer", "swin", "swinv2"),
}
LOADABLE_TYPES = frozenset(_COMPRESSED | _DECODERS | _ENCODERS | _IMAGE_NETWORKS)
