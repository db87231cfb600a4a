"""A device `fake` that computes on the CPU, and whose tensors mix with those of the CPU no more than a GPU's do.

The machines of the tests have no GPU, where code fails that leaves a tensor, a generator or an index on the CPU. That
raises here, too. `install` changes torch for the whole process: use it in a process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

NAME = "fake"
# What CUDA accepts with tensors of two devices: copies, and indices on the CPU.
MIXING = (
    "aten._to_copy",
    "aten.copy",
    "aten.index.Tensor",
    "aten.index_put",
    "aten._index_put_impl_",
    "aten._foreach_copy",
)
# Optimizers keep their steps on the CPU.
OPTIMIZERS = ("aten._foreach", "aten._fused")
_Generator, _data, _numpy, _tolist = torch.Generator, torch.Tensor.data, torch.Tensor.numpy, torch.Tensor.tolist
_autocast, _library = torch.autocast, []


class FakeTensor(torch.Tensor):
    """A tensor on the fake device; `values` are on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> FakeTensor:
        tensor: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=torch.device(NAME, 0), requires_grad=requires_grad,
        )  # fmt: skip
        tensor.values = values
        return tensor

    def __init__(self, *_: Any) -> None: ...

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operator, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensor:
        if id(self) not in memo:
            copied = FakeTensor(self.values.clone(), self.requires_grad)
            copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "values"})
            memo[id(self)] = copied
        result: FakeTensor = memo[id(self)]
        return result

    def __getitem__(self, index: Any) -> Any:
        return torch.Tensor.__getitem__(self, _index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        torch.Tensor.__setitem__(self, _index(index), value)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"{NAME}: a tensor of this device has no numpy array")

    def tolist(self) -> Any:
        return _tolist(self.detach().values)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return _data.__get__(self)

    @data.setter
    def data(self, other: FakeTensor) -> None:
        _data.__set__(self, other)
        self.values = other.values

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return sys._getframe(1).f_code.co_filename.endswith("observers.py")  # elsewhere CUDA itself would be called


class FakeGenerator(torch.Generator):
    """A generator that knows its device."""

    on_fake: bool

    def __new__(cls, device: Any = "cpu") -> FakeGenerator:
        self: FakeGenerator = super().__new__(cls, "cpu")
        self.on_fake = torch.device(device).type == NAME
        return self

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, 0) if self.on_fake else torch.device("cpu")


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self, *_: Any) -> None: ...

    def _get_device_index(self, *_: Any, **__: Any) -> int:
        return 0

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


class _Autocast(_autocast):  # type: ignore[misc,valid-type]
    def __init__(self, device_type: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == NAME else device_type, *args, **kwargs)


def install() -> torch.device:
    """Register the device, let the trainer accept it, and return it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    fallback, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _library.extend([fallback, kernels])  # which they need to stay registered
    fallback.fallback(lambda operator, *args, **kwargs: _compute(operator, args, kwargs), "PrivateUse1")
    kernels.impl("empty.memory_format", _empty, "PrivateUse1")
    kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
    torch.Generator = FakeGenerator  # type: ignore[misc]
    torch.autocast = torch.amp.autocast_mode.autocast = torch.amp.autocast = _Autocast  # type: ignore[misc,attr-defined]
    torch.tensor, torch.as_tensor = (_from_host(function) for function in (torch.tensor, torch.as_tensor))
    _accept_in_trainer()
    return torch.device(NAME, 0)


def _compute(operator: Any, args: Any, kwargs: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        return _compute_checked(operator, args, kwargs)


def _compute_checked(operator: Any, args: Any, kwargs: Any) -> Any:
    name = str(operator)
    if name.startswith("aten._has_compatible_shallow_copy_type"):
        return False
    flat, _ = tree_flatten((args, kwargs))
    ours = [value for value in flat if isinstance(value, FakeTensor)]
    others = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, FakeTensor)]
    if ours and any(other.dim() for other in others) and not name.startswith(MIXING + OPTIMIZERS):
        raise RuntimeError(f"{NAME}: {name} got tensors of two devices")
    if ours and others and name.startswith("aten.index.Tensor") and not isinstance(args[0], FakeTensor):
        raise RuntimeError(f"{NAME}: a tensor of the CPU is indexed by one of the device")
    target = kwargs.get("device")
    stays = bool(ours) if target is None else torch.device(target).type == NAME
    if name.startswith("aten.copy_."):
        stays = isinstance(args[0], FakeTensor)
    if stays and any(isinstance(value, _Generator) and not getattr(value, "on_fake", False) for value in flat):
        raise RuntimeError(f"{NAME}: {name} got a generator of the CPU")
    on_host = tree_map(_on_host, (args, {**kwargs, **({"pin_memory": False} if "pin_memory" in kwargs else {})}))
    out = operator(*on_host[0], **on_host[1])
    if name.startswith("aten._local_scalar_dense") or not stays:
        return out
    known = {id(tensor.values): tensor for tensor in ours}
    wrapped = tree_map(lambda value: known.get(id(value), _wrap(value)) if isinstance(value, Tensor) else value, out)
    returns = operator._schema.returns
    is_view = any(value.alias_info is not None for value in returns)
    if is_view and ours and not name.startswith("aten.detach.") and isinstance(wrapped, Tensor):
        return return_and_correct_aliasing(operator, args, kwargs, wrapped)
    return wrapped


def _wrap(value: Tensor) -> Tensor:
    return value if isinstance(value, FakeTensor) else FakeTensor(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value.values if isinstance(value, FakeTensor) else value


def _index(index: Any) -> Any:
    """Return an index whose lists are tensors of the device, as CUDA makes of them."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    plain = isinstance(index, list) and index and all(isinstance(value, int) for value in index)
    return torch.tensor(index, device=NAME) if plain else index


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> FakeTensor:
    chosen = {} if memory_format is None else {"memory_format": memory_format}
    return FakeTensor(torch.empty(size, dtype=dtype, **chosen))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty_strided(size, stride, dtype=dtype))


def _from_host(function: Any) -> Any:
    def create(data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, FakeTensor):
            return data.to(device=device or data.device, dtype=dtype or data.dtype)
        if device is None or torch.device(device).type != NAME:
            created: Tensor = function(data, dtype=dtype, device=device, **kwargs)
            return created
        return create(data, dtype=dtype, **kwargs).to(device)

    return create


def _accept_in_trainer() -> None:
    from smelt.compression.distillation import training_run
    from smelt.train.trainer import config, distributed

    config.DEVICES = (*config.DEVICES, NAME)  # type: ignore[assignment]
    original = distributed.init_distributed
    training_run.init_distributed = lambda device, timeout: (  # type: ignore[assignment]
        original("cpu", timeout) if device == NAME else original(device, timeout)
    )
