"""lm-eval's client of completion servers scores texts as the model of `smelt eval --harness` does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'smeltml[harness]'")
pytest.importorskip("tenacity", reason="needs the client of lm-eval: pip install 'lm-eval[api]'")

from lm_eval.models.openai_completions import LocalCompletionsAPI

from smelt.harness.adapter import HarnessModel
from smelt.models.load import load
from tests.serve.server_process import NAME, Server

PAIRS = [
    ("The sky is", " blue"),
    ("The sky is", " green"),
    ("a", " much longer continuation"),
    ("end ", "x"),
    ("", "é"),
]


@pytest.mark.parametrize("concurrent", [1, 3])
def test_log_likelihoods_match_direct_evaluation(server: Server, model_folder: Path, concurrent: int) -> None:
    requests: list[Any] = [SimpleNamespace(args=pair) for pair in PAIRS]
    expected = HarnessModel(load(str(model_folder))).loglikelihood(requests)
    client = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=NAME, num_concurrent=concurrent, batch_size=2, max_length=1024
    )
    assert client.tokenizer_backend == "remote"  # it has found /tokenizer_info and /tokenize
    found = client.loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
