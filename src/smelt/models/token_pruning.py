"""Token pruning: an encoder whose sequences get shorter from layer to layer.

`install_token_pruning` replaces the module that runs the blocks by one with the same weights that drops tokens between
the attention and the feed-forward of each layer. In inference the tokens of all sequences are packed, so that linear
layers compute those that are left and nothing else; dropped tokens keep their last hidden state. The masked execution
computes the same with all tokens in place: it is the reference, and what training uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import get_activation
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Block
from smelt.models.implants import refuse_implants
from smelt.models.program_network import outline_of
from smelt.models.quantized_network import replace_module
from smelt.models.surgery import NoAttention
from smelt.models.token_rules import TokenRule


@dataclass
class SoftThresholds:
    """Thresholds that are being learned: a token's hidden state is multiplied by a sigmoid of its importance."""

    base: Tensor  # [layers]
    offsets: nn.Parameter  # [layers]
    scale: float  # of the offsets: their learning rate relative to that of the weights
    temperature: float
    relative: bool = False  # importance is multiplied by the length, as in the rule
    mean_gates: list[Tensor] = field(default_factory=list)  # of the last forward: one of each layer, []

    @property
    def thresholds(self) -> Tensor:
        return self.base.to(self.offsets.device) + self.scale * self.offsets


