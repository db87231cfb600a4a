"""Surgery: physically remove units, so that the matrices get smaller and no mask is needed; channels can be added.

Everything also works on the meta device, which is how a saved shape is restored before its weights are loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Part, Projection
from smelt.models.quantized import QuantizedLinear


class NoAttention(nn.Module):
    """Replaces an attention without heads: returns the output projection of an empty input (its bias).

    It still writes one value per token to a KV cache, since generation reads the sequence length from the cache.
    """

    def __init__(self, output_name: str | None, output: nn.Module | None, layer_idx: int | None) -> None:
        super().__init__()
        self.output_name = output_name
        self.layer_idx = layer_idx
        if output_name is not None:
            self.add_module(output_name, output)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        cache = kwargs.get("past_key_values")
        if cache is not None:
            placeholder = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache.update(placeholder, placeholder, self.layer_idx)
        context = hidden_states.new_zeros(*hidden_states.shape[:-1], 0)
        output = self.get_submodule(self.output_name)(context) if self.output_name else context
        return output, None


def keep_units(network: nn.Module, part: Part, keep: Sequence[int]) -> None:
    """Keep the units of a part at these current positions, in this order, and remove all others."""
    if list(keep) == list(range(part.units)):
        return
    if part.fixed:
        raise ModelError(f"the {part.kind} of {part.path} {part.fixed}, so none of them can be removed.")
    if not len(keep) and part.attention is not None and not part.attention.removable:
        raise ModelError(f"{part.path} does more than attend: keep at least one of its heads.")
    if not len(keep) and part.implant is not None:
        raise ModelError(f"{part.path} has a neural implant: keep at least one of its {part.kind}.")
    index = torch.as_tensor(list(keep), dtype=torch.long, device=part.output.device)
    for module, rows in rows_to_keep(part, index):
        _keep_rows(module, rows)
    _keep_columns(part.output, expand_units(index, part.columns_per_unit))
    if part.norm is not None:
        _keep_norm(part.norm, index)
    _record_kept_units(part, keep)
    if part.attention is not None:
        _resize_attention(network, part, index)
    elif not len(keep):
        _replace_empty_output(network, part.output)


def widen_channels(part: Part, units: int) -> None:
    """Add channels to a part of a convolution block: filters are initialized as before training, norms to identity."""
    added = units - part.units
    kept, original = part.kept, part.original_units
    for projection, dimension in ((part.input_projections[0], 0), (part.output, 1)):
        module, weight = projection.module, projection.module.weight
        shape = list(weight.shape)
        shape[dimension] = added
        module.weight = _parameter(weight, torch.cat([weight, _new_filters(weight, shape)], dimension))
    projection, output = part.input_projections[0].module, part.output.module
    if projection.bias is not None:
        projection.bias = _parameter(projection.bias, _pad(projection.bias, added, 0.0))
    _set_size(projection, ("out_channels",), units)
    _set_size(output, ("in_channels",), units)
    norm = part.norm
    norm.weight, norm.bias = (
        _parameter(tensor, _pad(tensor, added, fill)) for tensor, fill in ((norm.weight, 1.0), (norm.bias, 0.0))
    )
    for name, fill in (("running_mean", 0.0), ("running_var", 1.0)):
        norm.register_buffer(name, _pad(getattr(norm, name), added, fill))
    norm.num_features = units
    part.owner.smelt_kept_units = (*kept, *range(original, original + added))
    part.owner.smelt_original_units = original


def scale_units(part: Part, scale: Tensor) -> None:
    """Fold one factor per unit into the output projection."""
    factor = scale.to(part.output.weight).repeat_interleave(part.columns_per_unit)
    with torch.no_grad():
        part.output.weight.mul_(factor.view(1, -1, *[1] * (part.output.weight.dim() - 2)))


def set_output(part: Part, weight: Tensor, bias: Tensor | None) -> None:
    """Set the weight [out, in] and bias of the output projection, adding a bias if it had none."""
    module = part.output.module
    with torch.no_grad():
        part.output.weight.copy_(weight)
        if bias is None:
            return
        if module.bias is None:
            module.smelt_added_bias = True
            module.bias = nn.Parameter(bias.to(module.weight).clone(), requires_grad=module.weight.requires_grad)
        else:
            module.bias.copy_(bias)


def restore_shape(anatomy: Anatomy, shape: Sequence[dict[str, Any]]) -> None:
    """Resize a freshly built network to a saved shape. Only sizes matter: weights are loaded afterwards."""
    parts = {part.name: part for part in anatomy.parts}
    for entry in shape:
        part = parts[entry["part"]]
        if part.kind == "channels" and entry["units"] > part.units:
            widen_channels(part, entry["units"])
            part.owner.smelt_original_units = entry["of"]
        elif part.units != entry["units"]:
            keep_units(anatomy.network, part, entry.get("kept", range(entry["units"])))
        elif entry["units"] != entry["of"]:  # already built at this width: only record the original one
            part.owner.smelt_kept_units = tuple(entry.get("kept", range(entry["units"])))
            part.owner.smelt_original_units = entry["of"]


def expand_units(index: Tensor, width: int) -> Tensor:
    """Expand unit indices to the row indices they own: [units] -> [units * width]."""
    return (index[:, None] * width + torch.arange(width, device=index.device)).flatten()


def rows_to_keep(part: Part, index: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """Return each input module once with its rows to keep; a fused module keeps the same units in each chunk."""
    rows: dict[int, tuple[nn.Module, list[Tensor]]] = {}
    widths = sorted(zip(part.input_projections, part.rows_per_unit, strict=True), key=lambda entry: entry[0].first_row)
    for projection, rows_per_unit in widths:
        rows.setdefault(id(projection.module), (projection.module, []))[1].append(
            projection.first_row + expand_units(index, rows_per_unit)
        )
    return [(module, torch.cat(indices)) for module, indices in rows.values()]


def _parameter(old: nn.Parameter, new: Tensor) -> nn.Parameter:
    return nn.Parameter(new.detach().contiguous(), requires_grad=old.requires_grad)


def _new_filters(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Return filters drawn as those of a new convolution of this kernel and number of outputs."""
    filters = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    fan_out = len(weight) * weight[0, 0].numel()
    return filters if filters.is_meta else filters.normal_(std=math.sqrt(2 / fan_out))


