"""The layers of a network as a planner sees them: bytes counted, times measured or worked out from operations.

All workers call these together, on the network as it is before it is sharded; the slowest rank's times
count, so that all ranks make the same plan.
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
from smelt.train.fsdp.facts import LayerProfile, ModelProfile
from smelt.train.fsdp.timeline import BACKWARD, FORWARD
from smelt.train.fsdp.watch import Clock, Note, watch
from smelt.train.gradients.autotune.timed_comm import max_over_ranks, synchronized_time
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.layers import layers_of

REST = "rest"
_WARM_UP, _REPEATS = 2, 3
_Times = dict[tuple[str, str], float]  # layer and what it does -> seconds


def profile_layers(
    network: nn.Module, step: Callable[[], object], workers: Workers, device: torch.device
) -> ModelProfile:
    """`step`: forward and backward of one batch, which may be repeated."""
    layers = _layers(network)
    for _ in range(_WARM_UP):
        step()
    runs = [_timed(network, layers, step, device) for _ in range(_REPEATS)]
    times = {key: median(run[key] for run in runs) for key in runs[0]}
    order = [name for name, _ in runs[-1] if name != REST]  # of forward
    return _agreed(network, layers, list(dict.fromkeys(order)), times, _activations(layers, step), workers, device)


def estimate_layers(
    network: nn.Module, step: Callable[[], object], speed: float, workers: Workers, device: torch.device
) -> ModelProfile:
    """From the operations of each layer at so many a second; of a step two thirds are backward.

    Operations that PyTorch does not count, such as norms and activations, take no time here.
    """
    if not speed > 0:
        raise ConfigError(f"the speed is {speed:g} operations a second; it must be above 0.")
    layers = _layers(network)
    order: dict[str, None] = {}
    handles = [
        layer.register_forward_pre_hook(lambda *_, name=name: order.setdefault(name)) for name, layer in layers.items()
    ]
    with FlopCounterMode(display=False) as counter:
        step()
    for handle in handles:
        handle.remove()
    counts = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    root = type(network).__name__
    seconds = {name: counts.get(f"{root}.{name}", 0) / speed for name in layers}
    seconds[REST] = max(counts["Global"] / speed - sum(seconds.values()), 0.0)
    times = {(name, FORWARD): each / 3 for name, each in seconds.items()}
    times |= {(name, BACKWARD): 2 * each / 3 for name, each in seconds.items()}
    return _agreed(network, layers, list(order), times, _activations(layers, step), workers, device)


def _layers(network: nn.Module) -> dict[str, nn.Module]:
    """Without those that share parameters with others: these must stay with the root."""
    found = layers_of(network)
    holders = Counter(parameter for layer in found.values() for parameter in set(layer.parameters()))
    return {
        name: layer for name, layer in found.items() if all(holders[parameter] == 1 for parameter in layer.parameters())
    }


def _timed(
    network: nn.Module, layers: dict[str, nn.Module], step: Callable[[], object], device: torch.device
) -> _Times:
    """Of one step; the keys are in the order of forward."""
    clock = Clock(device)
    first: dict[tuple[str, str], object] = {}
    last: dict[tuple[str, str], object] = {}

    def note(name: str, kind: str, begins: bool) -> None:
        if begins:
            first.setdefault((name, kind), clock.now())
        else:
            last[name, kind] = clock.now()

    handles = []
    for name, layer in (*layers.items(), (REST, network)):
        handles += watch([layer], partial(note, name))
        for parameter in layer.parameters() if name != REST else ():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(partial(_added, partial(note, name))))
    step()
    last[REST, BACKWARD] = clock.now()
    for handle in handles:
        handle.remove()
    synchronized_time(device)
    found = {key: clock.seconds(last[key]) - clock.seconds(begun) for key, begun in first.items() if key in last}
    for kind in (FORWARD, BACKWARD):
        inside = sum(seconds for (name, what), seconds in found.items() if what == kind and name != REST)
        found[REST, kind] = max(found.get((REST, kind), 0.0) - inside, 0.0)
    return found


def _added(note: Note, _: Tensor) -> None:
    note(BACKWARD, False)


def _activations(layers: dict[str, nn.Module], step: Callable[[], object]) -> Counter[str]:
    """Bytes that each layer's forward keeps for backward, what lies in parameters not counted."""
    sizes: Counter[str] = Counter()
    inside: list[str] = [REST]
    seen = {parameter.untyped_storage().data_ptr() for layer in layers.values() for parameter in layer.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[inside[-1]] += storage.nbytes()
        return tensor

    handles = []
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        handles.append(layer.register_forward_hook(lambda *_: inside.pop() and None))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    for handle in handles:
        handle.remove()
    return sizes


def _agreed(
    network: nn.Module,
    layers: dict[str, nn.Module],
    order: list[str],
    times: _Times,
    activations: Counter[str],
    workers: Workers,
    device: torch.device,
) -> ModelProfile:
    """The same on every worker."""
    names = [*order, REST]
    own: defaultdict[tuple[str, str], float] = defaultdict(float, times)
    numbers = [[own[name, FORWARD], own[name, BACKWARD], float(activations[name])] for name in names]
    found = max_over_ranks([number for row in numbers for number in row], workers, device)
    sizes = {name: _bytes(layers[name]) for name in order}
    sizes[REST] = _bytes(network) - sum(sizes.values())
    rows = zip(names, found[::3], found[1::3], found[2::3], strict=True)
    *parts, rest = (
        LayerProfile(name, sizes[name], forward, backward, int(kept)) for name, forward, backward, kept in rows
    )
    return ModelProfile(tuple(parts), rest)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
