"""Running block by block matches the network; mask gradients are exact; activations spill to disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from smelt.compression.calibration.block_inputs import ActivationStore, advance, capture_block_inputs
from smelt.compression.calibration.gradients import all_mask_gradients, batch_loss, mask_gradients
from smelt.compression.calibration.masks import masked, unit_masks
from smelt.compression.checkpoint import Checkpoint
from smelt.models.anatomy_builder import anatomy_of
from smelt.progress import NullProgress
from tests.tiny import BUILDS, labeled


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_running_the_blocks_matches_the_network(name: str) -> None:
    network = BUILDS[name]()
    anatomy = anatomy_of(network)
    batches = [labeled(name, seed) for seed in range(2)]
    outputs: dict[str, torch.Tensor] = {}
    block_inputs = capture_block_inputs(anatomy, batches)
    for block in anatomy.blocks:
        advance(block_inputs, block)
    last = anatomy.blocks[-1].module
    hook = last.register_forward_hook(lambda m, i, o: outputs.update(last=o[0] if isinstance(o, tuple) else o))
    for position, batch in enumerate(batches):
        network(**batch)
        assert torch.allclose(block_inputs.hidden[position], outputs["last"], atol=1e-6)
    hook.remove()


@pytest.mark.parametrize("name", BUILDS)
def test_mask_gradients_match_finite_differences(name: str) -> None:
    network = BUILDS[name]().double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in labeled(name).items()}
    anatomy = anatomy_of(network)
    gradients = mask_gradients(anatomy, batch).double()
    repeated = mask_gradients(anatomy, batch, checkpointing=True).double()
    assert torch.allclose(gradients, repeated, atol=1e-8)
    # A small step where activations have kinks, a large one where the loss is float32.
    step, tolerance = (1e-3, 1e-3) if name.startswith("resnet") else (1e-2, 2e-4)
    position = 0
    for index, part in enumerate(anatomy.parts):
        unit = part.units // 2
        losses = []
        for change in (step, -step):
            masks = [mask.double() for mask in unit_masks(anatomy)]
            masks[index][unit] += change
            with torch.no_grad(), masked(anatomy, masks):
                losses.append(batch_loss(network, batch).double())
        slope = float(losses[0] - losses[1]) / (2 * step)
        assert float(gradients[position + unit]) == pytest.approx(slope, rel=1e-2, abs=tolerance)
        position += part.units


def test_finished_gradients_are_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    batches = [labeled("llama", seed) for seed in range(10)]
    checkpoint = Checkpoint(tmp_path)
    uninterrupted = all_mask_gradients(anatomy_of(network), batches, NullProgress(), checkpoint)
    (tmp_path / "gradients-00008.safetensors").unlink()
    checkpoint.save("gradients-00000", {"gradients": torch.from_numpy(uninterrupted[:8]) * 2})
    resumed = all_mask_gradients(anatomy_of(network), batches, NullProgress(), checkpoint)
    assert np.array_equal(resumed[:8], uninterrupted[:8] * 2) and np.array_equal(resumed[8:], uninterrupted[8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_past_the_limit_spill_to_disk_and_are_read_back_unchanged(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = [torch.randn(3, 5, 7).to(dtype) for _ in range(4)]
    size = tensors[0].numel() * tensors[0].element_size()
    store = ActivationStore(limit=2 * size, folder=tmp_path)
    for position, tensor in enumerate(tensors):
        store[position] = tensor
    assert store.bytes_in_memory == 2 * size and len(list(tmp_path.rglob("*.raw"))) == 2
    store[3] = tensors[0]
    assert all(torch.equal(store[i], tensors[i]) for i in range(3)) and torch.equal(store[3], tensors[0])
