"""Small trained networks for tests of quality: text, labeled rows, and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.data.batches import text_batches
from smelt.data.text import TextData
from smelt.measure.divergence import Divergence, logit_divergence
from smelt.models.model import Model
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS


def sentences(count: int, seed: int = 0) -> str:
    generator = np.random.Generator(np.random.PCG64(seed))
    nouns, verbs = ("cat", "dog", "bird", "child"), ("sees", "likes", "follows")
    return " ".join(
        f"the {generator.choice(nouns)} {generator.choice(verbs)} the {generator.choice(nouns)}." for _ in range(count)
    )


def labeled_rows(count: int) -> list[dict[str, Any]]:
    generator = np.random.Generator(np.random.PCG64(0))
    rows = []
    for _ in range(count):
        label = int(generator.integers(2))
        word = generator.choice([("bad", "dull"), ("good", "fine")][label])
        rows.append({"sentence": f"a {word} {generator.choice(('film', 'book'))}", "label": label})
    return rows


@lru_cache(maxsize=4)
def trained_llama(text: str, steps: int = 100) -> PreTrainedModel:
    """Return the character language model; it is shared, so copy it before changing it."""
    tokens = torch.tensor(character_tokenizer()(text)["input_ids"])
    network = BUILDS["llama"]()

    def loss() -> Tensor:
        starts = torch.randint(len(tokens) - 64, (8,))
        batch = torch.stack([tokens[start : start + 64] for start in starts])
        return network(input_ids=batch, labels=batch).loss

    return _trained(network, loss, steps=steps)


def trained_bert(rows: list[dict[str, Any]]) -> PreTrainedModel:
    """Return the sentence classifier."""
    tokenizer, network = character_tokenizer(encoder=True), BUILDS["bert"]()
    batch = dict(tokenizer([row["sentence"] for row in rows], padding=True, return_tensors="pt"))
    labels = torch.tensor([row["label"] for row in rows])
    return _trained(network, lambda: network(**batch, labels=labels).loss, steps=60)


def _trained(network: PreTrainedModel, loss: Callable[[], Tensor], steps: int) -> PreTrainedModel:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return network.eval()


TEXT = sentences(2000)
HELD_OUT = TextData("held out", (sentences(60, seed=1),))


def character_model(source: str = "") -> Model:
    """Return a copy of the trained language model with its tokenizer."""
    return Model(copy.deepcopy(trained_llama(TEXT)), character_tokenizer(), source)


def character_batches(samples: int = 24, length: int = 64, batch: int = 2, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return its calibration data."""
    text = TextData("text", (TEXT,))
    return text_batches(text, character_tokenizer(), samples=samples, length=length, batch_size=batch, seed=seed)


def divergence(model: Model) -> Divergence:
    """Return a model's divergence from the trained one on unseen text."""
    return logit_divergence(model, character_model(), HELD_OUT, context=64)
