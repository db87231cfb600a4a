"""Fine-tune the bundled MiniLM on a GLUE task and save it as a classifier to compress.

    python benchmarks/finetune_glue.py --task rte --out minilm-rte

AdamW at 1e-4 with weight decay 0.01, batches of 128, linear decay after 6% of warmup, at most 128 tokens, bfloat16
autocast on a GPU. The embeddings are frozen, as in the SST-2 weights of the other benchmark.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import shared
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from smelt.data import Batch, LabeledData, labeled_batches, load_labeled
from smelt.files import atomic_folder
from smelt.measure.task import evaluate_task
from smelt.models.artifact import save_artifact
from smelt.models.load import load, resolve
from smelt.models.model import Model
from smelt.progress import progress_bars

RATE, DECAY, WARM_UP = 1e-4, 0.01, 0.06
BATCH, LENGTH = 128, 128
_WINDOW = 8  # batches whose rows are sorted by length


@dataclass(frozen=True)
class Task:
    """Number of outputs of the head (1 for regression), and the metric GLUE reports."""

    outputs: int
    metric: str


TASKS = {
    "sst2": Task(2, "accuracy"),
    "mrpc": Task(2, "f1"),
    "rte": Task(2, "accuracy"),
    "cola": Task(2, "matthews"),
    "stsb": Task(1, "spearman"),
    "wnli": Task(2, "accuracy"),
}


def main() -> None:
    options = _options()
    if options.out.exists():
        raise SystemExit(f"{options.out} exists already; choose another folder or remove it")
    task = TASKS[options.task]
    train, dev = glue_rows(options.task, "train"), glue_rows(options.task, "dev")
    if options.limit is not None:
        train = train.take(range(min(options.limit, len(train))))
    torch.manual_seed(options.seed)
    model = with_head(task.outputs, options.device)
    fine_tune(model, train, options.epochs, options.seed)
    quality = evaluate_task(model, dev, metric=task.metric, max_length=LENGTH)
    metadata = {"task": options.task, "rows": len(train), "epochs": options.epochs, "seed": options.seed}
    with atomic_folder(options.out) as folder:
        save_artifact(model, folder, {"fine_tuned": metadata, "quality": quality.to_json()})
    print(f"{quality.metric} on {quality.data}: {quality.value:.4f} ({len(dev)} rows), saved to {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; it must not exist yet")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--limit", type=int, help="use only so many training rows, the first ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def glue_rows(task: str, split: str) -> LabeledData:
    """Load a split under a name that does not depend on the folder."""
    data = load_labeled(shared() / "data/glue" / task / f"{split}.jsonl.gz")
    return replace(data, name=f"glue {task} {split}")


def with_head(outputs: int, device: str) -> Model:
    """Return the bundled encoder with a new classification head."""
    base = load("minilm-l6")
    config = BertConfig.from_pretrained(resolve("minilm-l6"), num_labels=outputs)
    network = BertForSequenceClassification(config)
    network.bert.load_state_dict(base.network.state_dict())
    network.bert.embeddings.requires_grad_(False)
    return Model(network.to(device), base.tokenizer, source="minilm-l6")


def fine_tune(model: Model, train: LabeledData, epochs: int, seed: int, *, similar_lengths: bool = False) -> None:
    """Train in place; batches of similar lengths have less padding, which saves half the time on a CPU."""
    network = model.network
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
    steps = epochs * -(-len(train) // BATCH)
    schedule = get_linear_schedule_with_warmup(optimizer, round(WARM_UP * steps), steps)
    batches = _batches(model, train, epochs, seed, similar_lengths)
    network.train()
    with progress_bars() as progress:
        for batch in progress.track(batches, "fine-tuning", total=steps):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                loss = network(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    network.eval().requires_grad_(True)


def _batches(model: Model, train: LabeledData, epochs: int, seed: int, similar_lengths: bool) -> Iterator[Batch]:
    """Yield all rows once per epoch, reshuffled each time."""
    for epoch in range(epochs):
        epoch_seed = epochs * seed + epoch
        generator = random.Random(epoch_seed)
        rows = train.take(_sorted_in_windows(train, generator)) if similar_lengths else train
        batches = labeled_batches(
            rows, model.tokenizer, samples=None, max_length=LENGTH, batch_size=BATCH, seed=epoch_seed,
            shuffle=not similar_lengths,
        )  # fmt: skip
        if similar_lengths:
            generator.shuffle(batches)
        yield from batches


def _sorted_in_windows(data: LabeledData, generator: random.Random) -> list[int]:
    """Return a random order whose windows of some batches are sorted by length."""
    order = list(range(len(data)))
    generator.shuffle(order)
    size = _WINDOW * BATCH
    windows = (order[start : start + size] for start in range(0, len(order), size))
    return [index for window in windows for index in sorted(window, key=lambda index: _characters(data, index))]


def _characters(data: LabeledData, index: int) -> int:
    return len(data.first[index]) + (0 if data.second is None else len(data.second[index]))


if __name__ == "__main__":
    main()
