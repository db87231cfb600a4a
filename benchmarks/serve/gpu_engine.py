"""The engine on one GPU: Llama 1B and 8B shapes with random weights, beside transformers in the same run.

    PYTHONPATH=src:benchmarks python benchmarks/serve/gpu_engine.py [--shapes 1b 8b] [--no-peers] [--resume]

256 tokens in, 256 out, greedy. For one stream the time per token is compared with the weights' bytes over the bandwidth
of a large copy. The idle share of the GPU in a decode step comes from a trace of its kernels. Every row names the
backend that computed it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import copy_bandwidth, previous_rows, table, write
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

SEED, PROMPT, ANSWER, CONTEXT = 0, 256, 256, 1024
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "head_dim": 128},
}
TINY: dict[str, Any] = {  # to try a script without a GPU
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "head_dim": 32, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip
STREAMS = {"1b": (1, 64, 256), "8b": (1, 64, 128)}
PEER_STREAMS = {"1b": 256, "8b": 64}
COMMON = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}


def main() -> None:
    options = _options()
    rows = previous_rows(options.name, options.resume)
    bandwidth = copy_bandwidth()
    measures: list[tuple[str, Any]] = [("engine", lambda network, shape: ours(network, shape, bandwidth))]
    if options.peers:
        measures.append(("transformers", peers))
    for name, measure in measures:
        for shape in options.shapes:
            network = random_network(shape)  # one per engine, which rearranges its weights
            rows += _guarded(shape, name, lambda n=network, s=shape, m=measure: m(n, s))
            write(options.name, rows, _text(rows, bandwidth))
            del network
            torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--name", default="serve_gpu", help="of the results file")
    return parser.parse_args()


def _guarded(shape: str, who: str, work: Any) -> list[dict[str, Any]]:
    """Record a failure, and continue with the rest."""
    try:
        rows: list[dict[str, Any]] = work()
        return rows
    except Exception as error:
        return [{"shape": shape, "who": who, "failed": f"{type(error).__name__}: {error}"[:300]}]


def random_network(shape: str, device: str = "cuda", **changes: Any) -> Any:
    """Return a network of a shape (`tiny`: for tests), with some fields of its config changed."""
    fields = {**COMMON, **(TINY if shape == "tiny" else SHAPES[shape]), **changes}
    config = LlamaConfig(**fields, tie_word_embeddings=shape == "1b", dtype=torch.bfloat16)
    with torch.device("meta"):
        network = LlamaForCausalLM(config).to(torch.bfloat16)
    network = network.to_empty(device=device).eval()
    torch.manual_seed(SEED)
    for name, parameter in network.named_parameters():
        parameter.data.fill_(1.0) if "norm" in name else parameter.data.normal_(0, 0.02)
    rotary = network.model.rotary_emb
    rotary.inv_freq = type(rotary)(config).inv_freq.to(device)  # to_empty leaves it uninitialized
    rotary.original_inv_freq = rotary.inv_freq
    network.tie_weights()
    return network


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(10, COMMON["vocab_size"], (count, PROMPT), generator=generator).tolist()


def ours(network: Any, shape: str, bandwidth: float) -> list[dict[str, Any]]:
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    if shape == "8b":  # a token reads one row of the embedding table
        weights -= network.get_input_embeddings().weight.nbytes
    engine = Engine(
        Model(network), max_model_len=CONTEXT, max_num_seqs=256, max_num_batched_tokens=8192, kv_cache_bytes=40 * 10**9,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert engine.runner.backend == "fused-gpu with CUDA graphs", engine.runner.backend
    rows = []
    for streams in STREAMS[shape]:
        generate(engine, streams)  # warmup: capture and compile
        seconds, decoding = generate(engine, streams)
        row: dict[str, Any] = {
            "shape": shape, "who": "engine", "path": engine.runner.backend, "streams": streams,
            "tokens_per_second": streams * ANSWER / seconds, "decode_ms": decoding * 1e3,
            "captured": sorted(engine.runner._captured),
        }  # fmt: skip
        if streams == 1:
            row["share_of_bandwidth"] = weights / decoding / bandwidth
        row["idle"], row["where"] = traced(engine, streams)
        rows.append(row)
        print(row, flush=True)
    return rows


def generate(engine: Engine, streams: int) -> tuple[float, float]:
    """Return the total seconds, and the median time of a decode step."""
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [engine.submit(prompt, sampling)[0] for prompt in prompts(streams)]
    times, last = [], start
    while engine.busy:
        engine.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    assert all(len(request.output) == ANSWER for request in requests)
    return last - start, statistics.median(times[len(times) // 4 : -2])


def traced(engine: Engine, streams: int) -> tuple[float, dict[str, float]]:
    """Trace 40 decode steps in the middle of a run: one minus the share of time in kernels, and the most expensive
    kernels.
    """
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    for prompt in prompts(streams):
        engine.submit(prompt, sampling)
    for _ in range(40):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(40):
            engine.step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    kernels = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end = 0.0, kernels[0][0]
    for begin, stop in kernels:
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    total = end - kernels[0][0]
    while engine.busy:
        engine.step()
    by_name: dict[str, float] = {}
    for event in events:
        by_name[event.name[:60]] = by_name.get(event.name[:60], 0.0) + event.time_range.elapsed_us() / 40
    slowest = dict(sorted(by_name.items(), key=lambda each: -each[1])[:12])
    return 1 - busy / total, {name: round(us, 1) for name, us in slowest.items()}


def peers(network: Any, shape: str) -> list[dict[str, Any]]:
    """Measure transformers: one stream with a static cache and compiled, many by continuous batching."""
    rows: list[dict[str, Any]] = []
    inputs = torch.tensor(prompts(1), device="cuda")
    settings = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
    single, batched = "transformers generate (static cache, compiled)", "transformers generate_batch (paged|sdpa)"
    streams = PEER_STREAMS[shape]

    def one() -> list[dict[str, Any]]:
        for _ in range(3):  # warmup: compile
            network.generate(inputs, cache_implementation="static", **settings)
        torch.cuda.synchronize()
        start = time.perf_counter()
        network.generate(inputs, cache_implementation="static", **settings)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return [{"shape": shape, "who": single, "streams": 1, "tokens_per_second": ANSWER / seconds}]

    def many() -> list[dict[str, Any]]:
        network.set_attn_implementation("paged|sdpa")
        config = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        outputs = network.generate_batch(prompts(streams), generation_config=config)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
        return [{"shape": shape, "who": batched, "streams": streams, "tokens_per_second": tokens / seconds}]

    for name, work in ((batched, many), (single, one)):
        rows += _guarded(shape, name, work)
        network.set_attn_implementation("sdpa")
        print(rows[-1], flush=True)
    return rows


def _text(rows: list[dict[str, Any]], bandwidth: float) -> str:
    cells = [
        [
            row["shape"],
            row["who"] + (f" ({row['path']})" if "path" in row else ""),
            str(row.get("streams", "")),
            row["failed"] if "failed" in row else f"{row['tokens_per_second']:,.0f}",
            f"{row['decode_ms']:.2f}" if "decode_ms" in row else "",
            f"{row['share_of_bandwidth']:.0%}" if "share_of_bandwidth" in row else "",
            f"{row['idle']:.1%}" if "idle" in row else "",
        ]
        for row in rows
    ]
    headings = ["shape", "engine", "streams", "tokens/s", "decode step, ms", "of copy bandwidth", "GPU idle"]
    return (
        "# The engine on one GPU\n\n"
        f"Random bf16 weights, {PROMPT} tokens in, {ANSWER} out, greedy; tokens generated over the total time, "
        f"prompts included. Copy bandwidth {bandwidth / 1e12:.2f} TB/s.\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