def _pad(tensor: Tensor, count: int, fill: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((count,), fill)])


def _keep_rows(module: Any, rows: Tensor) -> None:
    if isinstance(module, QuantizedLinear):
        module.keep_rows(rows)
        return
    dimension = 1 if isinstance(module, Conv1D) else 0
    module.weight = _parameter(module.weight, module.weight.index_select(dimension, rows))
    if module.bias is not None:
        module.bias = _parameter(module.bias, module.bias.index_select(0, rows))
    _set_size(module, ("out_features", "out_channels", "nf"), len(rows))


def _keep_columns(projection: Projection, columns: Tensor) -> None:
    module = projection.module
    if isinstance(module, QuantizedLinear):
        module.keep_columns(columns)
        return
    dimension = 0 if projection.transposed else 1
    module.weight = _parameter(module.weight, module.weight.index_select(dimension, columns))
    _set_size(module, ("in_features", "in_channels", "nx"), len(columns))


def _set_size(module: nn.Module, names: Sequence[str], size: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, size)


def _keep_norm(norm: Any, index: Tensor) -> None:
    for name in ("weight", "bias"):
        setattr(norm, name, _parameter(getattr(norm, name), getattr(norm, name).index_select(0, index)))
    for name in ("running_mean", "running_var"):
        norm.register_buffer(name, getattr(norm, name).index_select(0, index))
    norm.num_features = len(index)


def _record_kept_units(part: Part, keep: Sequence[int]) -> None:
    """Record the original indices of the kept units on the module, for any later surgery."""
    kept = part.kept
    part.owner.smelt_kept_units = tuple(kept[i] for i in keep)
    part.owner.smelt_original_units = part.original_units


def _resize_attention(network: nn.Module, part: Part, index: Tensor) -> None:
    """Update everything else in an attention module that depends on its heads, of which `index` are kept."""
    paths, owner, units = part.attention, part.owner, len(index)
    assert paths is not None
    if units == 0:
        _replace_attention(network, part)
        return
    for name in paths.head_parameters:
        parameter = getattr(owner, name)
        setattr(owner, name, _parameter(parameter, parameter.index_select(0, index.to(parameter.device))))
    sizes = {"heads": units * part.heads_per_unit, "kv_heads": units, "width": units * part.columns_per_unit}
    for name, meaning in paths.attributes.items():
        setattr(owner, name, sizes[meaning])
    if paths.head_planes is not None and not hasattr(owner, "smelt_slices_planes"):
        owner.smelt_slices_planes = True
        owner.register_forward_pre_hook(_PlaneSlicer(paths.head_planes), with_kwargs=True)


class _PlaneSlicer:
    """Slices an argument with one plane per head to the remaining heads."""

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = inspect.signature(module.forward).bind(*args, **kwargs)
        planes = call.arguments.get(self.argument)
        if planes is not None:  # [batch, heads, queries, keys]
            call.arguments[self.argument] = planes[:, list(module.smelt_kept_units)]
        return call.args, call.kwargs


def _replace_attention(network: nn.Module, part: Part) -> None:
    paths, owner = part.attention, part.owner
    assert paths is not None
    inside = part.output.path.startswith(part.path + ".")
    name = part.output.path[len(part.path) + 1 :] if inside else None
    output = _empty_linear(part.output) if inside else None
    if not inside:
        _replace_empty_output(network, part.output)
    replacement: Any = NoAttention(name, output, getattr(owner, "layer_idx", None))
    setattr(replacement, paths.head_dim, part.head_dim)
    replacement.smelt_kept_units, replacement.smelt_original_units = (), part.original_units
    replacement.smelt_unit_width = part.columns_per_unit
    replacement.train(owner.training)
    _replace(network, part.path, replacement)


def _replace_empty_output(network: nn.Module, output: Projection) -> None:
    """Replace an empty Conv1D, which cannot run on zero inputs, by a Linear."""
    if output.transposed:
        _replace(network, output.path, _empty_linear(output))


def _empty_linear(output: Projection) -> nn.Module:
    if not output.transposed:
        module: nn.Module = output.module
        return module
    old = output.module
    linear: Any = nn.utils.skip_init(
        nn.Linear, 0, output.out_features, device=old.weight.device, dtype=old.weight.dtype
    )
    linear.bias = old.bias
    linear.weight.requires_grad_(old.weight.requires_grad)
    for name in ("smelt_kept_units", "smelt_original_units"):
        if hasattr(old, name):
            setattr(linear, name, getattr(old, name))
    empty: nn.Module = linear
    return empty


def _replace(network: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, module)
