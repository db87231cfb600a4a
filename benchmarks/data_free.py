"""ResNet-20 quantized without data: noise, matched batch norms, single-class and mixup-class prompts, and real images.

    PYTHONPATH=src:benchmarks python benchmarks/data_free.py [--device cuda] [--jobs 12] [--seeds 0 1 2] [--resume]
    PYTHONPATH=src:benchmarks python benchmarks/data_free.py --smoke --device cpu --jobs 1

Every row calibrates the same float network on as many images of one source, by BRECQ or QDrop with the same updates,
and differs in nothing else. Accuracy is that of the packed network on the test images of CIFAR-10 (lossy JPEG copies of
the shared folder), on which the published network is trained for some epochs first. The generator is our own
class-conditional diffusion model of examples/train/cifar10-diffusion.yaml, trained here on the training images; it
stands in for the text-to-image model of the paper. Single-class and mixup-class prompts have the same seeds. The
generalization gap is the reconstruction loss of the last block on test images less that on the calibration images.
Networks, generator and images are kept in `--folder`; rows are written as they are finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch
from cifar_resnet import PROCESSOR, write_model
from common import table
from qat_cifar import accuracy, images, train_dense
from qat_runs import Grid, Row, add_options, flags, mean_and_seeds, train_cells, work_folder
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_runs import cifar10

from smelt.compression.base import MethodContext
from smelt.compression.calibration.image_sources import synthetic_batches
from smelt.compression.distillation.training_run import process_group
from smelt.compression.methods import METHODS
from smelt.compression.quantization.brecq import reconstruction_loss
from smelt.models.load import load
from smelt.models.model import Model
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.trainer import Trainer

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train" / "cifar10-diffusion.yaml"
NEAREST = "nearest"
METHOD_NAMES = {"BRECQ": None, "QDrop": 0.5}
SOURCES = {
    "noise": "noise",
    "matched batch norms": "none",
    "single-class prompts": "generated:{folder}/generator/model?classes=single",
    "mixup-class prompts": "generated:{folder}/generator/model?classes=mixup",
    "real images": None,
}
ITERATIONS_SHARE = {2: 1.0, 4: 0.5}  # of --iterations: fewer decide at 4 bits
BATCH_SIZE, LR, ACTIVATION_LR = 32, 2e-2, 1e-3
TEST_BATCH = 500
MATCHED_BATCH = 256  # images whose statistics are matched together


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_cell(cell, options))
        return
    with work_folder(options):
        cifar10(options.folder)
        sizes = ("images", "iterations", "generator_steps", "dense_epochs", "sampling_steps", "test")
        grid = Grid(__file__, options, flags(options, *sizes, "smoke", "small_generator"), key, text)
        networks = [{"row": "float"}, {"row": "generator"}]
        grid.prepare([cell for cell in networks if not (options.folder / cell["row"]).exists()])
        sets = [{"row": "images", "source": source, "seed": seed} for seed in options.seeds for source in SOURCES]
        grid.prepare([cell for cell in sets if not images_file(cell, options).exists()])
        grid.run(grid.missing(cells(options)))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "data_free", seeds=[0, 1, 2], jobs=12)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4], help="of weights; activations have 4")
    parser.add_argument("--images", type=int, default=1024, help="for calibration")
    parser.add_argument("--test", type=int, default=10_000, help="test images")
    parser.add_argument("--iterations", type=int, default=400, help="updates per block at 2 bits")
    parser.add_argument("--generator-steps", type=int, default=2500)
    parser.add_argument("--sampling-steps", type=int, default=50)
    parser.add_argument("--dense-epochs", type=float, default=8.0, help="0: the published network as it is")
    parser.add_argument("--small-generator", action="store_true", help="for CPUs: a fiftieth of the computation")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few images and updates; writes no results")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.bits, options.images, options.test = [0], [2], 8, 100
        options.iterations, options.generator_steps, options.sampling_steps, options.dense_epochs = 4, 2, 2, 0.0
        options.small_generator = True
    return options


def cells(options: argparse.Namespace) -> list[Row]:
    trained = [
        {"row": "quantized", "source": source, "method": method, "bits": bits, "seed": seed}
        for bits in options.bits for seed in options.seeds for source in SOURCES for method in METHOD_NAMES
    ]  # fmt: skip
    nearest = {"row": "quantized", "source": "real images", "method": NEAREST}
    return [{**nearest, "bits": bits, "seed": seed} for bits in options.bits for seed in options.seeds] + trained


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name)) for name in ("row", "source", "method", "bits", "seed"))


def run_cell(cell: Row, options: argparse.Namespace) -> Row:
    if options.device == "cpu":
        torch.set_num_threads(1)
    begun = time.monotonic()
    run = {"float": float_cell, "generator": generator_cell, "images": images_cell, "quantized": quantized_cell}
    facts = run[cell["row"]](cell, options)
    return {**cell, **facts, "seconds": time.monotonic() - begun}


def float_cell(cell: Row, options: argparse.Namespace) -> Row:
    """Train the published network on the lossy copies."""
    model = load(str(write_model(options.folder / "published")), device=options.device)
    before = accuracy(model, options, options.test, TEST_BATCH)
    if options.dense_epochs:
        training = argparse.Namespace(device=options.device, epochs=options.dense_epochs, compile=False)
        train_dense(model, images(options.folder, "train", options.device), training)
    folder = options.folder / "float"
    model.network.save_pretrained(folder)
    model.image_processor.save(folder)
    return {"published_accuracy": before, "accuracy": accuracy(model, options, options.test, TEST_BATCH)}


def generator_cell(cell: Row, options: argparse.Namespace) -> Row:
    """Train the generator by the example's configuration, as `smelt train` does."""
    config = TrainConfig.load(EXAMPLE)
    device = torch.device(options.device)
    small = {"hidden_sizes": [16, 24, 32], "num_res_blocks": 1, "attention_levels": [2], "num_attention_heads": 2}
    assert isinstance(config.model, dict)
    config = dataclasses.replace(
        config, model={**config.model, **(small if options.small_generator else {})}, device=device.type,
        data=dataclasses.replace(config.data, train=str(options.folder / "cifar10.npz")),
        steps=options.generator_steps, batch_size=64 if options.small_generator else config.batch_size,
        precision=config.precision if device.type == "cuda" else "off",
        schedule=dataclasses.replace(config.schedule, warmup_steps=options.generator_steps // 15),
        evaluate=dataclasses.replace(config.evaluate, every=None, samples=100 if options.smoke else 2000),
        checkpoint=dataclasses.replace(config.checkpoint, every=None),
    )  # fmt: skip
    with process_group(device):
        trainer = Trainer(config, options.folder / "generator", device, resume=False, resplit=False)
        entries = list(trainer.steps())
    parameters = sum(parameter.numel() for parameter in trainer.task.network.parameters())
    return {"parameters": parameters, "loss": entries[-1]["evaluation"]["loss"], "steps": options.generator_steps}


def images_file(cell: Row, options: argparse.Namespace) -> Path:
    path: Path = options.folder / f"images-{cell['source'].replace(' ', '-')}-{cell['seed']}.safetensors"
    return path


def images_cell(cell: Row, options: argparse.Namespace) -> Row:
    """Make the calibration images of a source."""
    source = SOURCES[cell["source"]]
    if source is None:
        train = images(options.folder, "train", "cpu")["pixel_values"]
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cell["seed"]))
        values = train[order[: options.images]]
    else:
        source = source.format(folder=options.folder)
        source += f"&steps={options.sampling_steps}" if source.startswith("generated:") else ""
        drawn = synthetic_batches(
            source, float_model(options), samples=options.images, seq_len=1, batch_size=MATCHED_BATCH, seed=cell["seed"]
        )
        values = torch.cat([batch["pixel_values"] for batch in drawn])
    temporary = images_file(cell, options).with_suffix(".partial")
    save_file({"pixel_values": values.contiguous()}, temporary)
    temporary.rename(images_file(cell, options))
    return {}


