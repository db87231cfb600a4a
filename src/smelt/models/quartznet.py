"""QuartzNet: speech recognition by 1-D time-channel separable convolutions and CTC (Kriman et al., ICASSP 2020).

A network reads a log-mel spectrogram and returns logits of characters for every `stem_stride` frames; arg max, without
repetitions and blanks, is the transcript. Convolutions, batch norm and ReLU are all there is in it, so that it can run
in integers (Q-ASR, Kim et al., ICASSP 2022). The spectrogram is computed in float (`feature_extractor.py`).
"""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCTC,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

MODEL_TYPE = "quartznet"
BLANK, SPACE = "<pad>", "|"  # as in transformers' other CTC models
CTC_VOCABULARY = (BLANK, SPACE, "'", *string.ascii_lowercase)
IGNORED_LABEL = -100


class QuartzNetConfig(PreTrainedConfig):
    """The config of a QuartzNet; the defaults are a network of 0.1 million parameters for a small vocabulary."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = len(CTC_VOCABULARY),
        pad_token_id: int = 0,  # the blank of CTC
        num_mel_bins: int = 64,
        stem_channels: int = 64,
        stem_kernel_size: int = 11,
        stem_stride: int = 2,
        hidden_sizes: tuple[int, ...] = (64, 96, 96),  # channels of each residual block
        kernel_sizes: tuple[int, ...] = (11, 13, 15),  # of each residual block, in frames
        num_repeats: int = 2,  # separable convolutions of a residual block
        head_channels: int = 128,
        head_kernel_size: int = 17,
        head_dilation: int = 2,
        **kwargs: object,
    ) -> None:
        sizes = list(hidden_sizes), list(kernel_sizes)
        if not sizes[0] or len(sizes[0]) != len(sizes[1]):
            raise ValueError("hidden_sizes and kernel_sizes must have one entry for each block")
        if not all(size % 2 for size in (stem_kernel_size, head_kernel_size, *sizes[1])):
            raise ValueError("kernel sizes must be odd, so that an output frame stands for an input frame")
        self.vocab_size, self.num_mel_bins = vocab_size, num_mel_bins
        self.stem_channels, self.stem_kernel_size, self.stem_stride = stem_channels, stem_kernel_size, stem_stride
        self.hidden_sizes, self.kernel_sizes = sizes
        self.num_repeats = num_repeats
        self.head_channels, self.head_kernel_size, self.head_dilation = head_channels, head_kernel_size, head_dilation
        super().__init__(pad_token_id=pad_token_id, **kwargs)


class SeparableConv(nn.Module):
    """A depthwise convolution over time, a pointwise one over channels, and batch norm."""

    def __init__(self, channels: int, out_channels: int, kernel_size: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(
            channels, channels, kernel_size, stride=stride, padding=dilation * (kernel_size // 2), dilation=dilation,
            groups=channels, bias=False,
        )  # fmt: skip
        self.pointwise = nn.Conv1d(channels, out_channels, 1, bias=False)
        self.norm = nn.BatchNorm1d(out_channels)

    def forward(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """Convolve [batch, channels, frames]; frames outside of the mask [batch, 1, frames] count as zeros."""
        if mask is not None:
            hidden_states = hidden_states * mask
        convolved: Tensor = self.norm(self.pointwise(self.depthwise(hidden_states)))
        return convolved


class QuartzNetBlock(nn.Module):
    """Separable convolutions with a shortcut around all of them."""

    def __init__(self, channels: int, out_channels: int, kernel_size: int, num_repeats: int) -> None:
        super().__init__()
        widths = [channels, *[out_channels] * num_repeats]
        self.layers = nn.ModuleList(SeparableConv(width, out_channels, kernel_size) for width in widths[:num_repeats])
        self.shortcut = nn.Conv1d(channels, out_channels, 1, bias=False)
        self.shortcut_norm = nn.BatchNorm1d(out_channels)

    def forward(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        residual = self.shortcut_norm(self.shortcut(hidden_states))
        for index, layer in enumerate(self.layers):
            hidden_states = layer(F.relu(hidden_states) if index else hidden_states, mask)
        return F.relu(hidden_states + residual)


class QuartzNetForCTC(PreTrainedModel):
    """A QuartzNet with a linear layer over characters."""

    config_class = QuartzNetConfig
    main_input_name = "input_features"

    def __init__(self, config: QuartzNetConfig) -> None:
        super().__init__(config)
        self.stem = SeparableConv(
            config.num_mel_bins, config.stem_channels, config.stem_kernel_size, stride=config.stem_stride
        )
        widths = [config.stem_channels, *config.hidden_sizes]
        self.blocks = nn.ModuleList(
            QuartzNetBlock(width, out, kernel_size, config.num_repeats)
            for width, out, kernel_size in zip(widths, config.hidden_sizes, config.kernel_sizes, strict=False)
        )
        self.head = SeparableConv(
            widths[-1], config.head_channels, config.head_kernel_size, dilation=config.head_dilation
        )
        self.projection = nn.Conv1d(config.head_channels, config.head_channels, 1, bias=False)
        self.projection_norm = nn.BatchNorm1d(config.head_channels)
        self.classifier = nn.Conv1d(config.head_channels, config.vocab_size, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv1d | nn.BatchNorm1d):  # PyTorch's own
            module.reset_parameters()

    def forward(
        self, input_features: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalLMOutput:
        """Compute logits [batch, frames, vocab_size] for log-mel spectrograms [batch, num_mel_bins, frames].

        `attention_mask` [batch, frames] is 0 where a shorter recording was padded. With `labels` [batch, characters],
        padded with -100, also the CTC loss.
        """
        mask = None if attention_mask is None else attention_mask[:, None].to(input_features.dtype)
        hidden_states = self.stem(input_features, mask)
        mask = None if mask is None else mask[..., :: self.config.stem_stride]
        hidden_states = F.relu(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, mask)
        hidden_states = F.relu(self.head(hidden_states, mask))
        hidden_states = F.relu(self.projection_norm(self.projection(hidden_states)))
        logits = self.classifier(hidden_states).transpose(1, 2)
        return CausalLMOutput(None if labels is None else self._loss(logits, mask, labels), logits)

    def _loss(self, logits: Tensor, mask: Tensor | None, labels: Tensor) -> Tensor:
        """Compute the CTC loss per character, averaged over the batch."""
        full = torch.full((len(logits),), logits.shape[1], device=logits.device)
        frames = full if mask is None else mask.sum(-1).flatten().long()
        known = labels != IGNORED_LABEL
        return F.ctc_loss(
            logits.float().log_softmax(-1).transpose(0, 1), labels[known], frames, known.sum(-1),
            blank=self.config.pad_token_id, zero_infinity=True,
        )  # fmt: skip


def ctc_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of `CTC_VOCABULARY`: lower-case letters, apostrophe and space; other characters are dropped.

    Its `decode` reads the arg max of each frame: it joins repetitions and drops blanks. Special tokens must not be
    skipped, since a blank between two equal letters keeps them apart.
    """
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(CTC_VOCABULARY)}, unk_token=BLANK))
    core.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex("[^a-z' ]"), ""), normalizers.Replace(" ", SPACE)]
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.CTC(pad_token=BLANK, word_delimiter_token=SPACE)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=BLANK, unk_token=BLANK)


def register() -> None:
    """Make transformers build these networks from their config."""
    AutoConfig.register(MODEL_TYPE, QuartzNetConfig, exist_ok=True)
    AutoModelForCTC.register(QuartzNetConfig, QuartzNetForCTC, exist_ok=True)
