"""LFQ: its loss prefers matching tokens, has the right minimum, runs in slices, and preserves predictions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import smelt.measure.logits
from smelt.compression.base import MethodContext
from smelt.compression.calibration.block_inputs import advance, capture_block_inputs
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.flexround import FlexRound
from smelt.compression.quantization.lfq import LogitLoss
from smelt.compression.quantization.omniquant import OmniQuant
from smelt.errors import ModelError
from smelt.measure.divergence import Divergence
from smelt.measure.perplexity import perplexity
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from tests.tiny import BUILDS, inputs
from tests.trained import HELD_OUT, character_batches, character_model, divergence

CPU = torch.device("cpu")


def last_hidden(model: Model, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the output of the last block, before the final norm."""
    block_inputs = capture_block_inputs(model.anatomy, batches)
    for block in model.anatomy.blocks:
        advance(block_inputs, block)
    return [block_inputs.hidden[batch] for batch in range(len(batches))]


def test_it_prefers_the_right_token_over_the_smaller_error() -> None:
    """FP logits (1, 0). A (0.45, 0.55) is closer but predicts the wrong token; B (3, 2) is far but agrees."""
    model = Model(BUILDS["llama"]())
    loss = LogitLoss(model.anatomy, CPU)
    loss.norm, loss.weight = torch.nn.Identity(), torch.eye(2)
    true, near, far = (torch.tensor([[pair]]) for pair in ((1.0, 0.0), (0.45, 0.55), (3.0, 2.0)))
    assert float((near - true).square().mean()) < float((far - true).square().mean())
    assert abs(float(loss(near, true, None)) - 0.7175) < 1e-4
    assert abs(float(loss(far, true, None)) - 0.5822) < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "opt", "opt-post-norm"])
def test_its_minimum_is_the_full_network_and_equals_the_entropy(family: str) -> None:
    """With the network's own final norm and head, equal hidden states give the entropy of its predictions."""
    model, batch = Model(BUILDS[family]()), inputs(family)
    (hidden,) = last_hidden(model, [batch])
    loss = LogitLoss(model.anatomy, CPU)
    with torch.no_grad():
        logits = model.network(**batch).logits
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert torch.allclose(loss.logits(hidden), logits, atol=1e-5)
    student = hidden.clone().requires_grad_()
    value = loss(student, hidden, None)
    value.backward()
    assert torch.allclose(value, entropy, atol=1e-5)
    assert student.grad is not None and float(student.grad.abs().max()) < 1e-7
    other = (hidden + 0.1 * torch.randn_like(hidden)).requires_grad_()
    worse = loss(other, hidden, None)
    worse.backward()
    assert worse > value and other.grad is not None and float(other.grad.abs().max()) > 1e-5


class RowCountingLoss(LogitLoss):
    """Record how many rows of logits are computed at once."""

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows = [*getattr(self, "rows", []), len(hidden)]
        return super().logits(hidden)


def test_slices_change_nothing_and_bound_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    start, target, mask = torch.randn(2, 9, 32), torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = False  # padding
    results = []
    for most_bytes, most_rows in ((2**26, 14), (4 * 99 * 3, 3)):
        monkeypatch.setattr(smelt.measure.logits, "_MAX_LOGITS_BYTES", most_bytes)
        loss, student = RowCountingLoss(Model(BUILDS["llama"]()).anatomy, CPU), start.clone().requires_grad_()
        value = loss(student, target, mask)
        num_slices = len(loss.rows)
        value.backward()
        assert max(loss.rows) == most_rows
        assert len(loss.rows) == 2 * num_slices  # again in the backward pass, so that none is kept until then
        assert student.grad is not None and float(student.grad[0, 5:].abs().max()) == 0
        results.append((value, student.grad))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-7)