def quantized_cell(cell: Row, options: argparse.Namespace) -> Row:
    values = load_file(images_file(cell, options))["pixel_values"]
    batches = [{"pixel_values": part.to(options.device)} for part in values.split(BATCH_SIZE)]
    original, model = float_model(options), float_model(options)
    updates = int(options.iterations * ITERATIONS_SHARE.get(cell["bits"], 1.0))
    step = {
        "method": "brecq", "bits": cell["bits"], "input_activations": "int4", "iterations": updates, "lr": LR,
        "activation_iterations": updates // 2, "activation_lr": ACTIVATION_LR,
        "qdrop": METHOD_NAMES.get(cell["method"]),
    }  # fmt: skip
    if cell["method"] == NEAREST:
        step |= {"iterations": 0, "activation_iterations": 0}
    with tempfile.TemporaryDirectory() as folder:
        facts = METHODS.build(step).apply(model, MethodContext(batches=batches, seed=cell["seed"], folder=Path(folder)))
    errors = [layer["block_error"]["learned"] for layer in facts["layers"].values() if "block_error" in layer]
    test = images(options.folder, "test", options.device, min(options.test, 2048))["pixel_values"]
    real, calibration = (last_block_loss(original, model, part) for part in (test, values.to(options.device)))
    return {
        "accuracy": accuracy(model, options, options.test, TEST_BATCH), "real_loss": real,
        "calibration_loss": calibration, "block_errors": errors, "updates": updates,
        "bits_per_weight": facts["bits_per_weight"],
    }  # fmt: skip


