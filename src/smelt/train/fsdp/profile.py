"""Profile what a sharding plan needs: bytes and times of each layer, and the cost of the cluster's collectives.

All ranks call these functions together, on the network before it is sharded; the slowest rank's times count, so that
all ranks make the same plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from smelt.errors import ConfigError
from smelt.train.fsdp.hooks import Callback, add_hooks
from smelt.train.fsdp.plan import LayerProfile, ModelProfile
from smelt.train.fsdp.timeline import BACKWARD, FORWARD
from smelt.train.gradients.autotune.link import AlphaBeta, fit_alpha_beta
from smelt.train.gradients.autotune.timed_comm import max_over_ranks
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.layers import find_layers
from smelt.train.timing import DeviceClock, Timestamp, synchronized_time

ROOT_NAME = "root"
_WARMUP_STEPS, _REPEATS = 2, 3
_COLLECTIVE_SIZES = (2**12, 2**16, 2**18, 2**20, 2**22)  # bytes that are gathered or scattered
_COLLECTIVE_REPEATS = 7
_Times = dict[tuple[str, str], float]  # (layer, forward or backward) -> seconds


def profile_layers(network: nn.Module, step: Callable[[], object], comm: Comm, device: torch.device) -> ModelProfile:
    """Measure each layer. `step` runs forward and backward of one batch and must be repeatable."""
    layers = _shardable_layers(network)
    for _ in range(_WARMUP_STEPS):
        step()
    runs = [_time_layers(network, layers, step, device) for _ in range(_REPEATS)]
    times = {key: median(run[key] for run in runs) for key in runs[0]}
    forward_order = [name for name, _ in runs[-1] if name != ROOT_NAME]
    activations = _activation_bytes(layers, step)
    return _combine(network, layers, list(dict.fromkeys(forward_order)), times, activations, comm, device)


def estimate_layers(
    network: nn.Module, step: Callable[[], object], flops_per_second: float, comm: Comm, device: torch.device
) -> ModelProfile:
    """Estimate each layer's time from its FLOPs, two thirds of a step being backward.

    Operations that PyTorch does not count, such as norms and activations, take no time here.
    """
    if not flops_per_second > 0:
        raise ConfigError(f"the speed is {flops_per_second:g} FLOPs per second; it must be above 0.")
    layers = _shardable_layers(network)
    forward_order: dict[str, None] = {}
    handles = [
        layer.register_forward_pre_hook(lambda *_, name=name: forward_order.setdefault(name))
        for name, layer in layers.items()
    ]
    with FlopCounterMode(display=False) as counter:
        step()
    for handle in handles:
        handle.remove()
    flops = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    prefix = type(network).__name__
    seconds = {name: flops.get(f"{prefix}.{name}", 0) / flops_per_second for name in layers}
    seconds[ROOT_NAME] = max(flops["Global"] / flops_per_second - sum(seconds.values()), 0.0)
    times = {(name, FORWARD): layer_seconds / 3 for name, layer_seconds in seconds.items()}
    times |= {(name, BACKWARD): 2 * layer_seconds / 3 for name, layer_seconds in seconds.items()}
    return _combine(network, layers, list(forward_order), times, _activation_bytes(layers, step), comm, device)


def measure_collectives(comm: Comm, device: torch.device) -> tuple[AlphaBeta, AlphaBeta]:
    """Measure all-gather and reduce-scatter; all ranks call it together and get the same result."""
    others = comm.world_size - 1
    if not others:
        raise ConfigError("a single rank has no link to measure; start several with torchrun.")
    return (
        _fit_collective(lambda rows: comm.all_gather(rows[0], "link"), others, comm, device),
        _fit_collective(lambda rows: comm.reduce_scatter(rows, "link"), others, comm, device),
    )


def _fit_collective(collective: Callable[[Tensor], Tensor], others: int, comm: Comm, device: torch.device) -> AlphaBeta:
    received, seconds = [], []
    for size in _COLLECTIVE_SIZES:
        rows = torch.zeros(comm.world_size, max(size // 4 // comm.world_size, 1), device=device)
        times = []
        for _ in range(_COLLECTIVE_REPEATS + 1):  # the first opens connections and is not counted
            comm.all_gather(torch.zeros(1, device=device), "agreement")  # start together
            start = synchronized_time(device)
            collective(rows)
            times.append(synchronized_time(device) - start)
        received.append(others * rows[0].numel() * 4)
        seconds.append(median(max_over_ranks(times[1:], comm, device)))
    return AlphaBeta(*fit_alpha_beta(received, seconds))


def _shardable_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that share no parameters with others; those that do must stay with the root."""
    layers = find_layers(network)
    owners = Counter(parameter for layer in layers.values() for parameter in set(layer.parameters()))
    return {
        name: layer for name, layer in layers.items() if all(owners[parameter] == 1 for parameter in layer.parameters())
    }


