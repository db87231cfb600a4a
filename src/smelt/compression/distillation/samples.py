"""Training samples in memory, from the batches of a recipe: shuffled by index, augmented, on the device that trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import Batch
from smelt.errors import DataError
from smelt.train.trainer.dataloader import MapDataset

SAMPLE_INDICES = "sample_indices"  # of a batch: which samples it consists of, [batch]
CROP_PADDING = 4  # pixels around an image that a random crop may begin in
_LENGTH_MULTIPLE = 8  # batches of texts are padded to a multiple of this: few shapes, and aligned GEMMs


class Samples(MapDataset):
    """The samples of all batches, padded to the longest, as one tensor per input; batches have less padding."""

    def __init__(self, tensors: Batch, *, augment: bool = False, seed: int = 0) -> None:
        self.tensors, self._augment, self._seed = tensors, augment, seed
        mask = tensors.get("attention_mask")
        has_texts = mask is not None and mask.dim() == 2  # that of pairs has three; they keep their padding
        self._lengths = _text_lengths(tensors["attention_mask"]) if has_texts else None

    @classmethod
    def from_batches(cls, batches: Sequence[Batch], device: torch.device, *, augment: bool, seed: int) -> Samples:
        if not batches:
            raise DataError("there are no training samples; name data with --data.")
        longest = max((batch["input_ids"].shape[1] for batch in batches if "input_ids" in batch), default=0)
        tensors = {name: torch.cat([_pad(batch[name], longest) for batch in batches]).to(device) for name in batches[0]}
        if augment and "pixel_values" not in tensors:
            raise DataError("only images can be augmented; remove `augment`.")
        return cls(tensors, augment=augment, seed=seed)

    def split(self, fraction: float) -> tuple[Samples, Samples]:
        """Split off the last part, which is not augmented, for validation: at least one sample."""
        count = max(round(fraction * len(self)), 1)
        if count >= len(self):
            raise DataError(f"{len(self)} training samples are too few: some are held out for validation.")
        kept, held_out = (
            {name: t[part] for name, t in self.tensors.items()} for part in (np.s_[:-count], np.s_[-count:])
        )
        return Samples(kept, augment=self._augment, seed=self._seed), Samples(held_out)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batch(self, indices: np.ndarray) -> Batch:
        rows = torch.from_numpy(indices).to(next(iter(self.tensors.values())).device)
        batch = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        if self._lengths is not None:
            batch = _trim(batch, int(self._lengths[indices].max()))
        if self._augment:
            generator = torch.Generator().manual_seed(_hash(indices, self._seed))
            batch["pixel_values"] = crop_and_flip(batch["pixel_values"], generator)
        return batch


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop randomly out of zero-padded images and flip half of them: [batch, channels, height, width]."""
    batch, _, height, width = images.shape
    padded = F.pad(images, [CROP_PADDING] * 4)
    device = images.device
    top, left = (torch.randint(2 * CROP_PADDING + 1, (batch, 1), generator=generator).to(device) for _ in range(2))
    flip = (torch.rand(batch, 1, generator=generator) < 0.5).to(device)
    rows = top + torch.arange(height, device=device)  # [batch, height]
    across = torch.arange(width, device=device)
    columns = left + torch.where(flip, width - 1 - across, across)  # [batch, width]
    samples = torch.arange(batch, device=device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=device)[None, :, None, None]
    return padded[samples, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _text_lengths(mask: Tensor) -> np.ndarray:
    """Return the end of the last token of each sample, of one or several texts, on the host: [samples]."""
    positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    lengths: np.ndarray = (mask * positions).flatten(1).amax(dim=1).cpu().numpy()
    return lengths


def _trim(batch: Batch, longest: int) -> Batch:
    """Cut off padding that no text of the batch needs from all tensors with a value per token."""
    shape = batch["attention_mask"].shape  # [batch, tokens], or [batch, texts, tokens]
    length, dims = min(max(-(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, 1), shape[-1]), len(shape)
    return {
        name: tensor.narrow(dims - 1, 0, length) if tensor.shape[:dims] == shape else tensor
        for name, tensor in batch.items()
    }


def _pad(tensor: Tensor, longest: int) -> Tensor:
    """Pad token tensors [batch, tokens] with zeros, which the attention mask hides, or -100 if they are labels."""
    return F.pad(tensor, (0, longest - tensor.shape[1])) if tensor.dim() == 2 and longest else tensor


def _hash(indices: np.ndarray, seed: int) -> int:
    """Return a number that depends on the samples of a batch and their order only, so that a resumed run repeats it."""
    return int(np.random.SeedSequence([seed, *indices.tolist()]).generate_state(1, np.uint64)[0] >> 1)
