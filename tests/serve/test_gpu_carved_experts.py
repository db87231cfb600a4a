"""Feed-forwards carved into experts in the GPU runner: the tokens of transformers' generation.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.models.carved_experts import LayerChannels
from smelt.serve.engine import factory
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.factory import routed_gpu_runner
from smelt.serve.engine.sampling_params import SamplingParams
from tests.carved import CHANNELS, carved
from tests.serve.gpu_runner import small_tiles  # noqa: F401  (a fixture)
from tests.serve.test_routed_engine import SMALL, expected

UNEVEN = LayerChannels(tuple(range(5)), (tuple(range(5, 8)), tuple(range(5, 48)), tuple(range(8, 30))))
_PROMPTS = [[(7 * i + 3) % 90 + 5 for i in range(19)], [(5 * i + 11) % 90 + 5 for i in range(9)], [50, 60]]


@pytest.fixture(autouse=True)
def _gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the GPU runner also without a CUDA device."""
    monkeypatch.setattr(factory, "routed_runner", routed_gpu_runner)


@pytest.mark.parametrize("case", ["at once", "in chunks", "two at a time", "quantized KV cache"])
def test_answers_are_those_of_transformers(case: str) -> None:
    """Layers differ in the widths of their experts; decode steps of three tokens are padded to four."""
    options: dict[str, Any] = {
        "at once": {}, "in chunks": {"prefill_chunk_size": 4, "max_num_batched_tokens": 8},
        "two at a time": {"max_num_batched_tokens": 2}, "quantized KV cache": {"kv_cache_dtype": "int8"},
    }[case]  # fmt: skip
    model = carved(channels=[CHANNELS, UNEVEN, CHANNELS])
    wanted = [expected(model, prompt, 5) for prompt in _PROMPTS]
    model.network.to(DEVICE)
    engine = Engine(model, **SMALL, **options)
    assert engine.backend.startswith("fused-gpu")
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    requests = [engine.submit(prompt, sampling)[0] for prompt in _PROMPTS]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == wanted
    assert len({expert for request in requests for expert in request.expert_routes}) == 3
    assert engine.state()["expert_uses"] > 3
