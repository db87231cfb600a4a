"""Description of a packed matrix for the compiled code: the same fields as `LinearPlan` in `source/plan.h`."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from smelt.kernels.linear import ActivationQuant
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled, SignedScales, TensorScaled, Ternary
from smelt.numerics.scales import load_scale

UNIFORM, TABLE, TWO_SCALES, DENORMAL = range(4)  # how codes are dequantized
DTYPE_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
BYTE = 4
FLOAT_INPUTS, PER_TOKEN_SCALE, FIXED_SCALE = range(3)  # how input activations are quantized
FLOAT_TYPES = (torch.float32, torch.bfloat16)
_DEQUANT_MODES: dict[type[Format], int] = {
    Integer: UNIFORM,
    DenormalInteger: DENORMAL,
    Scaled: TABLE,
    Ternary: TABLE,
    TensorScaled: TABLE,
    SignedScales: TWO_SCALES,
}


class LinearPlan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "group", "groups", "scale_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("bits", "dequant_mode", "scale_type", "zero_type", "bias_type", "x_type")
        ),
        ("inputs", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("center", "amax_code", "qmin", "qmax", "clip_ratio")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "negative", "divisor")),
        *((name, ctypes.c_void_p) for name in ("scale_table", "table", "bias", "x_scale")),
    ]


def supports_format(number_format: Format, tensors: dict[str, Tensor]) -> bool:
    """Return whether the compiled code supports a format and the dtypes of its quantization parameters."""
    if type(number_format) not in _DEQUANT_MODES:
        return False
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    consistent = (
        dtypes.get("negative", dtypes["scale"]) == dtypes["scale"]
        and dtypes.get("tensor", torch.float32) == torch.float32
    )
    zero_dtype = dtypes.get("zero", torch.uint8)
    return consistent and dtypes["scale"] in (*DTYPE_CODES, *BYTES) and zero_dtype in (*DTYPE_CODES, torch.uint8)


def supports_inputs(inputs: ActivationQuant | None) -> bool:
    """Return whether inputs are symmetric integers with per-token scales or one static scale."""
    if inputs is None or type(inputs.format) is not Integer or not inputs.format.symmetric:
        return False
    if inputs.scale is None:
        return inputs.format.group_size == PER_ROW and inputs.format.scale_dtype == "float32"
    scale = inputs.scale
    return scale.numel() == 1 and scale.dtype == torch.float32 and scale.device.type == "cpu"


def make_linear_plan(
    number_format: Format,
    rows: int,
    columns: int,
    tensors: dict[str, Tensor],
    inputs: ActivationQuant | None,
    x: torch.dtype,
) -> LinearPlan:
    """Return a plan that points into the tensors, which must outlive it. `inputs` only if `supports_inputs`."""
    scale, zero, size = tensors["scale"], tensors.get("zero"), number_format.effective_group_size(columns)
    plan = LinearPlan(rows=rows, columns=columns, group=size, groups=-(-columns // size), bits=number_format.bits)
    plan.scale_stride = 0 if number_format.group_size == PER_TENSOR else plan.groups
    plan.dequant_mode, plan.x_type = _DEQUANT_MODES[type(number_format)], DTYPE_CODES[x]
    plan.scale_type = BYTE if scale.dtype in BYTES else DTYPE_CODES[scale.dtype]
    if zero is not None:
        plan.zero_type = BYTE if zero.dtype == torch.uint8 else DTYPE_CODES[zero.dtype]
    if isinstance(number_format, Integer):
        plan.center = _center(number_format)
    if isinstance(number_format, Scaled):
        plan.table = _table(number_format).data_ptr()
    if plan.scale_type == BYTE:
        plan.scale_table = _scale_table(number_format, scale.dtype).data_ptr()
    for field, name in (("zero", "zero"), ("negative", "negative"), ("divisor", "tensor")):
        if name in tensors:
            setattr(plan, field, tensors[name].data_ptr())
    plan.codes, plan.scale = tensors["codes"].data_ptr(), scale.data_ptr()
    if inputs is not None:
        _set_inputs(plan, inputs)
    return plan


def _set_inputs(plan: LinearPlan, inputs: ActivationQuant) -> None:
    number_format = inputs.format
    assert isinstance(number_format, Integer)
    plan.inputs = PER_TOKEN_SCALE if inputs.scale is None else FIXED_SCALE
    plan.amax_code = number_format.qmax / 2 if number_format.full_range else number_format.qmax // 2
    plan.qmin, plan.qmax = -(number_format.qmax // 2 + 1), number_format.qmax // 2
    plan.clip_ratio = inputs.clip_ratio
    plan.x_scale = None if inputs.scale is None else inputs.scale.data_ptr()


def _center(number_format: Integer) -> float:
    """Return the code of zero without a zero point; uniform codes count from the middle even with one."""
    if isinstance(number_format, DenormalInteger):
        return float(number_format.num_steps // 2)
    return float(1 << (number_format.bits - 1))


@lru_cache(maxsize=256)
def _table(number_format: Scaled) -> Tensor:
    """Return the value of each of 256 codes; never freed, since plans point to it."""
    values = torch.full((256,), float("nan"))
    values[: len(number_format.elements.values)] = torch.tensor(number_format.elements.values)
    return _keep_alive(values)


@lru_cache(maxsize=256)
def _scale_table(number_format: Format, dtype: torch.dtype) -> Tensor:
    return _keep_alive(load_scale(torch.arange(256, dtype=torch.uint8).view(dtype), number_format.scale_dtype))


_TABLES: list[Tensor] = []


def _keep_alive(table: Tensor) -> Tensor:
    _TABLES.append(table)
    return table
