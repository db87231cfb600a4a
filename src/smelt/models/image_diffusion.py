"""A small class-conditional diffusion model of images: a U-Net that predicts noise, with classifier-free guidance.

It generates calibration images for quantization without data. It is no text-to-image model: its conditions are
embeddings of classes. Images are scaled to [-1, 1].

Papers: Ho et al., 2020 (DDPM, arXiv 2006.11239); Ho and Salimans, 2022 (classifier-free guidance, arXiv 2207.12598).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from smelt.models.noise_schedule import SCHEDULES, NoiseSchedule

MODEL_TYPE = "image_diffusion"
_NORM_GROUPS = 8
_MAX_PERIOD = 10_000  # of the sinusoids that embed a step


class ImageDiffusionConfig(PreTrainedConfig):
    """The config of a class-conditional diffusion model; the defaults suit images of 32 x 32 pixels.

    Its classes are `num_labels`, as of a classifier.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        image_size: int = 32,
        num_channels: int = 3,
        hidden_sizes: tuple[int, ...] = (64, 128, 128),  # channels at each resolution, each half of the one before
        num_res_blocks: int = 2,  # at each resolution, on the way down
        attention_levels: tuple[int, ...] = (2,),  # resolutions with self-attention, from 0
        num_attention_heads: int = 4,
        diffusion_steps: int = 1000,
        noise_schedule: str = "cosine",  # or linear
        label_dropout: float = 0.1,  # share of the training images without a class, for guidance
        **kwargs: object,
    ) -> None:
        sizes = list(hidden_sizes)
        if not sizes or any(size % _NORM_GROUPS or size % num_attention_heads for size in sizes):
            raise ValueError(f"hidden_sizes must be multiples of {_NORM_GROUPS} and of num_attention_heads")
        if image_size % 2 ** (len(sizes) - 1):
            raise ValueError(f"image_size must be a multiple of {2 ** (len(sizes) - 1)}")
        if noise_schedule not in SCHEDULES:
            raise ValueError(f"noise_schedule is {noise_schedule!r}: expected {' or '.join(SCHEDULES)}")
        if not 0 <= label_dropout <= 1 or diffusion_steps < 2 or num_res_blocks < 1:
            raise ValueError("label_dropout is a fraction, diffusion_steps is at least 2, num_res_blocks at least 1")
        self.image_size, self.num_channels, self.hidden_sizes = image_size, num_channels, sizes
        self.num_res_blocks, self.attention_levels = num_res_blocks, list(attention_levels)
        self.num_attention_heads, self.diffusion_steps = num_attention_heads, diffusion_steps
        self.noise_schedule, self.label_dropout = noise_schedule, label_dropout
        super().__init__(**kwargs)


@dataclass
class ImageDiffusionOutput(ModelOutput):
    """The mean squared error of the predicted noise, if labels were given, and that noise [batch, channels, ...]."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class ZeroConv(nn.Conv2d):
    """A convolution that starts at zero: residual blocks as identities, the whole network without predicted noise."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ResBlock(nn.Module):
    """Two convolutions with a shortcut; the condition scales and shifts the channels between them."""

    def __init__(self, channels: int, out_channels: int, condition_size: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_NORM_GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.condition = nn.Linear(condition_size, 2 * out_channels)
        self.norm2 = nn.GroupNorm(_NORM_GROUPS, out_channels)
        self.conv2 = ZeroConv(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out_channels, 1) if channels != out_channels else nn.Identity()

    def forward(self, hidden_states: Tensor, condition: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(hidden_states)))
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        inner = self.conv2(F.silu(self.norm2(inner) * (1 + scale) + shift))
        residual: Tensor = self.shortcut(hidden_states) + inner
        return residual