def _time_layers(
    network: nn.Module, layers: dict[str, nn.Module], step: Callable[[], object], device: torch.device
) -> _Times:
    """Time one step; the keys are in the order of forward."""
    clock = DeviceClock(device)
    begins: dict[tuple[str, str], Timestamp] = {}
    ends: dict[tuple[str, str], Timestamp] = {}

    def on_event(name: str, op: str, is_begin: bool) -> None:
        if is_begin:
            begins.setdefault((name, op), clock.now())
        else:
            ends[name, op] = clock.now()

    handles = []
    for name, layer in (*layers.items(), (ROOT_NAME, network)):
        handles += add_hooks([layer], partial(on_event, name))
        for parameter in layer.parameters() if name != ROOT_NAME else ():
            if parameter.requires_grad:
                hook = partial(_on_gradient, partial(on_event, name))
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
    step()
    ends[ROOT_NAME, BACKWARD] = clock.now()
    for handle in handles:
        handle.remove()
    synchronized_time(device)
    times = {key: clock.seconds(ends[key]) - clock.seconds(begin) for key, begin in begins.items() if key in ends}
    for op in (FORWARD, BACKWARD):
        in_layers = sum(seconds for (name, key), seconds in times.items() if key == op and name != ROOT_NAME)
        times[ROOT_NAME, op] = max(times.get((ROOT_NAME, op), 0.0) - in_layers, 0.0)
    return times


def _on_gradient(callback: Callback, _: Tensor) -> None:
    callback(BACKWARD, False)


def _activation_bytes(layers: dict[str, nn.Module], step: Callable[[], object]) -> Counter[str]:
    """Count the bytes that each layer's forward saves for backward, parameters excluded."""
    sizes: Counter[str] = Counter()
    active: list[str] = [ROOT_NAME]
    counted = {parameter.untyped_storage().data_ptr() for layer in layers.values() for parameter in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            sizes[active[-1]] += storage.nbytes()
        return tensor

    handles = []
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: active.append(name)))
        handles.append(layer.register_forward_hook(lambda *_: active.pop() and None))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    for handle in handles:
        handle.remove()
    return sizes


def _combine(
    network: nn.Module,
    layers: dict[str, nn.Module],
    forward_order: list[str],
    times: _Times,
    activations: Counter[str],
    comm: Comm,
    device: torch.device,
) -> ModelProfile:
    """Make the profile from the largest numbers of all ranks."""
    names = [*forward_order, ROOT_NAME]
    local: defaultdict[tuple[str, str], float] = defaultdict(float, times)
    rows = [[local[name, FORWARD], local[name, BACKWARD], float(activations[name])] for name in names]
    largest = max_over_ranks([number for row in rows for number in row], comm, device)
    sizes = {name: _parameter_bytes(layers[name]) for name in forward_order}
    sizes[ROOT_NAME] = _parameter_bytes(network) - sum(sizes.values())
    *profiles, root = (
        LayerProfile(name, sizes[name], forward, backward, int(saved))
        for name, forward, backward, saved in zip(names, largest[::3], largest[1::3], largest[2::3], strict=True)
    )
    return ModelProfile(tuple(profiles), root)


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
