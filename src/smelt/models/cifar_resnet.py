"""ResNets for small images, such as ResNet-20 for CIFAR-10 (He et al., 2016, section 4.2).

transformers' ResNet starts with a 7x7 convolution of stride 2 and a max pool, which leaves 8x8 pixels of a CIFAR image.
These start with a 3x3 convolution of stride 1; everything else is transformers'. A shortcut that subsamples and pads
with zero channels (option A of the paper) is a 1x1 convolution with weights of 0 and 1.
"""

from __future__ import annotations

from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetConvLayer

MODEL_TYPE = "cifar_resnet"


class CifarResNetConfig(ResNetConfig):
    """The config of a ResNet with a 3x3 stem."""

    model_type = MODEL_TYPE


class CifarResNetForImageClassification(ResNetForImageClassification):
    """A ResNet with a 3x3 stem and a classifier."""

    config_class = CifarResNetConfig

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        stem = self.resnet.embedder
        stem.embedder = ResNetConvLayer(
            config.num_channels, config.embedding_size, kernel_size=3, activation=config.hidden_act
        )
        stem.pooler = nn.Identity()
        self.post_init()


def register() -> None:
    """Make transformers build these networks from their config."""
    AutoConfig.register(MODEL_TYPE, CifarResNetConfig, exist_ok=True)
    AutoModelForImageClassification.register(CifarResNetConfig, CifarResNetForImageClassification, exist_ok=True)