class HardLabels(LogitLoss):
    """The wrong variant: the text's next token in place of the full network's predictions."""

    def __init__(self, anatomy: Anatomy, device: torch.device) -> None:
        super().__init__(anatomy, device)
        batches = character_batches()
        self.known = list(zip(last_hidden(character_model(), batches), batches, strict=True))

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        tokens = next(batch["input_ids"] for hidden, batch in self.known if torch.equal(hidden, target))
        logits = self.logits(output)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def blockwise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """The trained language model at three bits without LFQ, and its checkpointed blocks."""
    model, folder = character_model(), tmp_path_factory.mktemp("blockwise")
    method = FlexRound(bits=3, group_size=16, iterations=60, lr=6e-3)
    method.apply(model, MethodContext(batches=character_batches(), checkpoint=Checkpoint(folder)))
    return model, folder


def with_lfq(first_blocks: Path, folder: Path) -> Model:
    """The same with LFQ, reusing all blocks but the last (a test below checks that they are equal)."""
    shutil.copytree(first_blocks, folder)
    for last in folder.glob("block-2.*"):
        last.unlink()
    model = character_model()
    method = FlexRound(bits=3, group_size=16, iterations=60, lr=6e-3, lfq=True)
    method.apply(model, MethodContext(batches=character_batches(), checkpoint=Checkpoint(folder)))
    return model


@pytest.fixture(scope="module")
def soft(blockwise: tuple[Model, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Divergence]:
    model = with_lfq(blockwise[1], tmp_path_factory.mktemp("soft") / "run")
    return model, divergence(model)


def test_it_preserves_predictions_better_than_a_hidden_state_loss(
    blockwise: tuple[Model, Path], soft: tuple[Model, Divergence]
) -> None:
    without, (model, result) = divergence(blockwise[0]), soft
    assert result.kl < 0.85 * without.kl
    assert result.agreement >= without.agreement
    ratio = perplexity(model, HELD_OUT, context=64).value / perplexity(blockwise[0], HELD_OUT, context=64).value
    assert abs(ratio - 1) < 0.01


def test_hard_labels_are_worse(
    blockwise: tuple[Model, Path], soft: tuple[Model, Divergence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smelt.compression.quantization.learned.LogitLoss", HardLabels)
    hard = with_lfq(blockwise[1], tmp_path / "run")
    assert divergence(hard).kl > 1.5 * soft[1].kl


@pytest.mark.parametrize("method", [FlexRound, OmniQuant])
def test_only_the_last_block_differs(method: type[FlexRound] | type[OmniQuant]) -> None:
    settings = {"iterations": 4} if method is FlexRound else {"epochs": 2}
    networks = []
    for lfq in (False, True):
        model = Model(BUILDS["llama"]())
        batches = [inputs("llama", seed=seed) for seed in range(2)]
        method(bits=3, group_size=16, lr=0.05, lfq=lfq, **settings).apply(model, MethodContext(batches=batches))
        networks.append(model.network.state_dict())
    differing = {name for name in networks[0] if not torch.equal(networks[0][name], networks[1][name])}
    assert differing and all(name.startswith("model.layers.2.") for name in differing)


def test_the_student_receives_the_output_of_the_quantized_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss's output comes from the quantized prefix, its target from the original network."""
    model, batch = Model(BUILDS["llama"]()), inputs("llama")
    (target,) = last_hidden(model, [batch])
    seen: list[tuple[Tensor, Tensor]] = []
    plain = LogitLoss.__call__
    monkeypatch.setattr(
        LogitLoss, "__call__", lambda self, *args: (seen.append((args[0].detach(), args[1])), plain(self, *args))[1]
    )
    FlexRound(bits=2, group_size=16, iterations=1, lr=1e-8, lfq=True).apply(model, MethodContext(batches=[batch]))
    (output,) = last_hidden(model, [batch])
    assert torch.equal(seen[0][1], target)
    assert torch.allclose(seen[0][0], output, atol=1e-4) and not torch.allclose(seen[0][0], target, atol=1e-2)


def test_a_network_without_a_language_head_is_refused() -> None:
    with pytest.raises(ModelError, match="lfq needs a language model"):
        OmniQuant(bits=4, group_size=16, lfq=True).apply(
            Model(BUILDS["bert"]()), MethodContext(batches=[inputs("bert")])
        )
