"""Networks compiled to CPU programs: which ones are supported, and that they match the eager module."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.program import can_run
from smelt.kernels.dispatch import CPU
from smelt.kernels.paged import attention_backend, paged_attention, paged_attention_reference
from smelt.models.experts import split_experts
from smelt.models.model import Model
from smelt.runtime.cpu import unsupported_reason
from smelt.serve.engine.request import Request, RequestId
from smelt.serve.engine.runner import ModelRunner, logits_indices
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledChunk
from tests.mixtures import fused
from tests.models.test_surgery import cut, random_masks
from tests.tiny import BUILDS

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None or not can_run(LIBRARY), reason="no compiled library on this machine")
SIZES: dict[str, Any] = {
    "num_blocks": 40,
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 96,
}


def quantize_model(settings: dict[str, Any], name: str = "llama") -> Any:
    model = Model(BUILDS[name]())
    METHODS.build(settings).apply(model, MethodContext())
    return model.network


def pruned() -> Any:
    network = BUILDS["llama"]()
    cut(network, random_masks(network))
    return network


NETWORKS = {
    **{name: BUILDS[name] for name in ("llama", "llama-tied", "mistral", "qwen2", "qwen3")},
    "pruned": pruned,
    "int4": lambda: quantize_model({"method": "rtn", "bits": 4, "group_size": 16}),
    "int4, biases": lambda: quantize_model({"method": "rtn", "bits": 4, "group_size": 16}, "qwen2"),
    "int8 head": lambda: quantize_model(
        {"method": "rtn", "bits": 8, "group_size": -1, "symmetric": True, "embeddings": "int8/row"}, "llama-tied"
    ),
    "int8": lambda: quantize_model({"method": "rtn", "bits": 8, "group_size": -1, "symmetric": True}),
    "nf4": lambda: quantize_model({"method": "rtn", "format": "nf4/16"}),
    "int4 x int8": lambda: quantize_model({"method": "rtn", "bits": 4, "group_size": -1, "input_activations": "int8"}),
    "one scale a matrix": lambda: quantize_model({"method": "rtn", "bits": 8, "group_size": 0}),
}


def logits(network: Any, compiled: bool, texts: list[list[int]]) -> Tensor:
    """Return the logits of the last token of every sequence, computed as one batch in two chunks each."""
    runner = ModelRunner(Model(copy.deepcopy(network)), **SIZES, compiled=compiled)
    assert runner.backend == ("compiled-cpu" if compiled else "eager")
    requests = [Request(RequestId(str(slot)), text, SamplingParams(), 96, slot=slot) for slot, text in enumerate(texts)]
    for slot, request in enumerate(requests):
        request.blocks = list(range(slot * 10 + 9, slot * 10 - 1, -1))
    result = None
    with torch.inference_mode():
        for part in range(2):
            chunks = []
            for request in requests:
                half = len(request.tokens) // 2
                start, stop = ((0, half), (half, len(request.tokens)))[part]
                if stop > start:
                    chunks.append(ScheduledChunk(request, start, stop - start, part == 1))
            if not chunks:
                continue
            count = runner._fill_inputs(chunks)
            ids, positions = (
                torch.from_numpy(np.array(array[:count])) for array in (runner._input_ids, runner._positions)
            )
            rows = torch.tensor(logits_indices(chunks), dtype=torch.int64)
            result = runner._logits(ids, positions, rows, runner._build_metadata(chunks, count)).clone()
    assert result is not None
    return result


TEXTS = [[5, 6, 7, 8, 9, 10, 11], [20], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46]]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_matches_the_network(name: str) -> None:
    network = NETWORKS[name]()
    assert unsupported_reason(Model(network)) is None
    actual, expected = logits(network, True, TEXTS), logits(network, False, TEXTS)
    assert torch.allclose(actual, expected, atol=2e-4, rtol=1e-4), float((actual - expected).abs().max())


@pytest.mark.parametrize("name", ["llama", "int4", "int8 head", "qwen3"])
def test_half_precision(name: str) -> None:
    network = NETWORKS[name]().to(torch.bfloat16)
    actual, expected = logits(network, True, TEXTS), logits(network, False, TEXTS).float()
    exact = logits(copy.deepcopy(network).float(), False, TEXTS)
    assert (actual - exact).norm() < 1.2 * (expected - exact).norm() + 1e-3 * exact.norm()


def test_batch_composition_changes_no_bit() -> None:
    network = BUILDS["llama"]()
    batched = logits(network, True, TEXTS)
    for row, text in enumerate(TEXTS):
        assert torch.equal(logits(network, True, [text])[0], batched[row])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (BUILDS["gpt2"], "gpt2 is not among"),
        (BUILDS["opt"], "opt is not among"),
        (lambda: quantize_model({"method": "quarot", "rounding": "rtn"}), "without a compiled kernel"),
        (lambda: split_experts(fused("olmoe-clipped")), "its Q, K and V are clipped"),
    ],
    ids=["gpt2", "opt", "rotated inputs", "clipped"],
)
def test_unsupported_networks_run_eagerly_with_a_reason(build: Any, reason: str) -> None:
    network = build()
    assert reason in (unsupported_reason(Model(network)) or "")
    assert ModelRunner(Model(network), **SIZES).backend == "eager"


@pytest.mark.parametrize("empty", [("heads0",), ("ffn_channels1",)])
def test_a_fully_pruned_layer_runs_eagerly(empty: tuple[str, ...]) -> None:
    network = BUILDS["llama"]()
    cut(network, random_masks(network, empty=empty))
    assert unsupported_reason(Model(network)) == "a layer lost all of its heads or channels"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "lengths", "counts", "window"),
    [
        (9, 3, 64, [700, 3, 258], [1, 1, 1], None),
        (9, 3, 64, [700, 40], [33, 40], None),
        (4, 4, 24, [17, 300], [17, 5], 5),
        (16, 1, 250, [300, 513], [7, 2], 100),
        (1, 1, 1, [1], [1], None),
    ],
)
def test_attention(
    dtype: torch.dtype, pages_dtype: torch.dtype, heads: int, kv_heads: int, width: int, lengths: list[int],
    counts: list[int], window: int | None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    size, rows = 16, [-(-length // 16) for length in lengths]
    order = torch.randperm(sum(rows) + 2).tolist()
    tables = torch.zeros(len(lengths), max(rows), dtype=torch.int32)
    for row, count in enumerate(rows):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    pages = [torch.randn(sum(rows) + 2, size, kv_heads, width).to(pages_dtype) for _ in range(2)]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    batch = AttentionMetadata(
        starts, torch.tensor(lengths, dtype=torch.int32), tables, starts.long(), max(lengths), counts
    )
    queries = torch.randn(sum(counts), heads, width).to(dtype)
    assert attention_backend(queries, pages[0]) == CPU
    actual = paged_attention(queries, pages[0], pages[1], batch, width**-0.5, window)
    expected = paged_attention_reference(
        queries.float(), pages[0].float(), pages[1].float(), batch, width**-0.5, window
    )
    assert torch.allclose(actual.float(), expected, atol=1e-5 if dtype == torch.float32 else 1e-2)


def test_attention_with_scores_that_would_overflow() -> None:
    pages = [torch.full((1, 4, 1, 16), 100.0), torch.arange(64.0).reshape(1, 4, 1, 16)]
    batch = AttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32),
        torch.tensor([[0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 4, [1],
    )  # fmt: skip
    result = paged_attention(torch.full((1, 1, 16), 100.0), pages[0], pages[1], batch, 1.0)
    assert torch.allclose(result, pages[1][0].mean(0)[None])
