"""Logits of a teacher that are computed once: what is kept, and that training with them is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from smelt.compression.base import METHODS
from smelt.compression.distillation.cached_teacher import expand, truncate
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.errors import RecipeError
from tests.compression.distillation.test_qat import FAST, W2A2, Interrupted, images, text, train
from tests.tiny import BUILDS


def test_the_likeliest_tokens_and_the_label_are_exact_and_the_rest_shares_what_is_left() -> None:
    logits = torch.tensor([[[4.0, 3.0, 1.0, 0.0, -1.0], [0.0, 5.0, 1.0, 1.0, 0.0]]])
    labels = torch.tensor([[2, 4]])  # the label of the first position is token 4, which is the least likely
    indices, log_probs = truncate(logits, labels, top_k=2)
    assert indices[0, 0].tolist() == [0, 1, 4]
    dense, exact = expand(indices, log_probs, 5), F.log_softmax(logits, -1)
    assert torch.allclose(dense[0, 0, [0, 1, 4]], exact[0, 0, [0, 1, 4]], atol=2e-3)
    rest = exact[0, 0, [2, 3]].exp().mean().log()
    assert torch.allclose(dense[0, 0, [2, 3]], rest, atol=0.02)
    assert torch.allclose(dense.exp().sum(-1), torch.ones(1, 2), atol=1e-2)
    for likely in (0, 1):  # then it counts once, wherever it is among the likeliest
        kept = truncate(logits, torch.tensor([[likely, likely]]), top_k=2)
        assert torch.allclose(expand(*kept, 5).exp().sum(-1), torch.ones(1, 2), atol=1e-2)


def result(network: Any, folder: Path, batches: Any, name: str = "qat", **settings: Any) -> dict[str, torch.Tensor]:
    model, _ = train(METHODS.build(name, **settings), network, batches, folder)
    return dict(model.network.state_dict())


def test_few_classes_are_kept_as_they_are(tmp_path: Path) -> None:
    settings = {**W2A2, **FAST, "epochs": 1, "teacher": "source", "losses": [{"loss": "logits"}]}
    states = []
    for cached in (None, 5):
        torch.manual_seed(0)
        states.append(result(BUILDS["resnet"](), tmp_path, images(), **settings, cache_logits=cached))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not list(tmp_path.iterdir())


def test_a_language_model_learns_from_what_was_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    outputs = DenseTeacher.outputs
    monkeypatch.setattr(
        DenseTeacher, "outputs", lambda *args: [calls.append(len(args[2]["labels"])), outputs(*args)][1]
    )
    settings = {"batch_size": 8, "epochs": 2, "optimizer": {"lr": 1e-3}, "checkpoint_every": 4}
    torch.manual_seed(0)
    network = BUILDS["llama"]()
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    method = METHODS.build("tsld", **settings, cache_logits=40)
    with pytest.raises(KeyboardInterrupt):
        train(method, network, text(), tmp_path, progress=Interrupted(6))
    kept = sorted(path.name for path in (tmp_path / "teacher").iterdir())
    assert kept == ["logits-0.safetensors"] and sum(calls) == 61, "each training sample once"
    again = BUILDS["llama"]()
    again.load_state_dict(start)
    resumed = result(again, tmp_path, text(), "tsld", **settings, cache_logits=40)
    assert sum(calls) == 61, "nothing is computed again"
    whole = BUILDS["llama"]()
    whole.load_state_dict(start)
    uninterrupted = result(whole, tmp_path / "whole", text(), "tsld", **settings, cache_logits=40)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def test_batches_with_less_padding_than_the_samples_get_logits_of_their_length(tmp_path: Path) -> None:
    padded = text(24)
    lengths = torch.tensor([32] + 23 * [5])[:, None]
    for batch, some in zip(padded, lengths.split(16), strict=True):
        batch["attention_mask"] = (torch.arange(32) < some).long()
    settings = {"weights": {"quantizer": "twn"}, "batch_size": 4, "teacher": "source", "losses": [{"loss": "logits"}]}
    method = METHODS.build("qat", **settings, cache_logits=40)
    _, facts = train(method, BUILDS["llama"](), padded, tmp_path)
    assert facts["steps"] == 6


def test_what_cannot_be_computed_once_is_refused() -> None:
    with pytest.raises(RecipeError, match="remove `augment` or `cache_logits`"):
        METHODS.build("qat", teacher="source", losses=[{"loss": "logits"}], augment=True, cache_logits=10)
    with pytest.raises(RecipeError, match="compares the teacher's"):
        METHODS.build("teacher-intervention", cache_logits=10)
