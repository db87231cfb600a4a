"""Read config.json as untrusted input: it must not run code, download files or allocate absurd amounts of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from smelt.errors import ModelError
from smelt.models import all_attention, cifar_resnet, image_diffusion, mlp_policy, quartznet
from smelt.models.json_file import one_line, read_object
from smelt.models.model_types import check_loadable

all_attention.register()
cifar_resnet.register()
image_diffusion.register()
mlp_policy.register()
quartznet.register()

# Keys that name code, kernels, files or machines instead of describing the network.
_INSTRUCTIONS = {
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "custom_pipelines",
    "distributed_config",
    "fusion_config",
    "transformers_weights",
}
# The objects that configs contain beside nested configs. Any other may be the config of a second model.
_OBJECTS = {
    *("id2label", "label2id", "per_layer_config", "pruned_heads", "rope_parameters", "rope_scaling"),
    "task_specific_params",
}
# The lists of lists that describe layers.
_NESTED_LISTS = {"attention_types"}
_DTYPES = {"float32", "float16", "bfloat16", "float64"}
_MAX_LIST = 1_000  # entries of a list of sizes, and of blocks that such a list describes
_MAX_EXPERTS = 2**15  # of all layers: each becomes a module
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# The largest accepted value of each size, far above any existing model.
_MAX_SIZES = {
    **dict.fromkeys([*_LAYER_COUNTS, "depths"], 1_000),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 1_000),
    **dict.fromkeys(["num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"], 2**12),
    **dict.fromkeys(EXPERT_COUNTS, 2**12),
    **dict.fromkeys(["hidden_size", "hidden_sizes", "n_embd", "d_model", "dim", "embedding_size", "head_dim"], 2**20),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "word_embed_proj_dim"], 2**20),
    **dict.fromkeys(["moe_intermediate_size"], 2**20),
    **dict.fromkeys(["image_size", "patch_size", "num_channels", "num_labels", "type_vocab_size"], 2**20),
    "vocab_size": 2**24,
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 2**27),
}

# Of other numbers, by a word in their name (the first that fits).
_MAX_SIZES_BY_WORD = {
    **dict.fromkeys(["token_id", "vocab", "position", "seq_len", "length", "rate"], 2**27),
    **dict.fromkeys(["layers", "blocks", "depth", "stages", "group"], 1_000),
    **dict.fromkeys(["heads", "experts"], 2**12),
    **dict.fromkeys(["size", "dim", "width", "channel", "hidden"], 2**20),
}
_MAX_NUMBER = 2**31

_MAY_BE_ZERO = {"type_vocab_size"}  # DeBERTa has no token types

_GENERATION_KEYS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("is_multilingual", "lang_to_id", "no_timestamps_token_id", "task_to_id"),  # of Whisper
    *("begin_suppress_tokens", "suppress_tokens"),
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length", "max_new_tokens"),
}


# The `quant_method` of folders that vLLM and transformers read, and of GPT-OSS as it is published.
COMPRESSED_TENSORS, MXFP4 = "compressed-tensors", "mxfp4"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers; Smelt reports what matters."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


class _Offline:
    """Counts the threads that are inside `hub_offline`."""

    lock = threading.Lock()
    users = 0
    before = False


@contextmanager
def hub_offline() -> Iterator[None]:
    """Make every request to the hub fail, from any thread.

    Around each call in which transformers reads untrusted values: whatever they name is not fetched.
    """
    with _Offline.lock:
        if not _Offline.users:
            _Offline.before = huggingface_hub.constants.HF_HUB_OFFLINE
            huggingface_hub.constants.HF_HUB_OFFLINE = True
        _Offline.users += 1
    try:
        yield
    finally:
        with _Offline.lock:
            _Offline.users -= 1
            if not _Offline.users:
                huggingface_hub.constants.HF_HUB_OFFLINE = _Offline.before


def read_config(folder: Path) -> PreTrainedConfig:
    """Read config.json of a folder in Hugging Face format, without a `quantization_config` that Smelt reads."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; a model folder in Hugging Face format is expected.")
    values = read_object(folder / "config.json")
    if _quant_method(values) in (COMPRESSED_TENSORS, MXFP4):
        del values["quantization_config"]
    return config_from(values, str(folder / "config.json"))


def quant_method(folder: Path) -> str | None:
    """Return the `quant_method` that a folder's config declares, if any."""
    file = folder / "config.json"
    return _quant_method(read_object(file)) if file.is_file() else None


def _quant_method(values: dict[str, Any]) -> str | None:
    quantization = values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method if isinstance(method, str) else None


