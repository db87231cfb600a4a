"""Run an attack under limits on memory and CPU time, and write the small model that attacks are made of."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from smelt.errors import SmeltError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a small valid Llama with random weights; `changes` replace fields of its config.json."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(**CONFIG))
    save_file({name: p.detach().clone() for name, p in network.named_parameters()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


@contextmanager
def limited_memory(headroom: int) -> Iterator[None]:
    """Limit the address space to `headroom` bytes more than in use: larger allocations fail even if untouched."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + headroom, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(action: Callable[[], object], *, headroom: int = 512 * 2**20, cpu_seconds: float = 30) -> str:
    """Return the sentence with which an attack is refused, checking that it took little CPU time and memory."""
    # CPU time of this process: other load does not count, but what a host takes from a virtual machine does.
    start = time.process_time()
    with limited_memory(headroom), pytest.raises(SmeltError) as caught:
        action()
    seconds = time.process_time() - start
    sentence = str(caught.value)
    assert seconds < cpu_seconds, f"took {seconds:.1f} s of CPU time"
    assert "\n" not in sentence and len(sentence) < 600, sentence
    assert "alloc" not in sentence and "MemoryError" not in sentence, sentence
    return sentence
