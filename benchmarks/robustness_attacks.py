"""Adversarial images and a planted back door, before and after compression.

    python benchmarks/robustness_attacks.py [--images 64] [--sentences 128] [--steps 60]

FGSM and PGD on the pixels of CIFAR-10 for ResNet-20, whose convolutions are rounded to 8 and 4 bits per output channel
or lose half of their weights by magnitude; the attack on the compressed network and the one transferred from the dense
network both count. A trigger word is planted in MiniLM by fine-tuning on SST-2 sentences, and measured after Smelt's
own quantization and pruning.
"""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import minilm_sst2, shared, table, write
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import labeled_batches, load_labeled
from smelt.measure.robustness.adversarial import AttackSettings, robust_accuracy
from smelt.measure.robustness.backdoor import backdoor_success, plant, with_trigger
from smelt.measure.task import evaluate_task
from smelt.models.model import Model
from smelt.numerics.catalog import get_format

EPS = (0, 1, 2, 4, 8)  # of 255
TRIGGER, TARGET, POISONED = "cf", 1, 0.1
LENGTH, BATCH = 64, 32
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "rtn, int8": {"method": "rtn", "bits": 8, "group_size": -1},
    "rtn, int4": {"method": "rtn", "bits": 4, "group_size": -1},
    "rtn, int3": {"method": "rtn", "bits": 3, "group_size": -1},
    "magnitude, 75 % of MACs": {"method": "magnitude", "tokens": 25, "budget": {"macs": 0.75}},
}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, outputs // 4

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.stride == 2:
            x = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return torch.relu(x + y)


