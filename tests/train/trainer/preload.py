"""Modules that these tests' workers use, imported once in the fork server."""

import transformers.models.llama.modeling_llama
import transformers.models.resnet.modeling_resnet

import smelt.train.trainer.trainer

__all__ = ["smelt", "transformers"]