class TokenPruningEncoder(nn.Module):
    """Runs the blocks of a post-norm encoder and drops tokens by a rule. Layers keep their paths."""

    def __init__(self, blocks: nn.Module, anatomy: Anatomy, rule: TokenRule) -> None:
        super().__init__()
        self._modules = blocks._modules
        self._original = (blocks,)  # in a tuple, which is no submodule
        self._paths = tuple(_BlockPaths.of(block, anatomy) for block in anatomy.blocks)
        config = anatomy.network.config
        self._activation = (get_activation(getattr(config, "hidden_act", None) or config.activation),)
        self._dropout, self._attention_dropout = _dropouts(config)
        self.rule = rule
        self.enabled = True  # false: all tokens stay, and the original blocks run
        self.masked = False  # true: masked execution in inference, too
        self.soft: SoftThresholds | None = None
        self.token_counts: Tensor | None = None  # of the last packed forward: into each layer and left, on CPU
        self.train(blocks.training)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the last hidden states of all tokens: [batch, tokens, hidden]."""
        if not self.enabled:
            return self._original[0](hidden_states, attention_mask, *args, **kwargs)
        present = _present_tokens(attention_mask, hidden_states)
        if self.training or self.masked:
            x = self._run_masked(hidden_states, present)
        elif len(present) == 1 and bool(present.all()):
            x = self._run_single(hidden_states[0], present)[None]
        else:
            x = self._run_packed(hidden_states, present)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=x)

    def extra_repr(self) -> str:
        return str(self.rule)

    def _run_single(self, x: Tensor, present: Tensor) -> Tensor:
        """Do what `_run_packed` does for one sequence without padding, [tokens, hidden], with fewer operations."""
        tokens = len(x)
        output, bias, lengths = x, self._position_bias(x[None]), present.new_full((1,), tokens, dtype=torch.int64)
        rows: Tensor | None = None  # of the tokens that are left; None: all
        protected, counts, total = _first_tokens(present), [tokens], None
        for layer, paths in enumerate(self._paths):
            drops = self.rule.drops(layer)
            projected = [y[None] for y in self._project(paths, x)]
            at_rows = bias if bias is None or rows is None else bias[:, :, rows[:, None], rows]
            context, maps = self._attend(paths, projected, None, at_rows, drops or self.rule.cumulative)
            x = self._after_attention(paths, x, x.new_zeros(len(x), 0) if context is None else context[0])
            if maps is not None:
                scores = maps.sum((1, 2)) / (maps.shape[1] * tokens)
                total = scores if total is None or not self.rule.cumulative else total + scores
                if drops:
                    keep = self.rule.keep(total, present, protected, lengths, layer)
                    kept = keep[0].nonzero()[:, 0]
                    if len(kept) < len(x):
                        if rows is None:
                            output, rows = x, kept
                        else:
                            output.index_copy_(0, rows, x)
                            rows = rows[kept]
                        x, total, present, protected = x[kept], total[:, kept], present[:, kept], protected[:, kept]
            counts.append(len(x))
            x = self._feed_forward(paths, x)
        self.token_counts = torch.tensor([counts])  # [1, layers + 1]
        return x if rows is None else output.index_copy_(0, rows, x)

    def _run_packed(self, hidden_states: Tensor, present: Tensor) -> Tensor:
        """Compute the tokens that are left, packed without padding."""
        batch, tokens, width = hidden_states.shape
        output = hidden_states.reshape(-1, width).clone()
        bias, lengths = self._position_bias(hidden_states), present.sum(1)
        rows = present.flatten().nonzero()[:, 0]  # where in the batch the packed tokens are
        protected = _first_tokens(present).flatten()[rows]
        total: Tensor | None = None
        x, counts = output[rows], [lengths.cpu()]
        for layer, paths in enumerate(self._paths):
            layout = _Layout.of(counts[-1], x.device)
            places = None if bias is None else layout.pad(rows % tokens)
            queries_keys_values = [layout.pad(projected) for projected in self._project(paths, x)]
            drops = self.rule.drops(layer)
            context, maps = self._attend(
                paths, queries_keys_values, layout.present, _at_places(bias, places), drops or self.rule.cumulative
            )
            x = self._after_attention(paths, x, x.new_zeros(len(x), 0) if context is None else layout.unpad(context))
            if maps is not None:
                scores = layout.unpad(_received_attention(maps, layout.present, lengths))
                total = scores if total is None or not self.rule.cumulative else total + scores
                if drops:
                    padded, first = layout.pad(total), layout.pad(protected)
                    present_here = torch.ones_like(first) if layout.present is None else layout.present
                    keep = layout.unpad(self.rule.keep(padded, present_here, first, lengths, layer))
                    kept, gone = keep.nonzero()[:, 0], (~keep).nonzero()[:, 0]
                    if len(gone):
                        output[rows[gone]] = x[gone]
                        rows, x, protected, total = rows[kept], x[kept], protected[kept], total[kept]
            counts.append(torch.bincount(rows // tokens, minlength=batch).cpu() if drops else counts[-1])
            x = self._feed_forward(paths, x)
        output[rows] = x
        self.token_counts = torch.stack(counts, dim=1)  # [batch, layers + 1]
        return output.view(batch, tokens, width)

    def _run_masked(self, hidden_states: Tensor, present: Tensor) -> Tensor:
        """Compute all tokens, and hide those that were dropped from the attention of later layers.

        With soft thresholds no token is hidden: gates scale the hidden states.
        """
        x, kept = hidden_states, present
        total: Tensor | None = None
        protected, lengths, bias = _first_tokens(present), present.sum(1), self._position_bias(hidden_states)
        mean_gates = []
        for layer, paths in enumerate(self._paths):
            context, maps = self._attend(paths, self._project(paths, x), kept, bias, scored=True)
            attended = self._after_attention(paths, x, x.new_zeros(*x.shape[:2], 0) if context is None else context)
            y = self._feed_forward(paths, attended)
            if maps is None:
                x = torch.where(kept[..., None], y, x)
                continue
            scores = _received_attention(maps, kept, lengths)
            if self.soft is not None:
                scores = scores * lengths[:, None] if self.soft.relative else scores
                gates = torch.sigmoid((scores - self.soft.thresholds[layer]) / self.soft.temperature)
                gates = gates.masked_fill(protected, 1.0)
                mean_gates.append((gates * present).sum() / present.sum())
                x = y * gates[..., None].to(y.dtype)
                continue
            total = scores if total is None or not self.rule.cumulative else total + scores
            stays = self.rule.keep(total.detach(), kept, protected, lengths, layer) if self.rule.drops(layer) else kept
            x = torch.where(stays[..., None], y, torch.where(kept[..., None], attended, x))
            kept = stays
        if self.soft is not None:
            self.soft.mean_gates = mean_gates
        return x

    def _layer(self, path: str) -> Any:
        """Return the module at a path, which may be another one in every call; `get_submodule` takes longer."""
        module: Any = self
        for name in path.split("."):
            module = module._modules[name]
        return module

    def _project(self, paths: _BlockPaths, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, [..., width]; nothing if all heads were pruned."""
        if isinstance(self._layer(paths.owner), NoAttention):
            return []
        return [self._layer(path)(x) for path in paths.projections]

    def _attend(
        self, paths: _BlockPaths, projected: list[Tensor], present: Tensor | None, bias: Tensor | None, scored: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the contexts [batch, tokens, width], and if they are scored the maps [batch, heads, queries, keys].

        `present` is None if no token is padding; `bias` is added to the scores, [batch or 1, heads, queries, keys].
        """
        if not projected:
            return None, None
        batch, tokens, width = projected[0].shape
        heads = width // paths.head_dim
        queries, keys, values = (x.view(batch, tokens, heads, paths.head_dim).transpose(1, 2) for x in projected)
        mask = None if present is None else present[:, None, None, :]
        if bias is not None:
            bias = bias[:, list(getattr(self._layer(paths.owner), "smelt_kept_units", range(heads)))]
            bias = bias.to(queries.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        if not scored:
            context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            return context.transpose(1, 2).reshape(batch, tokens, width), None
        logits = (queries * paths.head_dim**-0.5) @ keys.transpose(2, 3)
        if mask is not None and mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        elif mask is not None:
            logits = logits + mask
        maps = logits.softmax(dim=-1, dtype=torch.float32)
        weights = F.dropout(maps, self._attention_dropout) if self.training else maps
        return (weights.to(values.dtype) @ values).transpose(1, 2).reshape(batch, tokens, width), maps

    def _after_attention(self, paths: _BlockPaths, x: Tensor, context: Tensor) -> Tensor:
        projected = self._layer(paths.output)(context)
        normalized: Tensor = self._layer(paths.norms[0])(self._drop_out(projected) + x)
        return normalized

    def _feed_forward(self, paths: _BlockPaths, x: Tensor) -> Tensor:
        projected = self._layer(paths.down)(self._activation[0](self._layer(paths.up)(x)))
        normalized: Tensor = self._layer(paths.norms[1])(self._drop_out(projected) + x)
        return normalized

    def _drop_out(self, x: Tensor) -> Tensor:
        return F.dropout(x, self._dropout) if self.training else x

    def _position_bias(self, hidden_states: Tensor) -> Tensor | None:
        """Return MPNet's bias of relative positions, [1, heads, tokens, tokens]."""
        blocks: Any = self._original[0]
        if not hasattr(blocks, "compute_position_bias"):
            return None
        bias: Tensor = blocks.compute_position_bias(hidden_states[:1])
        return bias


def check_token_pruning(anatomy: Anatomy) -> None:
    """Raise if tokens of this network cannot be pruned."""
    config = anatomy.network.config
    if anatomy.family.post_norms is None or getattr(config, "is_decoder", False):
        raise ModelError(
            f"tokens can be pruned in encoders of the types bert, roberta, distilbert and mpnet, not in "
            f"{config.model_type}; use a method that removes heads or channels, such as fisher."
        )
    if token_pruning_of(anatomy.network) is not None:
        raise ModelError("this model drops tokens already; start from the model it was made from.")
    refuse_implants(anatomy.network, "it reads all tokens of a layer")


def install_token_pruning(anatomy: Anatomy, rule: TokenRule) -> TokenPruningEncoder:
    """Let a network drop tokens by a rule, and return the module that does."""
    check_token_pruning(anatomy)
    path = anatomy.blocks[0].path.rsplit(".", 2)[0]  # of the module with the list of blocks
    encoder = TokenPruningEncoder(anatomy.network.get_submodule(path), anatomy, rule)
    replace_module(anatomy.network, path, encoder)
    return encoder


def token_pruning_of(network: PreTrainedModel) -> TokenPruningEncoder | None:
    """Return the module of a network that drops tokens, or None."""
    modules = outline_of(network).modules()
    return next((module for module in modules if isinstance(module, TokenPruningEncoder)), None)


def refuse_token_pruning(network: PreTrainedModel, what: str) -> None:
    """Raise if a network drops tokens; `what` cannot keep that."""
    if token_pruning_of(network) is not None:
        raise ModelError(f"this model drops tokens, and {what}; use the model it was made from.")


@contextmanager
def all_tokens(network: PreTrainedModel) -> Iterator[None]:
    """Let a network keep all tokens inside the context, so that calibration sees every layer on every token."""
    encoder = token_pruning_of(network)
    if encoder is None:
        yield
        return
    before, encoder.enabled = encoder.enabled, False
    try:
        yield
    finally:
        encoder.enabled = before


@dataclass(frozen=True)
class _BlockPaths:
    """The layers of a block, as paths from the module that runs the blocks."""

    owner: str  # of the attention
    head_dim: int
    projections: tuple[str, ...]  # queries, keys, values
    output: str
    norms: tuple[str, str]
    up: str
    down: str

    @classmethod
    def of(cls, block: Block, anatomy: Anatomy) -> _BlockPaths:
        family = anatomy.family
        attention, feed_forward = family.attention, family.feed_forward
        assert attention is not None and not isinstance(feed_forward, tuple | None) and family.post_norms is not None
        prefix = ".".join(block.path.rsplit(".", 2)[1:])
        head_dim = next(part.head_dim for part in block.parts if part.kind == "heads")
        projections = (attention.queries, attention.keys, attention.values)
        return cls(
            f"{prefix}.{attention.owner}", head_dim, tuple(f"{prefix}.{path}" for path in projections),
            f"{prefix}.{attention.output}", (f"{prefix}.{family.post_norms[0]}", f"{prefix}.{family.post_norms[1]}"),
            f"{prefix}.{feed_forward.input_projections[0]}", f"{prefix}.{feed_forward.output}",
        )  # fmt: skip


@dataclass(frozen=True)
class _Layout:
    """Where packed tokens are in sequences that are padded to the longest."""

    shape: tuple[int, int]  # sequences, longest
    slots: Tensor | None  # of each packed token; None: there is no padding
    present: Tensor | None  # [sequences, longest]

    @classmethod
    def of(cls, counts: Tensor, device: torch.device) -> _Layout:
        """Return the layout of sequences of these lengths, [sequences] on CPU."""
        longest = int(counts.max())
        shape = (len(counts), longest)
        if int(counts.min()) == longest:
            return cls(shape, None, None)
        present = (torch.arange(longest) < counts[:, None]).to(device)
        return cls(shape, present.flatten().nonzero()[:, 0], present)

    def pad(self, packed: Tensor) -> Tensor:
        """[packed, ...] -> [sequences, longest, ...], zero where nothing is."""
        if self.slots is None:
            return packed.view(*self.shape, *packed.shape[1:])
        padded = packed.new_zeros(self.shape[0] * self.shape[1], *packed.shape[1:])
        return padded.index_copy(0, self.slots, packed).view(*self.shape, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """[sequences, longest, ...] -> [packed, ...]"""
        flat = padded.flatten(0, 1)
        return flat if self.slots is None else flat[self.slots]


def _present_tokens(attention_mask: Any, hidden_states: Tensor) -> Tensor:
    """Return which tokens are no padding, [batch, tokens]; a sequence without any has its first one.

    The mask is what transformers makes of the user's: None, one of booleans or of numbers to add, with 2 or 4 axes.
    """
    batch, tokens = hidden_states.shape[:2]
    if attention_mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=hidden_states.device)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() not in (2, 4):
        raise ModelError("token pruning needs a padding mask; set the attention implementation to sdpa or eager.")
    is_added = attention_mask.dim() == 4 and attention_mask.is_floating_point()
    mask = attention_mask[:, 0, 0] if attention_mask.dim() == 4 else attention_mask
    present = (mask >= 0 if is_added else mask.bool()).expand(batch, tokens).clone()
    present[:, 0] |= ~present.any(dim=1)
    return present


def _first_tokens(present: Tensor) -> Tensor:
    """Return the first token of each sequence, which the head reads: [batch, tokens]."""
    return present & (present.cumsum(1) == 1)


def _received_attention(maps: Tensor, present: Tensor | None, lengths: Tensor) -> Tensor:
    """Return the importance of each token [batch, tokens] from maps [batch, heads, queries, keys].

    `present` are the queries that count; `lengths` those of the unpruned sequences.
    """
    summed = maps.sum(2) if present is None else (present[:, None, None, :].to(maps.dtype) @ maps)[:, :, 0]
    return summed.mean(1) / lengths[:, None].to(maps.dtype)


def _at_places(bias: Tensor | None, places: Tensor | None) -> Tensor | None:
    """Return the bias between tokens [batch, heads, tokens, tokens] from their places [batch, tokens]."""
    if bias is None or places is None:
        return None
    return bias[0][:, places[:, :, None], places[:, None, :]].transpose(0, 1)


def _dropouts(config: Any) -> tuple[float, float]:
    """Return the dropout of hidden states and of attention maps."""
    if hasattr(config, "hidden_dropout_prob"):
        return float(config.hidden_dropout_prob), float(config.attention_probs_dropout_prob)
    return float(config.dropout), float(config.attention_dropout)
