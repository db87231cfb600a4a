"""GPTQ of an 8B Llama shape on one GPU: 4 bits, groups of 128, 128 sequences of 2,048 tokens; time and host memory.

    python benchmarks/gpu_gptq.py [--layers 32] [--offload]

Weights are random, so this says nothing about quality. With --offload the network stays in host memory and blocks move
to the GPU one at a time, as for a network larger than GPU memory.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from common import table, write
from transformers import LlamaConfig, LlamaForCausalLM

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.measure.cost import count_bytes
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers

SAMPLES, LENGTH, BATCH = 128, 2048, 8
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    home = "cpu" if options.offload else "cuda"
    model = Model(_network(options.layers, home), source="llama-8b-shape")
    weights = count_bytes(model.network)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    batches = [{"input_ids": torch.randint(SHAPE["vocab_size"], (BATCH, LENGTH))} for _ in range(SAMPLES // BATCH)]
    context = MethodContext(batches=batches, device=torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    facts = METHODS.build({"method": "gptq", "bits": 4, "group_size": 128}).apply(model, context)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert len(quantized_layers(model.network)) == facts["layers_quantized"] == 7 * options.layers
    row = {
        "layers": options.layers,
        "offload": options.offload,
        "seconds": seconds,
        "seconds_a_layer": seconds / options.layers,
        "weights_bytes": weights,
        "host_bytes_added": max(0, after - before),
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "bits_per_weight": facts["bits_per_weight"],
        "bytes_after": facts["bytes_after"],
    }
    cells = [
        ["blocks", str(options.layers)],
        ["weights in", "host memory" if options.offload else "GPU memory"],
        ["time", f"{seconds:.1f} s"],
        ["a block", f"{seconds / options.layers:.2f} s"],
        ["weights before and after", f"{weights / 1e9:.2f} GB, {facts['bytes_after'] / 1e9:.2f} GB"],
        ["host memory added", f"{row['host_bytes_added'] / 1e9:.2f} GB"],
        ["peak GPU memory", f"{row['device_peak_bytes'] / 1e9:.1f} GB"],
    ]
    title = f"# GPTQ of an 8B Llama shape, 4 bits, groups of 128, {SAMPLES} x {LENGTH} tokens\n\n"
    name = "gpu_gptq_offload" if options.offload else "gpu_gptq"
    write(name, [row], title + table(["", torch.cuda.get_device_name()], cells))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--offload", action="store_true")
    return parser.parse_args()


def _network(layers: int, device: str) -> LlamaForCausalLM:
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        network = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return network.eval().to(device)


if __name__ == "__main__":
    main()