class SpatialAttention(nn.Module):
    """Self-attention over the positions of an image, with a shortcut."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(_NORM_GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.output = nn.Conv2d(channels, channels, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, channels, height, width = hidden_states.shape
        qkv = self.qkv(self.norm(hidden_states)).view(batch, 3, self.num_heads, channels // self.num_heads, -1)
        query, key, value = (part.transpose(-1, -2) for part in qkv.unbind(1))
        mixed = F.scaled_dot_product_attention(query, key, value)  # [batch, heads, positions, head_dim]
        residual: Tensor = hidden_states + self.output(mixed.transpose(-1, -2).reshape(batch, channels, height, width))
        return residual


class UNetLayer(nn.Module):
    """A residual block, and attention where its resolution has it."""

    def __init__(self, channels: int, out_channels: int, level: int, config: ImageDiffusionConfig) -> None:
        super().__init__()
        self.block = ResBlock(channels, out_channels, 4 * config.hidden_sizes[0])
        has_attention = level in config.attention_levels
        self.attention = SpatialAttention(out_channels, config.num_attention_heads) if has_attention else nn.Identity()

    def forward(self, hidden_states: Tensor, condition: Tensor) -> Tensor:
        output: Tensor = self.attention(self.block(hidden_states, condition))
        return output


class ImageDiffusionModel(PreTrainedModel):
    """A U-Net that predicts the noise in an image, given the step and a condition."""

    config_class = ImageDiffusionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: ImageDiffusionConfig) -> None:
        super().__init__(config)
        sizes = config.hidden_sizes
        condition_size = 4 * sizes[0]
        self.class_embedding = nn.Embedding(config.num_labels + 1, condition_size)  # the last row: no class
        self.step_embedding = nn.Sequential(
            nn.Linear(sizes[0], condition_size), nn.SiLU(), nn.Linear(condition_size, condition_size)
        )
        self.stem = nn.Conv2d(config.num_channels, sizes[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        channels, skips = sizes[0], [sizes[0]]
        for level, size in enumerate(sizes):
            layers = nn.ModuleList()
            for _ in range(config.num_res_blocks):
                layers.append(UNetLayer(channels, size, level, config))
                channels = size
                skips.append(size)
            self.down.append(layers)
            if level < len(sizes) - 1:
                self.shrink.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skips.append(channels)
        self.middle = UNetLayer(channels, channels, len(sizes) - 1, config)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, size in reversed(list(enumerate(sizes))):
            layers = nn.ModuleList()
            for _ in range(config.num_res_blocks + 1):
                layers.append(UNetLayer(channels + skips.pop(), size, level, config))
                channels = size
            self.up.append(layers)
            if level:
                self.grow.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.norm = nn.GroupNorm(_NORM_GROUPS, channels)
        self.head = ZeroConv(channels, config.num_channels, 3, padding=1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)

    @property
    def schedule(self) -> NoiseSchedule:
        return NoiseSchedule.named(self.config.noise_schedule, self.config.diffusion_steps)

    def embed_classes(self, labels: Tensor) -> Tensor:
        """Return the conditions of classes, [...] -> [..., size]."""
        embedded: Tensor = self.class_embedding(labels)
        return embedded

    def no_class(self, batch: int) -> Tensor:
        """Return the condition of images of any class."""
        return self.class_embedding.weight[-1].expand(batch, -1)

    def predict_noise(self, noisy: Tensor, steps: Tensor, condition: Tensor) -> Tensor:
        """Return the noise in images [batch, channels, height, width] at steps [batch]."""
        size = self.config.hidden_sizes[0] // 2
        periods = _MAX_PERIOD ** (torch.arange(size, device=noisy.device) / size)
        angles = steps[:, None] * (1000 / self.config.diffusion_steps) / periods
        step = self.step_embedding(torch.cat([angles.sin(), angles.cos()], dim=1).to(condition.dtype))
        condition = F.silu(step + condition)
        hidden_states = self.stem(noisy)
        skips = [hidden_states]
        for level, layers in enumerate(self.down):
            for layer in layers:  # type: ignore[attr-defined]
                hidden_states = layer(hidden_states, condition)
                skips.append(hidden_states)
            if level < len(self.shrink):
                hidden_states = self.shrink[level](hidden_states)
                skips.append(hidden_states)
        hidden_states = self.middle(hidden_states, condition)
        for level, layers in enumerate(self.up):
            for layer in layers:  # type: ignore[attr-defined]
                hidden_states = layer(torch.cat([hidden_states, skips.pop()], dim=1), condition)
            if level < len(self.grow):
                hidden_states = self.grow[level](F.interpolate(hidden_states, scale_factor=2.0))
        noise: Tensor = self.head(F.silu(self.norm(hidden_states)))
        return noise

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageDiffusionOutput:
        """Predict the noise that is added to images [batch, channels, height, width] at random steps.

        With labels [batch], some of which are dropped, also the loss.
        """
        batch, device = len(pixel_values), pixel_values.device
        steps = torch.randint(self.config.diffusion_steps, (batch,), device=device)
        noise = torch.randn_like(pixel_values)
        unknown = torch.full((batch,), self.config.num_labels, device=device)
        given = unknown if labels is None else labels
        dropped = torch.rand(batch, device=device) < self.config.label_dropout
        condition = self.embed_classes(torch.where(dropped, unknown, given))
        predicted = self.predict_noise(self._schedule(device).add_noise(pixel_values, noise, steps), steps, condition)
        loss = None if labels is None else F.mse_loss(predicted.float(), noise)
        return ImageDiffusionOutput(loss, predicted)

    def _schedule(self, device: torch.device) -> NoiseSchedule:
        """Return the schedule on a device; a copy inside a forward pass could not be captured as a CUDA graph."""
        cached: NoiseSchedule | None = getattr(self, "_cached_schedule", None)
        if cached is None or cached.alpha_bar.device != device:
            cached = NoiseSchedule(self.schedule.alpha_bar.to(device))
            self._cached_schedule = cached
        return cached


def register() -> None:
    """Make transformers build these networks from their config."""
    AutoConfig.register(MODEL_TYPE, ImageDiffusionConfig, exist_ok=True)
    AutoModel.register(ImageDiffusionConfig, ImageDiffusionModel, exist_ok=True)
