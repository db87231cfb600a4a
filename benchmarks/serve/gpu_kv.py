"""A compressed KV cache on one GPU: Llama 8B shape with random weights, long prompts, against plain pages.

    PYTHONPATH=src:benchmarks python benchmarks/serve/gpu_kv.py [--prompt 32768] [--requests 64] [--cache-gb 64]
        [--kv-types int8 fp8 int4 int3] [--layers 8]

Each engine gets the same KV cache memory and the same requests, all at once. The profile is synthetic: a tenth of the
heads keeps nearly everything, the others little, 25% in total; with random weights all heads would keep the same. Time
and memory depend on how many tokens a head keeps, not on which: the weights need not be meaningful.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from common import copy_bandwidth, record_triton_compiles, table, write
from gpu_engine import COMMON, SEED, random_network
from long_prompts import run_headings, run_requests, run_row

from smelt.kernels.kv_quant import KV_QUANT_DTYPES
from smelt.kvcache.eviction.budget import check_keep
from smelt.kvcache.eviction.profile import EvictionProfile, KVShape
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.kv_dtype import backend_suffix

LAYERS, KV_HEADS, WIDTH = 32, 8, 128


def main() -> None:
    options = _options()
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    network = random_network("8b")
    network.model.layers = network.model.layers[: options.layers]
    network.config.num_hidden_layers = options.layers
    network.config.max_position_embeddings = options.prompt + max(options.answers) + 8
    engines: dict[str, dict[str, Any]] = {
        "head clusters, keep 25 %": {"kv_profile": profile(0.25)},
        "plain pages": {},
        "head clusters, keep 100 %": {"kv_profile": profile(1.0)},
    }
    for kv_dtype in options.kv_types:
        engines[f"plain pages, {kv_dtype}"] = {"kv_cache_dtype": kv_dtype}
        engines[f"head clusters, keep 25 %, {kv_dtype}"] = {"kv_profile": profile(0.25), "kv_cache_dtype": kv_dtype}
    small_batch = max(2, options.requests // 16)
    for name in engines if options.engines is None else options.engines:
        engine = _engine(network, options, engines[name])
        assert engine.runner.backend == _path(engines[name]), engine.runner.backend
        begin = time.perf_counter()
        engine.warmup()
        preparing = time.perf_counter() - begin
        everything = [] if name == "head clusters, keep 100 %" else options.answers
        for requests, answer in ((small_batch, options.short), *((options.requests, answer) for answer in everything)):
            with record_triton_compiles() as compiled:
                run = run_requests(engine, prompts(requests, options.prompt), answer)
            rows.append({"engine": name, "preparing": preparing, **run, "compiled": len(compiled)})
            print(rows[-1], compiled, flush=True)
        write(options.name, rows, _text(rows, options, bandwidth))
        del engine
        _freed()


def _path(settings: dict[str, Any]) -> str:
    """Return the backend that should compute the steps of such an engine."""
    pages = ", per-head cache" if "kv_profile" in settings else ""
    return f"fused-gpu{pages}{backend_suffix(settings.get('kv_cache_dtype'))} with CUDA graphs"


def _freed() -> None:
    gc.collect()  # the engine has reference cycles
    torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--answers", type=int, nargs="+", default=[1024], help="answer lengths; one run for each")
    parser.add_argument("--short", type=int, default=128, help="answer length of the small-batch run")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--cache-gb", type=float, default=64.0)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--engines", nargs="*", help="only these")
    parser.add_argument(
        "--kv-types", nargs="+", choices=KV_QUANT_DTYPES, default=[], help="also measure these KV cache dtypes"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the network; profiles need all of them")
    parser.add_argument("--name", default="serve_gpu_kv", help="name of the results")
    return parser.parse_args()


def profile(keep: float) -> EvictionProfile:
    """Return a skewed profile, the same at every call."""
    check_keep(keep)
    generator = torch.Generator().manual_seed(SEED)
    shares = torch.rand(LAYERS, KV_HEADS, generator=generator).double()
    many = torch.rand(LAYERS, KV_HEADS, generator=generator) < 0.1
    means = torch.where(many, 0.85 + 0.1 * shares, 0.02 + 0.3 * shares)
    nothing = tuple(tuple(0.0 for _ in range(KV_HEADS)) for _ in range(LAYERS))
    budgets = torch.ones_like(means) if keep == 1 else means
    return EvictionProfile(
        KVShape("llama", LAYERS, KV_HEADS, WIDTH), "snapkv", keep, 1, tuple(map(tuple, budgets.tolist())), nothing
    )


def _engine(network: Any, options: argparse.Namespace, more: dict[str, Any]) -> Engine:
    return Engine(
        Model(network), max_model_len=options.prompt + max(options.answers) + 8, max_num_seqs=max(options.requests, 96),
        max_num_batched_tokens=options.chunk, kv_cache_bytes=int(options.cache_gb * 1e9),
        enable_prefix_caching=False, **more,
    )  # fmt: skip


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(10, COMMON["vocab_size"], (count, length), generator=generator).tolist()


def _text(rows: list[dict[str, Any]], options: argparse.Namespace, bandwidth: float) -> str:
    return (
        "# A compressed KV cache on one GPU\n\n"
        f"Llama 8B shape, {options.layers} layers, random bfloat16 weights, prompts of {options.prompt:,} tokens, "
        f"{options.cache_gb:g} GB of KV cache, chunks of {options.chunk:,}; copy bandwidth {bandwidth / 1e12:.2f} "
        "TB/s. One run; engines are warmed up before they are timed, as a server does before it reports ready.\n\n"
        + table([*run_headings(), "kernels compiled during the run"], [_cells(row) for row in rows])
        + "\n"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [*run_row(row), str(row["compiled"])]


if __name__ == "__main__":
    main()
