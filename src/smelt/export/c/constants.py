"""Constants of a C export: arrays in files that compilers can handle, and literals."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.runtime.integer.graph import dtype_name

_VALUES_PER_FILE = 2**22  # compilers need about 160 bytes of memory for each


@dataclass
class Constants:
    """Arrays of constants; equal ones are written once."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _names: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> str:
        """Return the name of the array that holds a tensor."""
        tensor = tensor.detach().cpu().contiguous()
        key = dtype_name(tensor), tensor.numpy().tobytes()
        if key not in self._names:
            self._names[key] = f"model_constant_{len(self.tensors)}"
            self.tensors[self._names[key]] = tensor
        return self._names[key]

    def files(self) -> dict[str, str]:
        """Return `constants.h` and the files with the arrays."""
        declarations = "".join(
            f"extern const {dtype_name(tensor)}_t {name}[{max(tensor.numel(), 1)}];\n"
            for name, tensor in self.tensors.items()
        )
        guard = "#ifndef MODEL_CONSTANTS_H\n#define MODEL_CONSTANTS_H\n\n#include <stdint.h>\n\n{}\n#endif\n"
        files = {"constants.h": guard.format(declarations)}
        group: list[str] = []
        values = 0
        for name, tensor in self.tensors.items():
            if group and values + tensor.numel() > _VALUES_PER_FILE:
                files[f"constants_{len(files) - 1}.c"] = _constants_file(group)
                group, values = [], 0
            group.append(
                f"const {dtype_name(tensor)}_t {name}[{max(tensor.numel(), 1)}] = {{\n{array_values(tensor)}\n}};\n"
            )
            values += tensor.numel()
        return files | ({f"constants_{len(files) - 1}.c": _constants_file(group)} if group else {})


def literal(value: int) -> str:
    """Return an int64 literal; the smallest one cannot be written as a negated positive one."""
    if value == -(2**63):
        return "INT64_MIN"
    return str(value) if abs(value) < 2**31 else f"INT64_C({value})"


def array_values(tensor: Tensor) -> str:
    values = tensor.flatten().tolist() or [0]
    if tensor.dtype == torch.int64:
        texts = [literal(value) for value in values]
    else:
        texts = ["INT32_MIN" if value == -(2**31) else str(value) for value in values]
    lines = (", ".join(texts[start : start + 20]) for start in range(0, len(texts), 20))
    return ",\n".join(f"    {line}" for line in lines)


def _constants_file(arrays: list[str]) -> str:
    return "\n".join(('#include "constants.h"\n', *arrays))
