"""Build networks from a config and tensors; shapes are checked on the meta device before memory is allocated.

Fused experts are split here, so that every network that Smelt builds has separate experts. The number of modules is
bounded while a network is built, and the bytes of its buffers before they are allocated: a hostile config may describe
more than any weights hold.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from smelt.errors import ModelError
from smelt.models.config import hub_offline, quiet_transformers
from smelt.models.experts import split_experts
from smelt.models.json_file import one_line

_AUTO_CLASS_OF_HEAD = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForImageClassification": transformers.AutoModelForImageClassification,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
}

_MAX_MODULES = 2**18  # more than any published network has with separate experts
_MAX_BUFFER_BYTES = 2**28  # beside what the weights take: masks and position tables are computed, not stored

# An encoder without a head is often saved without its pooler, which is then unused. Under a classifier the pooler's
# name has a prefix, and it must not be missing.
_HARMLESS_WHEN_MISSING = "pooler."


def empty_network(config: PreTrainedConfig, where: str, device: str = "meta") -> PreTrainedModel:
    """Build the network that the config describes, by default on the meta device (no memory allocated)."""
    try:
        with torch.device(device), quiet_transformers(), hub_offline(), _bounded_modules(where):
            return split_experts(_build(config))
    except ModelError:
        raise
    except Exception as error:  # a third-party constructor may raise anything on untrusted values
        raise ModelError(
            f"{where} does not describe a network that transformers can build ({one_line(error)})."
        ) from error


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the network with the class that the config names, if it is one of transformers for configs of this type;
    otherwise with the class that transformers has for the head that the name ends in."""
    name = str((config.architectures or [""])[0])
    own_module = type(config).__module__.replace(".configuration_", ".modeling_")
    named: Any = getattr(importlib.import_module(own_module), name, None)
    is_network = isinstance(named, type) and issubclass(named, PreTrainedModel)
    if is_network and named.config_class is type(config):
        network: PreTrainedModel = named._from_config(config)  # as the auto classes do
        return network
    auto = next((auto for head, auto in _AUTO_CLASS_OF_HEAD.items() if name.endswith(head)), transformers.AutoModel)
    built: PreTrainedModel = auto.from_config(config, trust_remote_code=False)
    return built


@contextmanager
def _bounded_modules(where: str) -> Iterator[None]:
    """Raise as soon as more than `_MAX_MODULES` modules are built."""
    init, count = nn.Module.__init__, 0

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count > _MAX_MODULES:
            raise ModelError(f"{where} describes a network of more than {_MAX_MODULES} modules.")
        init(module, *args, **kwargs)

    nn.Module.__init__ = counting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__init__ = init  # type: ignore[method-assign]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build networks with parameters on the meta device but real buffers, since buffers may not be in the file."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def matching_network(config: PreTrainedConfig, shapes: dict[str, tuple[int, ...]], where: str) -> PreTrainedModel:
    """Build the empty network of the config; raise if the shapes of the weights do not match it."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(shapes):
        raise ModelError(
            f"{where}: the config describes {layers} blocks, but the weights hold only {len(shapes)} tensors."
        )
    empty = empty_network(config, where)
    for name, expected in empty.state_dict().items():
        if name in shapes and shapes[name] != tuple(expected.shape):
            raise ModelError(f"{where}: {name} is {list(shapes[name])}, but the config expects {list(expected.shape)}.")
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    num_stored = sum(math.prod(shape) for shape in shapes.values())
    # Names can differ between file and network, so the exact comparison comes after loading; this bound keeps a
    # malicious config from allocating much more than the file holds. Factor 2: heads may share the embedding.
    if num_parameters > 2 * num_stored + 2**20:
        raise ModelError(
            f"{where}: the config describes {num_parameters} parameters, but the weights hold only {num_stored}."
        )
    check_buffers(empty, num_stored, where)
    return empty


def check_buffers(empty: PreTrainedModel, num_stored: int, where: str) -> None:
    """Raise if buffers that are computed and not stored would take much more than the weights."""
    size = sum(buffer.numel() * buffer.element_size() for buffer in empty.buffers())
    if size > 8 * num_stored + _MAX_BUFFER_BYTES:
        raise ModelError(f"{where}: the config describes tables of {size} bytes, far more than its weights.")


def fill_network(empty: PreTrainedModel, tensors: dict[str, Tensor], dtype: torch.dtype, where: str) -> PreTrainedModel:
    """Load tensors into the network, in eval mode. transformers gets only names and tensors, no file."""
    try:
        # Tensors that a file may lack are initialized randomly; a fixed seed makes that deterministic.
        with quiet_transformers(), hub_offline(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network, report = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=tensors,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # third-party code on untrusted values
        raise ModelError(f"{where} cannot be loaded ({one_line(error)}).") from error
    _check_report(report, where)
    return split_experts(network)


def _check_report(report: dict[str, Any], where: str) -> None:
    mismatched = sorted(name for name, *_ in report["mismatched_keys"])
    if mismatched:
        raise ModelError(f"{where}: {_list_names(mismatched)} of another shape in the weights than in the config.")
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(_HARMLESS_WHEN_MISSING))
    if missing:
        raise ModelError(f"{where}: {_list_names(missing)} missing from the weights; Smelt does not make up weights.")
    if report["error_msgs"]:
        raise ModelError(f"{where} cannot be loaded ({' '.join(' '.join(report['error_msgs']).split())[:200]}).")


def _list_names(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} are"
