"""Structured pruning, one file per method; importing the package registers them."""

from smelt.compression.pruning import (
    attention_reuse,
    carve_experts,
    expert_frequency,
    expert_merging,
    expert_random,
    fisher,
    flap,
    magnitude,
    minitron,
    minitron_depth,
    random,
    reap,
    shortgpt,
    slicegpt,
    taylor,
    wanda_sp,
)

__all__ = [
    "attention_reuse",
    "carve_experts",
    "expert_frequency",
    "expert_merging",
    "expert_random",
    "fisher",
    "flap",
    "magnitude",
    "minitron",
    "minitron_depth",
    "random",
    "reap",
    "shortgpt",
    "slicegpt",
    "taylor",
    "wanda_sp",
]
