"""What workers of these tests use, so that it is loaded once."""

import transformers.models.llama.modeling_llama
import transformers.models.resnet.modeling_resnet

import smelt.train.trainer.trainer

__all__ = ["smelt", "transformers"]
