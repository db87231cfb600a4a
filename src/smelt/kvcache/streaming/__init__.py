"""Streams in bounded memory: a KV cache of fixed size, compressed when it is full (InfiniPot, InfiniPot-V)."""

from __future__ import annotations

from smelt.kvcache.streaming.infinipot import InfiniPot
from smelt.kvcache.streaming.infinipot_v import InfiniPotV
from smelt.kvcache.streaming.recent import RecentFrames
from smelt.kvcache.streaming.text import TextStream
from smelt.kvcache.streaming.uniform import UniformFrames
from smelt.kvcache.streaming.video import VideoStream

__all__ = ["InfiniPot", "InfiniPotV", "RecentFrames", "TextStream", "UniformFrames", "VideoStream"]
