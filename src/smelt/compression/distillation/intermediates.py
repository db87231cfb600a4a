"""Intermediate outputs of student and teacher: losses compare them, and Teacher Intervention replaces them.

Hidden states are the input of the first block and the outputs of all blocks. Of the others there is one per block:

    attention_scores       [batch, heads, queries, keys]      scaled and masked, before the softmax
    attention_maps         [batch, heads, queries, keys]      after the softmax, before dropout
    attention_contexts     [batch, queries, heads, head_dim]  maps times values
    attention_projections  [batch, tokens, hidden]            after the output projection, before dropout
    attention_outputs      [batch, tokens, hidden]            with the residual; in a post-norm network also normalized

Scores and maps exist in eager attention only, so an observed network computes its attention in this file. A layer that
uses the attention map of another one has neither scores, maps nor contexts: the teacher's there are compared with none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from smelt.compression.base import Batch
from smelt.errors import ModelError
from smelt.measure.logits import eval_mode
from smelt.models.anatomy import Anatomy
from smelt.models.config import quiet_transformers

HIDDEN_STATES = "hidden_states"
SCORES, MAPS, CONTEXTS = "attention_scores", "attention_maps", "attention_contexts"
PROJECTIONS, OUTPUTS = "attention_projections", "attention_outputs"
INTERVENTIONS = {"map": MAPS, "context": CONTEXTS, "output": PROJECTIONS}  # what the teacher's replace
ATTN_IMPLEMENTATION = "smelt-observed"
_IN_ATTENTION = {SCORES, MAPS, CONTEXTS}
_MAX_DIFFERENCE = 1e-3  # of logits with this attention, relative to the largest logit

Intermediates = dict[str, list[Tensor]]


@dataclass
class NetworkOutputs:
    """The outputs of a network and the intermediate ones that were asked for, by name."""

    logits: Tensor
    loss: Tensor | None = None
    intermediates: Intermediates = field(default_factory=dict)


@dataclass(frozen=True)
class BlockPaths:
    """The modules of a block at which its intermediate outputs are, as paths in the network."""

    block: str
    attention: str | None = None  # calls transformers' attention interface
    query_key_value: tuple[str, ...] = ()  # projections
    output_projection: str | None = None
    after_attention: str | None = None  # its input is the attention output
    has_map: bool = True  # false: it uses the attention map of another block


def block_paths(anatomy: Anatomy) -> tuple[BlockPaths, ...]:
    """Return where the intermediate outputs of each block are; layers may be replaced after that."""
    path_of = {id(module): path for path, module in anatomy.network.named_modules()}
    blocks = []
    for block in anatomy.blocks:
        paths = BlockPaths(block.path)
        attention = next((part for part in block.parts if part.kind == "heads" and part.units), None)
        if attention is not None:
            projections = tuple(projection.path for projection in attention.input_projections)
            paths = replace(
                paths, attention=attention.path, query_key_value=projections, output_projection=attention.output.path,
                has_map=attention.map_of is None,
            )  # fmt: skip
        feed_forward = next((part for part in block.parts if part.kind == "ffn_channels"), None)
        if feed_forward is not None and anatomy.residual != "other":
            norm = feed_forward.pre_norm
            after = feed_forward.input_projections[0].path if norm is None else path_of[id(norm)]
            paths = replace(paths, after_attention=after)
        blocks.append(paths)
    return tuple(blocks)


def check_observable(anatomy: Anatomy, names: Collection[str]) -> None:
    """Raise if a network has no such intermediate outputs."""
    blocks, model_type = block_paths(anatomy), anatomy.network.config.model_type
    if not blocks or any(not block.block for block in blocks):
        raise ModelError(
            f"{model_type} has no list of blocks whose hidden states can be compared; use the loss logits."
        )
    if any(name != HIDDEN_STATES for name in names):
        without = next((block.block for block in blocks if block.attention is None), None)
        if without is not None:
            raise ModelError(
                f"{without} of this {model_type} network has no attention that can be compared; use the loss "
                "hidden-states or logits."
            )
    if OUTPUTS in names and any(block.after_attention is None for block in blocks):
        raise ModelError(
            f"the feed-forward of {model_type} does not simply follow its attention, so there is no attention output "
            "to compare; use the loss hidden-states."
        )


def check_observation(network: Any, paths: Sequence[BlockPaths], names: Collection[str], batch: Batch) -> None:
    """Raise if a network computes something else when it is observed, or does not show what is asked for."""
    with eval_mode(network):
        expected = network(**batch).logits
        observed = ObservedNetwork(network, paths, names)
        try:
            outputs = observed(batch)
        finally:
            observed.close()
    difference = (outputs.logits - expected).float().abs().max() / expected.float().abs().max().clamp(min=1e-12)
    maps = sum(block.has_map for block in paths)
    complete = all(
        len(tensors) >= (maps if name in _IN_ATTENTION else len(paths))
        for name, tensors in outputs.intermediates.items()
    )
    if not complete or not float(difference) <= _MAX_DIFFERENCE:
        raise ModelError(
            f"transformers computes the attention of {network.config.model_type} in a way of its own, so it cannot be "
            "compared with a teacher's; use the loss hidden-states or logits."
        )


class ObservedNetwork:
    """A network whose intermediate outputs are collected in each call, until it is closed.

    Hooks and attention function stay in place between calls, so that activation checkpointing recomputes the same.
    """

    def __init__(self, network: Any, paths: Sequence[BlockPaths] = (), names: Collection[str] = ()) -> None:
        self.network, self._names = network, set(names)
        takes_cache = "use_cache" in inspect.signature(network.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}  # training needs no KV cache
        self._recorded: dict[str, dict[int, Tensor]] | None = None  # by name and position; None: nothing is collected
        self._intervention: str | None = None
        self._taught: Intermediates = {}
        self._handles: list[Any] = []
        self._attn_implementation: str | None = None
        self._without_map = {index for index, block in enumerate(paths) if not block.has_map}
        for index, block in enumerate(paths if names else ()):
            self._observe(index, block)
        if self._names & _IN_ATTENTION:
            self._attn_implementation = network.config._attn_implementation
            with quiet_transformers():
                network.set_attn_implementation(ATTN_IMPLEMENTATION)

    def __call__(self, batch: Batch, intervention: str | None = None, taught: Any = None) -> NetworkOutputs:
        """Run the network; with an intervention, the `taught` outputs' intermediates replace its own."""
        self._intervention, self._taught = intervention, {} if intervention is None else taught.intermediates
        self._recorded = {name: {} for name in self._names}
        try:
            outputs = self.network(**batch, **self._options)
            intermediates = {name: self._in_order(name, tensors) for name, tensors in self._recorded.items()}
        finally:
            self._recorded = None
        return NetworkOutputs(outputs.logits, getattr(outputs, "loss", None), intermediates)

    def _in_order(self, name: str, tensors: dict[int, Tensor]) -> list[Tensor]:
        skipped = self._without_map if name in _IN_ATTENTION else set()
        return [tensors[index] for index in sorted(tensors) if index not in skipped]

    def close(self) -> None:
        """Remove the hooks and restore the attention implementation."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._attn_implementation is not None:
            with quiet_transformers():
                self.network.set_attn_implementation(self._attn_implementation)

    def _observe(self, index: int, paths: BlockPaths) -> None:
        module = self.network.get_submodule
        if HIDDEN_STATES in self._names:
            if index == 0:
                self._before(module(paths.block), partial(self._record, HIDDEN_STATES, 0))
            self._after(module(paths.block), partial(self._record, HIDDEN_STATES, index + 1))
        if OUTPUTS in self._names and paths.after_attention is not None:
            self._before(module(paths.after_attention), partial(self._record, OUTPUTS, index))
        if paths.attention is None:
            return
        if self._names & _IN_ATTENTION:
            _observers[module(paths.attention)] = (self, index)
        if PROJECTIONS in self._names and paths.output_projection is not None:
            self._after(module(paths.output_projection), partial(self.observe, PROJECTIONS, index))
        for position, path in enumerate(paths.query_key_value):
            self._before(module(path), partial(self._detach, is_value=position == 2))

    def _before(self, module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> None:
        """Call `act` with the first input of a module; what it returns replaces the input."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                changed = act(args[0])
                return None if changed is None else ((changed, *args[1:]), kwargs)
            act(kwargs["hidden_states"])
            return None

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> None:
        """Call `act` with the first output of a module; what it returns replaces the output."""
        self._handles.append(
            module.register_forward_hook(lambda _, __, output: act(output[0] if isinstance(output, tuple) else output))
        )

    def observe(self, name: str, index: int, own: Tensor) -> Tensor:
        """Record an intermediate output; return it, or the teacher's if this is where it intervenes."""
        self._record(name, index, own)
        if self._intervention is None or INTERVENTIONS[self._intervention] != name:
            return own
        # The teacher's values. The network's own have a zero gradient instead of none, which DDP would wait for.
        return self._taught[name][index].to(own.dtype) + 0 * own

    def _record(self, name: str, index: int, tensor: Tensor) -> None:
        if self._recorded is None or name not in self._names:
            return
        if index in self._recorded[name]:
            raise ModelError("this network runs a block several times, so its blocks cannot be compared one by one.")
        self._recorded[name][index] = tensor

    def _detach(self, x: Tensor, is_value: bool) -> Tensor | None:
        """Keep the losses of a block's attention inside of it; only a map intervention trains through the values."""
        if self._intervention is None or (is_value and self._intervention == "map"):
            return None
        return x.detach()


_observers: WeakKeyDictionary[nn.Module, tuple[ObservedNetwork, int]] = WeakKeyDictionary()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement transformers' attention interface: from [batch, heads, tokens, head_dim] to contexts and maps."""
    observed, index = _observers[module]
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    maps = F.softmax(observed.observe(SCORES, index, scores), dim=-1, dtype=torch.float32)
    weights = F.dropout(observed.observe(MAPS, index, maps), dropout, training=module.training)
    context = (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
    return observed.observe(CONTEXTS, index, context), maps


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask as zeros and the smallest value, which are added to the scores.

    Unlike its own mask for eager attention this copies nothing from the CPU, which a CUDA graph could not.
    """
    visible = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


AttentionInterface.register(ATTN_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, _mask)