def config_from(values: dict[str, Any], where: str) -> PreTrainedConfig:
    """Build the transformers config from `values`; `where` names their source in errors."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{where} has no model_type, so the architecture is unknown.")
    check_loadable(model_type, where)
    if values.get("quantization_config"):
        raise ModelError(f"{where} describes an already quantized model; use the unquantized one.")
    try:
        _check_sizes(values, where, minimum=1)
        _check_counts(values, where)
        with quiet_transformers(), hub_offline():
            config_class = CONFIG_MAPPING[model_type]
            return config_class.from_dict(_safe_values(config_class._decode_special_floats(values), where))
    except ModelError:
        raise
    except Exception as error:  # a third-party constructor may raise anything on untrusted values
        raise ModelError(f"{where} is not a usable {model_type} config ({one_line(error)}).") from error


def _safe_values(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values without instructions; nested configs of the type are checked like the outer one."""
    safe = _without_instructions(values)
    for key, config_class in CONFIG_MAPPING[values["model_type"]].sub_configs.items():
        nested = values.get(key)
        if not isinstance(nested, dict):
            continue
        model_type = nested.get("model_type", getattr(config_class, "model_type", ""))
        if getattr(config_class, "model_type", "") not in ("", model_type):
            raise ModelError(f"{where} has a {key} of the model_type {model_type!r:.80}, which it cannot contain.")
        if model_type:  # otherwise a group of settings, which builds nothing
            check_loadable(str(model_type), f"{where} ({key})", nested=True)
            _check_counts(nested, where)
        safe[key] = _without_instructions(nested)
    return safe


def _check_sizes(values: dict[str, Any], where: str, minimum: int) -> None:
    for key, value in values.items():
        if (maximum := _MAX_SIZES.get(key)) is not None:
            least = 0 if key in _MAY_BE_ZERO else minimum
            for size in value if isinstance(value, list) else [value]:
                if size is not None and not (type(size) is int and least <= size <= maximum):
                    limits = f"{least} to {maximum}"
                    raise ModelError(f"{where} has {key} = {value!r:.80}; a whole number from {limits} is expected.")
        elif isinstance(value, dict):
            # Sizes of a single layer may be 0 after pruning; those of the network may not.
            _check_sizes(value, where, minimum=0 if key == "per_layer_config" else minimum)
        else:
            _check_unknown_size(key, value, where)


def _check_unknown_size(key: str, value: Any, where: str) -> None:
    """Bound the numbers of fields that no table names, by what their names say. A network that is too large for them
    nonetheless is refused while it is built, and before its weights are allocated."""
    maximum = next((limit for word, limit in _MAX_SIZES_BY_WORD.items() if word in key), _MAX_NUMBER)
    for number in _numbers(value):
        if abs(number) > maximum:
            raise ModelError(f"{where} has {key} = {value!r:.80}; numbers up to {maximum} are accepted.")


def _numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers in a value of a config."""
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif type(value) is int:
        yield value


def _check_counts(values: dict[str, Any], where: str) -> None:
    """Check the number of modules, each of which costs time and memory even on the meta device."""
    for key, value in values.items():
        if not isinstance(value, list):
            continue
        if len(value) > _MAX_LIST or (key == "depths" and sum(size or 0 for size in value) > _MAX_LIST):
            raise ModelError(f"{where} has a {key} that describes more than {_MAX_LIST} layers.")
    layers = max((values[key] for key in _LAYER_COUNTS if isinstance(values.get(key), int)), default=1)
    experts = max((values[key] for key in EXPERT_COUNTS if isinstance(values.get(key), int)), default=0)
    if layers * experts > _MAX_EXPERTS:
        raise ModelError(f"{where} describes {layers * experts} experts; at most {_MAX_EXPERTS} are accepted.")


def _without_instructions(values: dict[str, Any], nested: bool = False) -> dict[str, Any]:
    """Drop private fields, instructions and the configs of other models, recursively."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith("_") or key in _INSTRUCTIONS or "backbone" in key:
            continue
        if key in ("dtype", "torch_dtype") and str(value) not in _DTYPES:
            continue
        if (
            isinstance(value, list)
            and any(isinstance(item, dict | list) for item in value)
            and key not in _NESTED_LISTS
        ):
            continue
        if isinstance(value, dict) and not nested and key not in _OBJECTS:
            continue
        kept[key] = _without_instructions(value, nested=True) if isinstance(value, dict) else value
    return kept


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Read the token ids and sampling parameters of generation_config.json; None if the folder has none."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    values = {key: value for key, value in read_object(path).items() if key in _GENERATION_KEYS}
    try:
        return GenerationConfig(**values)
    except Exception as error:  # third-party code on untrusted values
        raise ModelError(f"{path} is not a usable generation config ({one_line(error)}).") from error
