"""Streams in bounded memory: a pot of keys and values that is cooked down when it is full (InfiniPot, InfiniPot-V)."""

from __future__ import annotations

from smelt.kv.pot.infinipot import InfiniPot
from smelt.kv.pot.infinipot_v import InfiniPotV
from smelt.kv.pot.recent import Recent
from smelt.kv.pot.text import TextStream
from smelt.kv.pot.uniform import Uniform
from smelt.kv.pot.video import VideoStream

__all__ = ["InfiniPot", "InfiniPotV", "Recent", "TextStream", "Uniform", "VideoStream"]