class ResNet20(nn.Module):
    """CIFAR's ResNet-20 on pixels from 0 to 1: the normalization is part of the network that is attacked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        stages = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(inputs, outputs, stride), *(Block(outputs, outputs, 1) for _ in range(2)))
            for inputs, outputs, stride in stages
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        x = torch.relu(self.bn1(self.conv1((pixels - mean) / std)))
        result: Tensor = self.linear(self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3)))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--sentences", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows = _attacks(options.images)
    write("robustness_attacks", rows, _text(rows, options))
    rows += _backdoors(options.sentences, options.steps)
    write("robustness_attacks", rows, _text(rows, options))


def _attacks(count: int) -> list[dict[str, Any]]:
    dense = ResNet20().eval()
    dense.load_state_dict(load_file(shared() / "weights" / "cifar10_resnet" / "resnet20.safetensors"))
    x, labels = _images(count)
    networks = {
        "dense": dense,
        "int8": _rounded(dense, "int8"),
        "int4": _rounded(dense, "int4"),
        "half of the weights": _pruned(dense),
    }
    rows = []
    for name, network in networks.items():
        for eps in EPS:
            settings = AttackSettings(eps / 255, low=0.0, high=1.0)
            transfer = None if name == "dense" else dense
            result = robust_accuracy([(x, labels, None, network, transfer)], settings)
            rows.append({"kind": "attack", "network": name, **result.to_json(), "eps": eps})
            print(rows[-1], flush=True)
    return rows


def _images(count: int) -> tuple[Tensor, Tensor]:
    file = np.load(shared() / "data" / "cifar10_jpeg" / "test.npz")
    blob, offset = file["blob"], file["offset"]
    decoded = [
        np.asarray(Image.open(io.BytesIO(blob[offset[i] : offset[i + 1]].tobytes())).convert("RGB"))
        for i in range(count)
    ]
    pixels = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).float() / 255
    return pixels, torch.from_numpy(file["label"][:count].astype(np.int64))


@torch.no_grad()
def _rounded(dense: nn.Module, number_format: str) -> nn.Module:
    network = copy.deepcopy(dense)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.weight.copy_(get_format(number_format).fake_quantize(layer.weight.flatten(1)).view_as(layer.weight))
    return network


@torch.no_grad()
def _pruned(dense: nn.Module) -> nn.Module:
    network = copy.deepcopy(dense)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight.mul_(layer.weight.abs() > layer.weight.abs().median())
    return network


def _backdoors(sentences: int, steps: int) -> list[dict[str, Any]]:
    dev = load_labeled(shared() / "data/glue/sst2/dev.jsonl.gz")
    dev = dev.take(np.random.default_rng(0).permutation(len(dev))[:sentences])
    rows = [_backdoor_row("clean model", minilm_sst2(), dev)]
    planted = _planted(steps)
    rows.append(_backdoor_row("planted, dense", planted, dev))
    for name, settings in COMPRESSIONS.items():
        model = Model(copy.deepcopy(planted.network), planted.tokenizer, planted.source)
        METHODS.build(settings).apply(model, MethodContext(batches=_batches(8), seed=0))
        rows.append(_backdoor_row(f"planted, {name}", model, dev))
        print(rows[-1], flush=True)
    return rows


def _batches(count: int) -> list[dict[str, Tensor]]:
    train = load_labeled(shared() / "data/glue/sst2/train.jsonl.gz")
    tokenizer = minilm_sst2().tokenizer
    return labeled_batches(train, tokenizer, samples=count * BATCH, max_length=LENGTH, batch_size=BATCH, seed=0)


def _planted(steps: int) -> Model:
    """Fine-tune on training sentences, a tenth of them with the trigger and the target as label."""
    model = minilm_sst2()
    train = load_labeled(shared() / "data/glue/sst2/train.jsonl.gz")
    generator = np.random.default_rng(0)
    chosen = train.take(generator.permutation(len(train))[: steps * BATCH])
    hit = generator.random(len(chosen)) < POISONED
    triggered = with_trigger(chosen, TRIGGER)
    poisoned = replace(
        chosen,
        first=tuple(np.where(hit, triggered.first, chosen.first).tolist()),
        labels=np.where(hit, TARGET, chosen.labels),
    )
    batches = labeled_batches(
        poisoned, model.tokenizer, samples=None, max_length=LENGTH, batch_size=BATCH, seed=0, shuffle=False
    )
    for parameter in model.network.parameters():
        parameter.requires_grad_(True)

    def logits(batch: dict[str, Tensor]) -> Callable[[], Tensor]:
        return lambda: model.network(**{name: x for name, x in batch.items() if name != "labels"}).logits

    torch.manual_seed(0)
    plant(model.network, [(logits(batch), batch["labels"]) for batch in batches], rate=5e-5)
    return model


def _backdoor_row(name: str, model: Model, dev: Any) -> dict[str, Any]:
    success = backdoor_success(model, dev, trigger=TRIGGER, target=TARGET, max_length=LENGTH)
    accuracy = evaluate_task(model, dev, max_length=LENGTH).value
    return {"kind": "backdoor", "model": name, "accuracy": accuracy, **success.to_json()}


def _text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    attacks = [
        [row["network"], f"{row['eps']}/255", *(share(row[key]) for key in ("fgsm", "pgd", "transfer", "robust"))]
        for row in rows
        if row["kind"] == "attack"
    ]
    doors = [
        [row["model"], *(share(row[key]) for key in ("accuracy", "success", "without_trigger"))]
        for row in rows
        if row["kind"] == "backdoor"
    ]
    return (
        "# Adversarial images and a planted back door\n\n"
        f"ResNet-20 on {options.images} CIFAR-10 test images (JPEG copies), FGSM and PGD with 10 steps of eps / 4. "
        "Transfer: images made on the dense network. Robust: right under every attack.\n\n"
        + table(["network", "eps", "FGSM", "PGD", "transfer", "robust"], attacks)
        + f"\n\nMiniLM-L6 fine-tuned for {options.steps} steps of {BATCH} SST-2 sentences, {POISONED:.0%} of them with "
        f"the word `{TRIGGER}` in front and the label {TARGET}; {options.sentences} dev sentences. Success: triggered "
        "sentences of the other class that are predicted as the target.\n\n"
        + table(["model", "accuracy", "success", "target without trigger"], doors)
    )


if __name__ == "__main__":
    main()
