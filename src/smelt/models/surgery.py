"""Surgery: physically remove units. Afterwards the matrices are smaller and no mask is left.

Everything works on the meta device too, which is how a saved shape is laid out before its weights are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Part, Projection
from smelt.models.quantized import QuantizedLinear


class NoAttention(nn.Module):
    """Replaces an attention that lost all its heads: returns the output projection of an empty input (its bias).

    With a KV cache it still writes one value per token, since generation reads the sequence length from there.
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
            nothing = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache.update(nothing, nothing, self.layer_idx)
        context = hidden_states.new_zeros(*hidden_states.shape[:-1], 0)
        output = self.get_submodule(self.output_name)(context) if self.output_name else context
        return output, None


def keep_units(network: nn.Module, part: Part, keep: Sequence[int]) -> None:
    """Keep the units of a part at these positions (of what is there now), in this order, and delete all others."""
    if list(keep) == list(range(part.units)):
        return
    if part.fixed:
        raise ModelError(f"the {part.kind} of {part.path} are normed together, so that none of them can be removed.")
    index = torch.as_tensor(list(keep), dtype=torch.long, device=part.output.device)
    for module, rows in rows_to_keep(part, index):
        _keep_rows(module, rows)
    _keep_columns(part.output, expand_units(index, part.columns_per_unit))
    if part.norm is not None:
        _keep_norm(part.norm, index)
    _remember(part, keep)
    if part.attention is not None:
        _settle_attention(network, part, len(keep))
    elif not len(keep):
        _replace_empty_output(network, part.output)


def scale_units(part: Part, scale: Tensor) -> None:
    """Fold one factor a unit into the projection that reads it."""
    factor = scale.to(part.output.weight).repeat_interleave(part.columns_per_unit)
    with torch.no_grad():
        part.output.weight.mul_(factor.view(1, -1, *[1] * (part.output.weight.dim() - 2)))


def set_output(part: Part, weight: Tensor, bias: Tensor | None) -> None:
    """Put a new weight [out, in] and bias into the projection that reads the part, which may have had no bias."""
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
    """Bring a freshly built network to a saved shape. Only sizes matter here: the weights are read afterwards."""
    parts = {part.name: part for part in anatomy.parts}
    for entry in shape:
        part = parts[entry["part"]]
        if part.units != entry["units"]:
            keep_units(anatomy.network, part, entry.get("kept", range(entry["units"])))
        elif entry["units"] != entry["of"]:  # built at this width already: only the memory of what it was is missing
            part.owner.smelt_kept_units = tuple(entry.get("kept", range(entry["units"])))
            part.owner.smelt_original_units = entry["of"]


def expand_units(index: Tensor, width: int) -> Tensor:
    """Unit positions -> positions of the rows they own: [units] -> [units * width]."""
    return (index[:, None] * width + torch.arange(width, device=index.device)).flatten()


def rows_to_keep(part: Part, index: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """For each writing module once, the rows to keep; a fused module keeps the same units in each of its parts."""
    rows: dict[int, tuple[nn.Module, list[Tensor]]] = {}
    for projection, span in zip(part.input_projections, part.rows_per_unit, strict=True):
        offset = projection.chunk * projection.out_features
        rows.setdefault(id(projection.module), (projection.module, []))[1].append(offset + expand_units(index, span))
    return [(module, torch.cat(pieces)) for module, pieces in rows.values()]


def _parameter(old: nn.Parameter, new: Tensor) -> nn.Parameter:
    return nn.Parameter(new.detach().contiguous(), requires_grad=old.requires_grad)


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


def _remember(part: Part, keep: Sequence[int]) -> None:
    """The original indices of what is left, on the module itself, so that a second surgery still knows them."""
    kept = part.kept
    part.owner.smelt_kept_units = tuple(kept[i] for i in keep)
    part.owner.smelt_original_units = part.original_units


def _settle_attention(network: nn.Module, part: Part, units: int) -> None:
    """What else in an attention module depends on how many heads it has."""
    paths, owner = part.attention, part.owner
    assert paths is not None
    if units == 0:
        _replace_attention(network, part)
        return
    sizes = {"heads": units * part.heads_per_unit, "width": units * part.columns_per_unit}
    for name, meaning in paths.attributes.items():
        setattr(owner, name, sizes[meaning])
    if paths.head_planes is not None and not hasattr(owner, "smelt_slices_planes"):
        owner.smelt_slices_planes = True
        owner.register_forward_pre_hook(_PlaneSlicer(paths.head_planes), with_kwargs=True)


class _PlaneSlicer:
    """Slices an argument that carries one plane a head down to the heads that are left."""

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
    nothing: Any = NoAttention(name, output, getattr(owner, "layer_idx", None))
    setattr(nothing, paths.head_dim, part.head_dim)
    nothing.smelt_kept_units, nothing.smelt_original_units = (), part.original_units
    nothing.smelt_unit_width = part.columns_per_unit
    nothing.train(owner.training)
    _replace(network, part.path, nothing)


def _replace_empty_output(network: nn.Module, output: Projection) -> None:
    """A projection that reads nothing is a plain Linear of width zero, since Conv1D cannot run on nothing."""
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
    made: nn.Module = linear
    return made


def _replace(network: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, module)
