"""Folding scales preserves every family's function; what cannot be folded exactly is skipped."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor

from smelt.compression.base import METHODS
from smelt.compression.quantization.layers import LayerGroup, layer_groups
from smelt.compression.quantization.scaling import ScaleSource, fold_scale, scale_source
from smelt.models.anatomy import Block
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from tests.tiny import BUILDS, TRANSFORMERS, inputs

POST_NORM = ("bert", "roberta", "distilbert", "mpnet", "opt-post-norm")
GATED = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")
RELU = ("opt", "opt-post-norm")


def random_scale(group: LayerGroup, source: ScaleSource) -> Tensor:
    return source.foldable(torch.rand(group.columns, dtype=torch.float64) * 3 + 0.2)


def every_source(blocks: tuple[Block, ...]) -> list[tuple[LayerGroup, ScaleSource | None]]:
    return [(group, scale_source(block, group)) for block in blocks for group in layer_groups(block)]


@pytest.mark.parametrize("name", TRANSFORMERS)
@torch.no_grad()
def test_folding_preserves_the_function(name: str) -> None:
    network = BUILDS[name]().double()
    batch = {key: t.double() if t.is_floating_point() else t for key, t in inputs(name).items()}
    before = network(**batch).logits
    folded = 0
    for group, source in every_source(anatomy_of(network).blocks):
        if source is None:
            continue
        old = [layer.weight.clone() for layer in group.layers]
        fold_scale(group, source, random_scale(group, source))
        assert all(not torch.allclose(w, layer.weight) for w, layer in zip(old, group.layers, strict=True))
        folded += 1
    norms_and_values = 1 if name in (*POST_NORM, "all-attention") else 3  # which has persistent values and no FFN
    assert folded == 3 * norms_and_values + 3 * (name in (*GATED, *RELU))
    assert torch.allclose(network(**batch).logits, before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_fold_target_of_each_group(name: str) -> None:
    results = [None if source is None else source.name for _, source in every_source(anatomy_of(BUILDS[name]()).blocks)]
    norm = None if name in POST_NORM else "norm"
    feed_forward = [norm, "up projection" if name in (*GATED, *RELU) else None]
    assert results == 3 * ([norm, None] if name == "all-attention" else [norm, "values", *feed_forward])


def test_grouped_queries_share_the_mean_of_their_scales() -> None:
    anatomy = anatomy_of(BUILDS["llama"]())  # 4 query heads on 2 key/value heads of 8 channels
    group, source = every_source(anatomy.blocks)[1]
    assert source is not None
    scale = torch.arange(32.0)
    expected = torch.stack([scale[:16].reshape(2, 8).mean(0), scale[16:].reshape(2, 8).mean(0)])
    assert torch.equal(source.foldable(scale).reshape(2, 2, 8), expected[:, None].expand(2, 2, 8))
    assert group.columns == 32


def test_a_norm_without_weights_takes_no_scale() -> None:
    config = BUILDS["opt"]().config
    config.layer_norm_elementwise_affine = False
    anatomy = anatomy_of(hf.OPTForCausalLM(config))
    assert [scale_source(anatomy.blocks[0], group) is None for group in layer_groups(anatomy.blocks[0])] == [
        True, False, True, False,
    ]  # fmt: skip


@torch.no_grad()
def test_folding_after_heads_were_removed() -> None:
    import smelt.compression.pruning  # noqa: F401  (puts the methods on the list)
    from smelt.compression.base import MethodContext
    from tests.tiny import labeled

    for name in ("llama", "gpt2", "bert"):
        model = Model(BUILDS[name]())
        context = MethodContext(batches=[labeled(name)])
        METHODS.build({"method": "magnitude", "budget": {"macs": 0.6}, "repair": "none", "seq_len": 11}).apply(
            model, context
        )
        network = model.network.double()
        before = network(**inputs(name)).logits
        for group, source in every_source(anatomy_of(network).blocks):
            if source is not None:
                fold_scale(group, source, random_scale(group, source))
        assert torch.allclose(network(**inputs(name)).logits, before, rtol=1e-10, atol=1e-10)