def float_model(options: argparse.Namespace) -> Model:
    model = load(str(options.folder / "float"), device=options.device)
    assert model.image_processor is not None and model.image_processor.values["image_mean"] == PROCESSOR["image_mean"]
    return model


@torch.no_grad()
def last_block_loss(original: Model, model: Model, values: Tensor) -> float:
    """Return the mean reconstruction loss of the last block's output."""
    outputs: list[Tensor] = []
    hooks = [
        each.anatomy.blocks[-1].module.register_forward_hook(lambda _, args, output: outputs.append(output))
        for each in (original, model)
    ]
    losses = []
    for part in values.split(256):
        outputs.clear()
        original.network(part)
        model.network(part)
        losses.append(float(reconstruction_loss(outputs[1], outputs[0], None)) * len(part))
    for hook in hooks:
        hook.remove()
    return sum(losses) / len(values)


def text(rows: list[Row], options: argparse.Namespace) -> str:
    quantized = [row for row in rows if row["row"] == "quantized"]
    dense, generator = (next((row for row in rows if row["row"] == name), {}) for name in ("float", "generator"))
    order = [*METHOD_NAMES, NEAREST]
    quantized.sort(key=lambda row: (row["bits"], order.index(row["method"]), list(SOURCES).index(row["source"])))
    lines = []
    for bits, method, source in dict.fromkeys((row["bits"], row["method"], row["source"]) for row in quantized):
        matching = [row for row in quantized if (row["bits"], row["method"], row["source"]) == (bits, method, source)]
        same = sorted(matching, key=lambda row: row["seed"])
        gaps = [row["real_loss"] - row["calibration_loss"] for row in same]
        lines.append([
            f"W{bits}A4", method, source, *mean_and_seeds([100 * row["accuracy"] for row in same]),
            f"{statistics.mean(row['calibration_loss'] for row in same):.2f}",
            f"{statistics.mean(row['real_loss'] for row in same):.2f}",
            f"{statistics.mean(gaps):+.2f}", ", ".join(f"{gap:+.2f}" for gap in gaps),
        ])  # fmt: skip
    headings = ["bits", "method", "calibration images", "accuracy, %", "by seed", "loss on them", "loss on test images",
                "gap", "by seed"]  # fmt: skip
    missing = len(cells(options)) - len(quantized)
    cut = f" {missing} rows are missing: the run was cut off." if missing > 0 else ""
    float_line = (
        f"Float: {100 * dense.get('accuracy', 0):.2f} % after {options.dense_epochs:g} epochs on the copies, "
        f"{100 * dense.get('published_accuracy', 0):.2f} % before"
    )
    return (
        f"# Quantization of ResNet-20 on CIFAR-10 (JPEG copies) without data\n\n{float_line}; {options.test:,} test "
        f"images. Generator: {generator.get('parameters', 0):,} parameters, {generator.get('steps', 0):,} steps in "
        f"{generator.get('seconds', 0):.0f} s, loss {generator.get('loss', 0):.4f}, {options.sampling_steps} sampling "
        f"steps. {options.images:,} calibration images in batches of {BATCH_SIZE}; {options.iterations:,} updates per "
        f"block at 2 bits, half as many at 4 and for the activations of BRECQ. First convolution and classifier stay "
        f"in float, batch norms are folded. Losses are squared errors of the last block's output.{cut}\n\n"
        + table(headings, lines)
    )


if __name__ == "__main__":
    main()
